"""A technique run for its times: to the first token, round by round, and op by op."""

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from kvsim.techniques.base import Technique
from kvsim.validate.check import Workload
from kvsim.validate.clock import Clock, TimedPass, computing_clock
from kvsim.validate.compare import as_run
from kvsim.validate.decoder import Decoder
from kvsim.validate.run import Run

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Timing:
    """One run."""

    technique: Technique  # with the acceptance that it really had
    ttft: float  # [s]
    rounds: tuple[float, ...]  # each decoding round [s]
    computing: tuple[float, ...]  # the part of it that the calling thread computed on a CPU [s]
    tokens: int  # per sequence that the rounds gave, the one of the prompt left out
    resident: int  # the technique's own tensors after the last round, both tiers [B]
    peak: int | None  # what the process or the GPU held more than before, if it can be told [B]
    passes: tuple[TimedPass, ...]  # if ops were timed

    @property
    def tpot(self) -> float:
        """Time per token after the first. [s]"""
        return sum(self.rounds) / self.tokens


@torch.inference_mode()
def run_timed(decoder: Decoder, t: Technique, work: Workload, by_op: bool = False) -> Timing:
    """Run a workload once; ``by_op`` times every op too, which itself takes some time."""
    clock = Clock(decoder.device)
    prompts = work.prompts(decoder.arch.model.vocab)
    gc.collect()
    before = _forget_peak(decoder.device)
    run = Run(replace(decoder, tally=clock) if by_op else decoder, t, prompts, work.generate)
    rounds, computing = [], []
    own = computing_clock() if decoder.device.type == "cpu" else perf_counter
    try:
        begin = _now(decoder.device)
        run.start()
        ttft = _now(decoder.device) - begin
        while min(run.done) < run.generate:
            begin, own_begin = _now(decoder.device), own()
            run.impl.round(run)
            rounds.append(_now(decoder.device) - begin)
            computing.append(own() - own_begin)
        resident = sum(n for tier in run.impl.resident_bytes().values() for n in tier.values())
    finally:
        run.impl.close()
    after = _peak(decoder.device)
    peak = None if after is None or before is None else after - before
    times = (ttft, tuple(rounds), tuple(computing), work.generate - 1)
    return Timing(as_run(run), *times, resident, peak, tuple(clock.passes))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _forget_peak(device: torch.device) -> int | None:
    """Start a new peak of memory in use; what is in use now. [B]"""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return int(torch.cuda.memory_allocated(device))
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def _status(key: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith(f"{key}:")), None)
    return int(found) * 1024 if found else None
