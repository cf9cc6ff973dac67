"""Operating points per second, one core: every technique over batch x context, LLaMA-2-7B.

    python -m benchmarks.evaluation            # a million points per technique
    python -m benchmarks.evaluation --large    # and 10^8 points of one, with the peak memory

Peers do different work per point. Their figures, measured on one core of a 2-core machine in
November 2026 over 1,000 points of the same model: ridgepoint (closed form) 220,221 points/s;
aiconfigurator 46,270 in roofline mode, 6,401 on measured data; LLM-Viewer 9,155; llm-analysis
3,497; servcalc 2,554; FlexGen's LP 174; GenZ 14.7.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from kvsim.graph import Array, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import POINTS_AT_ONCE, round_seconds
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.technique import Technique

FASTEST_PEER = 220_221  # points/s
ASKED = {"full": 1_000_000}
ASKED_OF_ALL = 300_000
GIVEN = {  # what these do not run without
    "draft": "draft:model=llama1-7b,acceptance=0.7",
    "eagle": "eagle:acceptance=0.7",
}
HOLDING = ("flexgen", "hf-specache")  # stacks whose copies hold up the GPU


def main() -> None:
    d = Deployment(load_model("llama2-7b"), load_hardware("h100"), load_stack("fused"))
    batch = 8.0 * np.arange(1, 1001)
    context = np.round(np.linspace(1, 131_072, 1000))
    print(f"{'technique':14s} {'points/s':>12s} {'asked':>10s} {'x fastest peer':>15s}")
    for name in TECHNIQUES:
        rate = max(_rate(parse(GIVEN.get(name, name)), d, batch, context) for _ in range(3))
        asked = ASKED.get(name, ASKED_OF_ALL)
        verdict = "" if rate >= asked else "  too slow"
        print(f"{name:14s} {rate:12,.0f} {asked:10,d} {rate / FASTEST_PEER:15.1f}{verdict}")
    print("where a stack's copies overlap in part, KVPR's split is found on the timeline itself:")
    for stack in HOLDING:
        held = Deployment(d.model, d.hardware, load_stack(stack))
        rate = max(_rate(parse("kvpr"), held, batch, context) for _ in range(3))
        verdict = "" if rate >= ASKED_OF_ALL else "  too slow"
        print(f"kvpr on {stack:12s} {rate:12,.0f} of {ASKED_OF_ALL:,d}{verdict}")
    if "--large" in sys.argv:
        _large(d)


def grid_seconds(t: Technique, d: Deployment, batch: Array, context: Array) -> Iterator[Array]:
    """Yield the time per token over a grid, a few batches at once. (batches, contexts) [s]"""
    rows = max(1, POINTS_AT_ONCE // context.size)
    for i in range(0, batch.size, rows):
        point = Point(batch[i : i + rows, None], context, 1.0, context, context + 1.0)
        yield np.asarray(round_seconds(t, d, point))


def _rate(t: Technique, d: Deployment, batch: Array, context: Array) -> float:
    started = time.process_time()
    for _ in grid_seconds(t, d, batch, context):
        pass
    return batch.size * context.size / (time.process_time() - started)


def _large(d: Deployment) -> None:
    batch, context = np.arange(1.0, 10_001), np.arange(1.0, 10_001)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    slowest = max(float(part.max()) for part in grid_seconds(parse("full"), d, batch, context))
    took = time.perf_counter() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"10^8 points of full: {took:.0f} s, {1e8 / took:,.0f} points/s, memory grew by")
    print(f"{grown:.0f} MiB; the slowest step takes {slowest:.2f} s")


if __name__ == "__main__":
    main()
