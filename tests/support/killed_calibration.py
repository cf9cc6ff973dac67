"""Calibrates again and again and is killed at random; run by ``test_calibrate_machine``.

A forked child runs the real command with the smallest works of a few benchmarks; the parent kills
it some time later and looks at what is on disk. One JSON line per kill goes to standard output.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvsim.cli.app import main
from kvsim.evidence.machine.samples import read_samples
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.validate.bench import suite
from kvsim.validate.bench.work import Bench, Benchmark, Work

MOST = 4  # works of a benchmark
CACHE = 2**14  # a small one makes small works [B]


def shorten() -> None:
    """A few works of every benchmark, timed as short as can be."""

    def few(works: Benchmark) -> Benchmark:
        def cut(place: Bench) -> Iterator[Work]:
            cheap = [w for w in works(replace(place, cache=CACHE)) if float(w.op.flops) < 1e9]
            yield from (w for w in cheap if w.op.dtype == "fp32")
            yield from [w for w in cheap if w.op.dtype != "fp32"][:MOST]

        return cut

    names = ("launch", "memory", "gemm", "pointwise", "topk", "h2d", "d2h", "host", "host_gemm")
    suite.SUITE = {name: few(suite.SUITE[name]) for name in names}
    vars(suite)["list_runs"] = lambda place: []
    suite.SUITE_SECONDS[True] = 0.1


def calibrate(out: Path) -> int:
    """A child that runs the command; its process id."""
    child = os.fork()
    if child:
        return child
    for stream in (1, 2):
        said = os.open(out.with_suffix(f".{stream}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, stream)
    measured = suite._measured

    def noted(work: Work, name: str, *more: Any) -> Any:
        with out.with_suffix(".begun").open("a") as file:
            file.write(f"{suite._named(name, [work])}\n")
        return measured(work, name, *more)

    vars(suite)["_measured"] = noted
    sys.argv = ["kvsim", "calibrate", "--device", "cpu", "--quick", "--out", str(out)]
    try:
        main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(0)


def finished(out: Path) -> list[str]:
    """Units of one work each whose samples are on disk."""
    path = out.with_suffix(".samples.jsonl")
    samples = read_samples(path)[1] if path.exists() else []
    return [
        f"{s.benchmark} {' '.join(f'{k}={v}' for k, v in s.case.items())}"
        for s in samples
        if "way" not in s.case
    ]


def run(folder: Path, kills: int) -> None:
    """Kill, look, go on; start afresh when a profile is complete."""
    torch.set_num_threads(1)
    shorten()
    moments = random.Random(0)
    begin = time.monotonic()
    out = folder / "whole.toml"
    os.waitpid(calibrate(out), 0)
    whole = time.monotonic() - begin
    out = folder / "F.toml"
    for _ in range(kills):
        before = finished(out)
        child = calibrate(out)
        time.sleep(moments.uniform(0.0, whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        place = out.with_suffix(".begun")
        lines = place.read_text().splitlines() if place.exists() else []
        place.unlink(missing_ok=True)
        begun = [line for line in lines if " way=" not in line]  # those are units of several works
        line = {"before": before, "begun": begun, "after": finished(out), "profile": out.exists()}
        if out.exists():  # whole, or reading it fails
            load_hardware(out)
            load_stack(out.with_suffix(".stack.toml"))
            for path in folder.glob("F.*"):
                path.unlink()
        print(json.dumps(line), flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(calibrate(out), 0)[1])
    load_hardware(out)
    print(json.dumps({"code": code, "after": finished(out)}), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
