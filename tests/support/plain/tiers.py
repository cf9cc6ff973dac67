"""Stored prefix blocks in plain Python: what ``tiers`` must equal."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.plain.memory import PlainMemory, PlainRequest, PlainSequence, line, plane

NEAREST_FIRST = ("host", "nvme", "remote")
LINK = {"nvme": "nvme_read", "remote": "nic_in"}


@dataclass(eq=False)
class PlainStore:
    """A memory that keeps units of prefix blocks, the least recently used first."""

    limit: int
    units: dict[int, tuple[float, float]] = field(default_factory=dict)  # arrival, last use [s]
    stored: int = 0
    dropped: int = 0

    def drop(self, unit: int) -> None:
        """Forget a unit of shared blocks that this memory holds."""
        del self.units[unit]
        self.dropped += 1


@dataclass(eq=False)
class PlainTiers(PlainMemory):
    """A replica's other memories and the links to them."""

    waiting: list[PlainRequest] = field(default_factory=list)
    swapped: list[PlainRequest] = field(default_factory=list)
    stores: dict[str, PlainStore] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # [B/s]
    link_free: dict[str, float] = field(default_factory=dict)  # [s]
    link_bytes: dict[str, float] = field(default_factory=dict)
    host_swapped: int = 0
    whose: dict[str, int] = field(default_factory=dict)  # tokens found in each memory

    def make_host_room(self, size: int) -> bool:
        """Stored units give way to a swapped sequence; whether that suffices."""
        room = int(self.limits.host_cache) - self.host_swapped
        if room < size:
            return False
        host = self.stores["host"]
        while room - len(host.units) * int(self.limits.unit_bytes) < size:
            host.drop(next(iter(host.units)))
        return True

    def units_of(self, request: PlainRequest) -> list[int]:
        """Full units of a prompt, each under the id of its last block."""
        n, each = int(self.limits.unit // self.limits.parts), int(self.limits.parts)
        full = request.prompt // (int(self.limits.block_tokens) * each)
        return request.ids[:full][n - 1 :: n]

    def held_in(self, name: str, unit: int) -> bool:
        """Whether a memory has a unit or is to get it, and has not forgotten it."""
        store = self.stores[name]
        if unit in store.units and self.clock - store.units[unit][1] > self.limits.ttl:
            store.drop(unit)
        return unit in store.units

    def source_of(self, unit: int) -> str | None:
        """The nearest memory that a unit can be loaded from now."""
        for name in NEAREST_FIRST:
            if self.held_in(name, unit) and self.stores[name].units[unit][0] <= self.clock:
                return name
        return None

    def passed(self, link: str, size: float) -> float:
        """When bytes put on a link now would have passed."""
        if not size:
            return self.clock
        return max(self.clock, self.link_free.get(link, 0.0)) + size / self.rates[link]

    def transfer(self, link: str, size: float) -> float:
        """Put bytes on a link; one drive reads or writes, not both at once."""
        if not size:
            return self.clock
        end = self.passed(link, size)
        for each in ("nvme_read", "nvme_write") if link.startswith("nvme") else (link,):
            self.link_free[each] = end
        self.link_bytes[link] = self.link_bytes.get(link, 0.0) + size
        return end

    def put(self, name: str, unit: int, arrives: float) -> None:
        """A unit is the most recently used one of a memory from now on."""
        store = self.stores[name]
        limit = store.limit
        if name == "host":
            free = int(self.limits.host_cache) - self.host_swapped
            limit = min(limit, free // int(self.limits.unit_bytes))
        if not limit:
            return
        if unit in store.units:
            arrives = store.units.pop(unit)[0]
        else:
            while len(store.units) >= limit:
                store.drop(next(iter(store.units)))
            store.stored += 1
        store.units[unit] = (arrives, self.clock)

    def store(self, request: PlainRequest) -> None:
        """Copy a prompt's units to the memories that do not hold them."""
        each = int(self.limits.unit_bytes)
        lacking: dict[str, int] = dict.fromkeys(("d2h", *NEAREST_FIRST), 0)
        for unit in self.units_of(request):
            missing = {
                n for n in NEAREST_FIRST if self.stores[n].limit and not self.held_in(n, unit)
            }
            if missing and not self.held_in("host", unit):
                lacking["d2h"] += each
            for name in missing:
                lacking[name] += each
        down = self.transfer("d2h", lacking["d2h"])
        arrives = {
            "host": down,
            "nvme": max(down, self.transfer("nvme_write", lacking["nvme"])),
            "remote": max(down, self.transfer("nic_out", lacking["remote"])),
        }
        for unit in reversed(self.units_of(request)):
            for name in NEAREST_FIRST:
                self.put(name, unit, arrives[name])

    def sizes_by_link(self, units: list[int]) -> dict[str, float]:
        """Bytes that loading some units puts on each link."""
        each = int(self.limits.unit_bytes)
        sizes: dict[str, float] = {"h2d": 0.0, "nvme_read": 0.0, "nic_in": 0.0}
        for unit in units:
            sizes["h2d"] += each
            source = self.source_of(unit)
            if source in LINK:
                sizes[LINK[source]] += each
        return sizes

    def load_s(self, units: list[int]) -> float:
        """From now until units would be here."""
        sizes = self.sizes_by_link(units)
        return max(self.passed(link, size) for link, size in sizes.items()) - self.clock

    def recompute_s(self, first: int, last: int) -> float:
        """Reading a part of a prompt in passes of its own."""
        t, total = self.t, 0.0
        size = int(self.limits.part) if self.limits.chunked else last
        while first < last:
            part = min(size, last - first)
            nodes, cost = t.nodes, t.seconds
            for values, more in ((cost.token, part), (cost.routed, part), (cost.head, 0)):
                total += line(nodes.tokens, values, more) - line(nodes.tokens, values, 0)
            total += plane(nodes.chunks, nodes.starts, cost.chunk, part, first)
            first += part
        return total

    def first_loaded(self, units: list[int], first: int, begins: int, length: int) -> int:
        """Recompute the units before, and load those from it on."""
        last = len(units)
        how = ("split", "faster", "load", "recompute")[self.limits.load]
        tokens = int(self.limits.unit * self.limits.block_tokens)
        if how == "load":
            return first
        if how == "recompute":
            return last

        def recomputed(unit: int) -> float:
            return self.recompute_s(begins, max(unit * tokens, begins))

        def loaded(unit: int) -> float:
            return self.load_s(units[unit:last])

        def until_read(unit: int) -> float:
            if unit == last:
                return self.recompute_s(begins, length)
            behind = self.recompute_s(min(last * tokens, length - 1), length)
            return max(recomputed(unit), loaded(unit)) + behind

        queued = len(self.waiting) + len(self.swapped)
        reading = sum(s.todo > 0 for s in self.batch)
        decoding = (len(self.batch) - reading) * min(0.1 + 0.2 * queued, 1)
        others = queued + reading - 1 + decoding
        loading = sum(s.skip > 0 for s in self.batch)

        def with_others(unit: int) -> float:
            if unit == last:
                return until_read(unit) + 2 * others * self.recompute_s(begins, length)
            wait = 2 * loading * loaded(unit)
            return until_read(unit) + wait + 2 * others * recomputed(unit)

        crossing = first
        if how == "split" and self.limits.chunked:
            while crossing < last and recomputed(crossing) < loaded(crossing):
                crossing += 1
        return min((first, max(crossing - 1, first), crossing, last), key=with_others)

    def begin_to_load(self, sequence: PlainSequence, part: int, budget: int) -> int:
        """Begin to load stored units behind the blocks on the GPU; tokens to read in this pass."""
        request, n, tokens = sequence.request, int(self.limits.unit), int(self.limits.block_tokens)
        units = self.units_of(request)
        first = last = sequence.shared // n
        while last < len(units) and self.source_of(units[last]) is not None:
            last += 1
        if first == last:
            return part
        length = sequence.done + sequence.todo
        chosen = self.first_loaded(units[:last], first, sequence.done, length)
        begin, end = max(chosen * n, sequence.shared), last * n
        skip_at = max(begin * tokens, sequence.done)
        skip = min(end * tokens, length - 1) - skip_at
        if chosen == last or skip <= 0:
            return part
        part = min(skip_at - sequence.done, budget)
        there = [self.find(request, place) for place in range(begin, end)]
        new = [b for b in there if b is None or not b.users]
        size = int(self.t.prompt_bytes[self.blocks(sequence.done + part + skip)])
        own = max(size - (sequence.shared + end - begin) * self.each, 0)
        if own + len(new) * self.each > self.available() + sequence.held:
            return min(sequence.todo, budget) if self.limits.chunked else sequence.todo
        ends = [
            self.transfer(link, size)
            for link, size in self.sizes_by_link(units[chosen:last]).items()
        ]
        for j in range(last - 1, chosen - 1, -1):
            source: Any = self.source_of(units[j])
            self.put(source, units[j], 0.0)
            if request.started != request.started:
                low, high = max(j * n * tokens, skip_at), min((j + 1) * n * tokens, length - 1)
                self.whose[source] = self.whose.get(source, 0) + max(high - low, 0)
        sequence.ready = max(ends)
        for place in range(begin, end):
            if (block := self.find(request, place)) is None:
                self.make_room(self.each)
                sequence.shares[place] = self.add(request, place, sequence.ready)
            else:
                sequence.shares[place] = self.pin(block)
        sequence.shared += end - begin
        sequence.skip, sequence.skip_at = skip, skip_at
        sequence.todo -= skip
        return part
