"""A technique run for its times: to the first token, round by round, and op by op.

Rounds may be replayed as CUDA graphs: issued kernel by kernel once, replayed with one launch later.
A round is the same work as an earlier one where shapes and addresses are the same; everything else
that changes between rounds has to be on the device. Implementations say so by ``eager_reason`` and
``branch``. The first round of a branch is issued as it is, which compiles and chooses kernels, the
second one is captured, and from there on it is replayed. Where that cannot be, rounds are issued
kernel by kernel, and ``why`` says what for.

A graph reads the room that its cache has, not the tokens that are in it; and a short run has some
rounds and not others, as those in which a block of keys is packed. So a prediction for such rounds
is that of the work they dispatch (``Replay``), in place of the mean over a generation.
"""

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvsim.errors import first_line
from kvsim.frozen import frozen
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind, NullCounter, size
from kvsim.validate.counts.compare import as_run
from kvsim.validate.counts.expected import RandomPrompts, Replay
from kvsim.validate.machine import refusals
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.run import Generation
from kvsim.validate.times.clock import Clock, TimedPass, computing_clock, undisturbed
from kvsim.validate.times.compared import ISSUED


class ReplayedRounds:
    """Run the decoding rounds of a generation, as CUDA graphs where possible.

    Rounds with the same key (``Composed.branch``) do the same work. The first is launched kernel
    by kernel, the second is captured, and the captured graph runs from then on.

    Parameters
    ----------
    run
        Generation that has finished its prefill.

    Attributes
    ----------
    why
        Why rounds cannot run as CUDA graphs; empty if they can.
    replayed
        Number of rounds that ran as CUDA graphs so far.
    """

    def __init__(self, run: Generation) -> None:
        self.run = run
        self.why = run.impl.eager_reason  # rounds are not replayed; empty where they are
        if run.temperature or run.keep:
            self.why = "tokens are drawn, or logits are kept"
        self.replayed = 0  # rounds so far
        self._issued: set[Hashable] = set()  # branches that have been issued once
        self._graphs: dict[Hashable, Callable[[], None]] = {}

    @torch.inference_mode()
    def ready(self) -> bool:
        """Return whether the next round will run as a CUDA graph, after capturing it if needed."""
        key = self.run.impl.branch(self.run.cached)
        if self.why or key not in self._issued:
            return False
        if key not in self._graphs:
            try:
                self._graphs[key] = captured(self.run.decode_in_place)
            except refusals() as problem:
                self.why = f"it could not be captured: {first_line(problem, 120)}"
        return not self.why

    @torch.inference_mode()
    def round(self) -> None:
        """Run one decoding round, as a CUDA graph if it has been captured."""
        run = self.run
        if self.why:
            run.impl.decode_round(run)
            return
        key = run.impl.branch(run.cached)
        replay = self._graphs.get(key)
        if replay is None:
            self._issued |= {key} - {None}
            run.decode_in_place()
        else:
            replay()
            self.replayed += 1
        run.decoded_in_place()


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work as a CUDA graph on the current GPU, without running it.

    Parameters
    ----------
    work
        Launches kernels; must not synchronise with the host.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def next_replay(run: Generation) -> Replay:
    """Describe the round that a generation does next, if it is replayed.

    Parameters
    ----------
    run
        A generation between two rounds.
    """
    impl = run.impl
    decoded = run.generate if impl.reads_all_slots else run.done[0]
    return Replay(decoded - 1, impl.op_shares(run.cached))


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of all tensors created within the context that are still in use.

    Memory that kernels allocate themselves is not seen; tensors created before do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held, self.peak = 0, 0  # [B]
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._add(storage)
        return out

    def _add(self, storage: UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.held -= size

        self._known[key] = weakref.ref(storage, freed)
        self.held += size
        self.peak = max(self.peak, self.held)


def _storages(values: object) -> Iterator[UntypedStorage]:
    for value in tree_iter(values):
        if isinstance(value, Tensor):
            yield value.untyped_storage()


TOO_FEW_ROUNDS = "no branch came up twice in so few rounds"


@frozen
class Timing:
    """Times and memory of one run."""

    technique: Technique  # the technique, with the acceptance of the run
    ttft: float  # time to first token [s]
    rounds: tuple[float, ...]  # time of each decoding round [s]
    computing: tuple[float, ...]  # CPU time of the thread, or launch time, per round [s]
    tokens: int  # tokens per sequence that the rounds generated
    resident: int  # technique's own tensors after the last round, in both tiers [B]
    passes: tuple[TimedPass, ...]  # timed passes, if ops were timed
    eager: str | None = None  # why no round was replayed as a CUDA graph; none if all of them were
    replays: tuple[Replay, ...] = ()  # work of the replayed rounds

    @property
    def tpot(self) -> float:
        """Time per token after the first. [s]"""
        return sum(self.rounds) / self.tokens


class LayerWatch:
    """Reads a clock at the end of every layer, to estimate the undisturbed time of layers.

    A busy machine interrupts a round every few milliseconds and leaves cold caches behind. Layers
    after the first therefore count with the time of those that were not interrupted, and so does
    the rest of a round.

    Parameters
    ----------
    own
        Clock of the compute thread's CPU time, which excludes waits. [s]
    """

    def __init__(self, run: Generation, own: Callable[[], float]) -> None:
        self._layers = run.impl.model.layers
        self._passes: list[list[float]] = []  # of this round, the clock at the end of each layer
        self._rounds: list[list[list[float]]] = []  # what layers took, by pass
        before, forward = run.impl.on_layer_output, run.forward

        def look(layer: int, hidden: Tensor, step: Pass) -> None:
            before(layer, hidden, step)
            if self._passes:
                self._passes[-1].append(own())

        def passing(tokens: Tensor, kind: Kind, ahead: int = 0, fixed: bool = False) -> Tensor:
            self._passes.append([])
            return forward(tokens, kind, ahead, fixed)

        vars(run)["forward"], vars(run.impl)["on_layer_output"] = passing, look

    def end_round(self) -> None:
        """End a round, and store the times of its layers after the first."""
        found = []
        for marks in self._passes:
            each, rest = divmod(len(marks), self._layers)
            if self._layers > 2 and each and not rest:
                found.append([b - a for a, b in pairwise(marks[each - 1 :: each])])
        self._rounds.append(found)
        self._passes = []

    def undisturbed(self, computing: Sequence[float]) -> list[float]:
        """Estimate the time of rounds without interruptions. [s]

        Parameters
        ----------
        computing
            Measured time of each round. [s]
        """
        if {len(some) for some in self._rounds} != {1}:  # passes of several kinds
            return list(computing)
        sums = [sum(layers) for (layers,) in self._rounds]
        others = [took - inside for took, inside in zip(computing, sums, strict=True)]
        layer = undisturbed([took for (layers,) in self._rounds for took in layers])
        other = undisturbed(others)
        return [
            min(inside, layer * len(layers)) + min(outside, other)
            for inside, outside, (layers,) in zip(sums, others, self._rounds, strict=True)
        ]


@torch.inference_mode()
def run_timed(
    decoder: Decoder,
    technique: Technique,
    work: RandomPrompts,
    by_op: bool = False,
    busy: Mapping[str, float] | None = None,
    graphs: bool = False,
) -> Timing:
    """Run a generation once, and measure the time of its prefill and of each decoding round.

    Parameters
    ----------
    decoder
        The model, on the device to measure.
    by_op
        Measure each op too, which slows the run down.
    busy
        Host time to launch each op, by name, as :func:`issuing` returns it. The GPU is then kept
        busy before each op, so that the measured times of ops do not include their launch. [s]
    graphs
        Run decoding rounds as CUDA graphs where possible. Once there are any, times of rounds that
        were launched kernel by kernel are left out of the result.
    """
    clock = Clock(decoder.device, busy)
    prompts = work.prompts(decoder.arch.model.vocab)
    run = Generation(
        replace(decoder, counter=clock) if by_op else decoder, technique, prompts, work.generate
    )
    rounds, computing = [], []
    on_cpu = decoder.device.type == "cpu"
    own = computing_clock() if on_cpu else perf_counter
    watch = None if by_op or not on_cpu else LayerWatch(run, own)
    try:
        begin = _read_clock(decoder.device)
        run.start()
        ttft = _read_clock(decoder.device) - begin
        replaying = ReplayedRounds(run) if graphs else None
        again: list[Replay | None] = []
        while min(run.done) < run.generate:
            again.append(next_replay(run) if replaying and replaying.ready() else None)
            begin, own_begin = _read_clock(decoder.device), own()
            if replaying:
                replaying.round()
            else:
                run.impl.decode_round(run)
            computing.append(own() - own_begin)  # before waiting for a GPU
            if watch:
                watch.end_round()
            rounds.append(_read_clock(decoder.device) - begin)
        resident = sum(n for tier in run.impl.resident_bytes().values() for n in tier.values())
    finally:
        run.impl.shutdown()
    if watch:
        computing = watch.undisturbed(computing)
    tokens = work.generate - 1
    eager: str | None = (replaying.why or TOO_FEW_ROUNDS) if replaying else ISSUED
    replays = tuple(one for one in again if one)
    if replays:  # each gives one token
        rounds = [took for took, kept in zip(rounds, again, strict=True) if kept]
        computing = [took for took, kept in zip(computing, again, strict=True) if kept]
        tokens, eager = len(rounds), None
    times = (ttft, tuple(rounds), tuple(computing), tokens)
    return Timing(as_run(run), *times, resident, tuple(clock.passes), eager, replays)


def issuing(run: Timing) -> dict[str, float]:
    """Return the longest host time of a call of each op. [s]

    Parameters
    ----------
    run
        A run whose ops were timed.
    """
    found: dict[str, float] = {}
    for one in run.passes:
        for name, took in one.hosts.items():
            found[name] = max(found.get(name, 0.0), took / len(one.ops[name]))
    return found


def run_by_op(decoder: Decoder, technique: Technique, work: RandomPrompts) -> Timing:
    """Measure the time of each op of a generation that has run before and is warmed up.

    On a GPU the generation runs twice: the first run measures the launch times, so that the second
    can exclude them.

    Parameters
    ----------
    decoder
        The model, on the device to measure.
    """
    run = run_timed(decoder, technique, work, by_op=True)
    if decoder.device.type == "cpu":
        return run
    return run_timed(decoder, technique, work, by_op=True, busy=issuing(run))


@frozen
class Counted:
    """Memory and copied bytes of one run."""

    on_gpu: bool  # whether the peak is of GPU memory, or on a CPU of both tiers
    peak: int  # peak memory besides weights [B]
    copied: dict[str, int]  # bytes copied over the link, by direction [B]


@torch.inference_mode()
def run_counted(decoder: Decoder, technique: Technique, work: RandomPrompts) -> Counted:
    """Run a generation once, and measure its peak memory and the bytes copied over the host link.

    On a GPU the peak comes from PyTorch's allocator. On a CPU it is the largest sum of the sizes of
    live tensors.

    Parameters
    ----------
    decoder
        The model, on the device to measure.
    """
    copies, device = Copied(), decoder.device
    prompts = work.prompts(decoder.arch.model.vocab)
    gc.collect()
    with Live() as live:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        Generation(replace(decoder, counter=copies), technique, prompts, work.generate).complete()
    peak = live.peak
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
    return Counted(device.type == "cuda", peak, copies.bytes)


class Copied(NullCounter):
    """Counter of the bytes that copies move, and of nothing else."""

    def __init__(self) -> None:
        self.bytes = {"h2d": 0, "d2h": 0}

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Add the bytes of a copy."""
        self.bytes[stream] += size(*tensors)

    def separate(self) -> "Copied":
        """Return a separate counter, for copies that may not be used."""
        return Copied()

    def merge(self, note: NullCounter) -> None:
        """Add the counts of a separate counter."""
        assert isinstance(note, Copied)
        for way, moved in note.bytes.items():
            self.bytes[way] += moved


def _read_clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
