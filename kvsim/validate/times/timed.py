"""A technique run for its times: to the first token, round by round, and op by op."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from kvsim.frozen import frozen
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import NullCounter, size
from kvsim.validate.counts.check import RandomPrompts
from kvsim.validate.counts.compare import as_run
from kvsim.validate.graphs import ReplayedRounds
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.run import Generation
from kvsim.validate.times.clock import Clock, TimedPass, computing_clock
from kvsim.validate.times.compared import ISSUED
from kvsim.validate.times.live import Live
from kvsim.validate.times.replays import Replay

SHORT = "no branch came up twice in so few rounds"


@frozen
class Timing:
    """What one run took, and what it kept."""

    technique: Technique  # with the acceptance that it really had
    ttft: float  # [s]
    rounds: tuple[float, ...]  # each decoding round [s]
    computing: tuple[float, ...]  # what the calling thread computed, or issued to a GPU [s]
    tokens: int  # per sequence that the rounds gave, the one of the prompt left out
    resident: int  # the technique's own tensors after the last round, both tiers [B]
    passes: tuple[TimedPass, ...]  # if ops were timed
    eager: str | None = None  # why no round was replayed as a CUDA graph; none if all of them were
    replays: tuple[Replay, ...] = ()  # what those rounds did

    @property
    def tpot(self) -> float:
        """Time per token after the first. [s]"""
        return sum(self.rounds) / self.tokens


@torch.inference_mode()
def run_timed(
    decoder: Decoder,
    technique: Technique,
    work: RandomPrompts,
    by_op: bool = False,
    busy: Mapping[str, float] | None = None,
    graphs: bool = False,
) -> Timing:
    """Run a workload once; ``by_op`` times every op too, which itself takes some time.

    Parameters
    ----------
    graphs : replay rounds as CUDA graphs where they can be; the others are then not timed.
    busy : what the host takes for each op, as a run before has told: ops are then timed behind a
        GPU that is kept busy, so that they are their kernels' times. [s]
    """
    clock = Clock(decoder.device, busy)
    prompts = work.prompts(decoder.arch.model.vocab)
    run = Generation(
        replace(decoder, counter=clock) if by_op else decoder, technique, prompts, work.generate
    )
    rounds, computing = [], []
    own = computing_clock() if decoder.device.type == "cpu" else perf_counter
    try:
        begin = _now(decoder.device)
        run.start()
        ttft = _now(decoder.device) - begin
        replaying = ReplayedRounds(run) if graphs else None
        again: list[Replay | None] = []
        while min(run.done) < run.generate:
            again.append(Replay.of(run) if replaying and replaying.ready() else None)
            begin, own_begin = _now(decoder.device), own()
            if replaying:
                replaying.round()
            else:
                run.impl.decode_round(run)
            computing.append(own() - own_begin)  # before waiting for a GPU
            rounds.append(_now(decoder.device) - begin)
        resident = sum(n for tier in run.impl.resident_bytes().values() for n in tier.values())
    finally:
        run.impl.close()
    tokens = work.generate - 1
    eager: str | None = (replaying.why or SHORT) if replaying else ISSUED
    replays = tuple(one for one in again if one)
    if replays:  # each gives one token
        rounds = [took for took, kept in zip(rounds, again, strict=True) if kept]
        computing = [took for took, kept in zip(computing, again, strict=True) if kept]
        tokens, eager = len(rounds), None
    times = (ttft, tuple(rounds), tuple(computing), tokens)
    return Timing(as_run(run), *times, resident, tuple(clock.passes), eager, replays)


def issuing(run: Timing) -> dict[str, float]:
    """What the host took at most for one call of each op, as a run by ops has told. [s]"""
    found: dict[str, float] = {}
    for one in run.passes:
        for name, took in one.hosts.items():
            found[name] = max(found.get(name, 0.0), took / len(one.ops[name]))
    return found


def run_by_op(decoder: Decoder, technique: Technique, work: RandomPrompts) -> Timing:
    """Run a warm workload for its ops: on a GPU once more, behind a GPU that is kept busy."""
    run = run_timed(decoder, technique, work, by_op=True)
    if decoder.device.type == "cpu":
        return run
    return run_timed(decoder, technique, work, by_op=True, busy=issuing(run))


@frozen
class Counted:
    """What one run moved and held."""

    on_gpu: bool  # whether the peak is that of a GPU's memory, or of both tiers on a CPU
    peak: int  # held at most besides weights [B]
    copied: dict[str, int]  # through the link, by direction [B]


@torch.inference_mode()
def run_counted(decoder: Decoder, technique: Technique, work: RandomPrompts) -> Counted:
    """Run a workload once for its memory and copies.

    A GPU's allocator tells its peak; on a CPU the tensors that are in use at once are added up.
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
    """Counts what copies move, and nothing else."""

    def __init__(self) -> None:
        self.bytes = {"h2d": 0, "d2h": 0}

    def copy(
        self, name: str, stream: Literal["h2d", "d2h"], tensors: Sequence[Tensor], rows: int = 0
    ) -> None:
        """Add what a copy moves."""
        self.bytes[stream] += size(*tensors)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
