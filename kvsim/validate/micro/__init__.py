"""The microbenchmark suite: one file per channel or peak, each op with its FLOPs and bytes."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvsim.evidence.machine.samples import Sample
from kvsim.evidence.machine.solve import TECHNIQUES
from kvsim.validate.micro import (
    attention,
    contention,
    gather,
    gemm,
    host,
    launch,
    link,
    lowbit,
    memory,
    peers,
    pointwise,
    quantise,
    rows,
    techniques,
    topk,
)
from kvsim.validate.micro.place import Bench, Benchmark, Work

SUITE: dict[str, Benchmark] = {
    "launch": launch.works,
    "memory": memory.works,
    "gemm": gemm.works,
    "attention": attention.works,
    "lowbit": lowbit.works,
    "pointwise": pointwise.works,
    "topk": topk.works,
    "quantise": quantise.works,
    "gather": gather.works,
    "h2d": link.h2d,
    "d2h": link.d2h,
    "duplex": link.duplex,
    "rows": rows.works,
    "contention": contention.works,
    "host": host.reads,
    "host_gemm": host.products,
    "host_attention": host.attends,
    "peers": peers.works,
}
"""Every benchmark under the name its samples have, in the order they run."""

Say = Callable[[str], None]
Done = Mapping[str, Sequence[Sample]]
Runs = Callable[[Bench, Done, float, Say], Iterator[tuple[str, list[Sample]]]]

RUNS: dict[str, Runs] = {TECHNIQUES: techniques.samples}
"""Samples from whole runs, after the suite: told what is done, when to end (by the clock
``monotonic``) and where to speak, they give one part after another."""


def plan(place: Bench) -> Iterator[tuple[str, list[Work]]]:
    """Every benchmark's works; none is allocated yet."""
    for name, works in SUITE.items():
        yield name, list(works(place))
