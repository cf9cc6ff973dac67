"""How a replica reads prompts in plain Python: what the compiled scheduler must equal."""

from dataclasses import dataclass
from math import ceil, inf, isnan

from tests.support.plain.memory import EPS, PlainBlock, PlainRequest, PlainSequence, by_class
from tests.support.plain.tiers import PlainTiers


@dataclass(eq=False)
class PlainPrompts(PlainTiers):
    """A replica's queue of prompts."""

    budget: int = 0
    preempted: int = 0
    next_ready: float = inf
    late_seats: int = 0  # of those that the pass before completed
    seen: float = inf  # requests that arrived later are not known to the pass yet

    def preempt(self) -> PlainSequence:
        """Take out the last sequence."""
        raise NotImplementedError

    def read_prompts(self) -> None:
        """Go on with prompts that have begun, then begin others in order."""
        for s in list(self.batch):
            if s.todo and s in self.batch:
                self.read_more(s)
        while self.waiting and not self.swapped and not self.preempted:
            if len(self.batch) + self.late_seats >= self.limits.max_seqs or self.budget <= 0:
                return
            if self.waiting[0].arrival > self.seen or not self.begin():
                return

    def read_more(self, sequence: PlainSequence) -> None:
        """Go on with a prompt, unless what comes next is still on its way."""
        if sequence.skip and sequence.done == sequence.skip_at:
            if sequence.ready > self.clock:
                self.next_ready = min(self.next_ready, sequence.ready)
                return
            sequence.done, sequence.skip = sequence.done + sequence.skip, 0
        part = min(sequence.todo, self.budget, self.longest_part)
        if sequence.skip:
            part = min(part, sequence.skip_at - sequence.done)
        elif not self.limits.chunked and part < sequence.todo:
            if any(other.chunk for other in self.batch):
                return
            part = sequence.todo
        if part > 0 and self.grow_prompt(sequence, sequence.done + part + sequence.skip):
            self.share(sequence, sequence.done + part)
            sequence.chunk = part
            self.budget -= part

    def grow_prompt(self, sequence: PlainSequence, tokens: float) -> bool:
        """Occupy memory for a prompt; prompts that began later make room, and at last itself."""
        rules = self.limits
        fits = self.grow(sequence, tokens)
        while not fits and rules.chunked and rules.decode_first and not rules.tiers:
            if len(self.batch) == 1 or not self.batch[-1].todo or self.preempt() is sequence:
                return False
            fits = self.grow(sequence, tokens)
        return fits

    @property
    def longest_part(self) -> int:
        """Of one prompt in a pass, which one lane reads. [tokens]"""
        return int(self.limits.part if self.limits.chunked else self.limits.max_tokens)

    def hits(self, request: PlainRequest, most: int) -> list[PlainBlock]:
        """Leading KV blocks of a request that the GPU holds now."""
        found = list[PlainBlock]()
        while len(found) < most and self.each:
            block = self.find(request, len(found))
            if block is None or block.arrives > self.clock:
                break
            found.append(block)
        return found

    def found_blocks(self, request: PlainRequest) -> int:
        """Leading KV blocks that the replica's own memories hold now."""
        blocks, n = len(self.hits(request, request.named)), int(self.limits.unit)
        units = self.units_of(request) if self.limits.tiers else []
        for j in range(blocks // n, len(units)):
            if self.source_of(units[j]) in (None, "remote"):
                break
            blocks = (j + 1) * n
        return blocks

    def begin(self) -> bool:
        """Begin the prompt that has waited longest, unless it has to wait."""
        r = self.waiting[0]
        length = r.prompt + r.made
        found = self.hits(r, (length - 1) // int(self.limits.block_tokens))
        hits, again = found[: r.named], found[r.named :]
        known = len(found) * int(self.limits.block_tokens)
        part = min(length - known, self.budget, self.longest_part)
        if not self.limits.chunked and part < length - known:
            if any(s.chunk for s in self.batch):
                return False
            part = length - known
        blocks = self.blocks(length if self.limits.whole_prompt else known + part)
        own = max(int(self.t.prompt_bytes[blocks]) - len(hits) * self.each, 0)
        new = [b for b in hits if not b.users]
        if own + len(new) * self.each > self.available():
            return False
        if int(self.t.host_bytes[blocks]) > self.host_room():
            return False
        if self.limits.whole_request and self.batch:
            own = max(self.whole(r, len(hits)), own)
            promised = sum(max(self.whole(s.request, s.shared) - s.held, 0) for s in self.batch)
            if own + len(new) * self.each + promised > self.available():
                return False
        self.waiting.pop(0)
        s = PlainSequence(r, length - known, known, len(hits))
        s.shares = {place: self.pin(block) for place, block in enumerate(hits)}
        for block in again:
            self.unused.remove(block)
            self.forget(block)
        s.held = len(again) * self.each
        for block in self.unused:  # what is left behind of its own tokens is found no more
            if block.key and block.key[:2] == ("own", r.index):
                self.forget(block)
        by_class(self.batch, s, r)
        if self.limits.tiers and not again:
            part = self.begin_to_load(s, part, self.budget)
            if not part:
                self.next_ready = min(self.next_ready, s.ready)
        assert self.grow(s, known + part + s.skip)
        self.share(s, known + part)
        s.chunk = part
        if isnan(r.started):
            r.started, r.hits = self.clock, known + s.skip
            self.whose["gpu"] = self.whose.get("gpu", 0) + known
        self.budget -= part
        return True

    def finish_prompt(self, sequence: PlainSequence) -> None:
        """A prompt yields its first token, and its full blocks are shared."""
        request = sequence.request
        request.made += 1
        if isnan(request.first):
            request.first = self.clock
        sequence.todo = 0
        if self.limits.tiers and request.named:
            self.store(request)
        sequence.length = request.prompt + request.made - 1
        sequence.held = self.own(sequence, sequence.length)
        more = request.generate - request.made
        sequence.left = ceil(more / request.rate - EPS)
        sequence.growth = more / sequence.left if more else 0.0

    def unread(self) -> int:
        """Prompt tokens of all requests here that are not read yet."""
        return sum(r.prompt + r.made for r in self.waiting) + sum(s.todo for s in self.batch)
