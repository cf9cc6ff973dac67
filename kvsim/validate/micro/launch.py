"""What a kernel costs besides its work: issued one by one, replayed as a graph; synchronising."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from kvsim.graph import Op
from kvsim.validate.micro.place import Bench, Call, Work


def works(place: Bench) -> Iterator[Work]:
    """Sums of a few numbers; graphs and synchronisation only where something runs ahead."""
    for count in place.either((20, 100, 200), (20, 50, 100, 200, 500)):
        yield _work(place, "eager", count, "host")
        if not place.on_cpu:
            yield _work(place, "graph", count, "device")
    if not place.on_cpu:
        for _ in range(3):
            yield _work(place, "sync", 1, "host")


def _work(place: Bench, way: str, count: int, clock: str) -> Work:
    case = {"way": way, "kernels": count}
    op = Op("launch", bytes={"hbm": 16.0 * count}, launches=float(count))
    return Work(case, op, partial(_calls, place, way, count), clock)


@contextmanager
def _calls(place: Bench, way: str, count: int) -> Iterator[Sequence[Call]]:
    few = torch.ones(4, device=place.device)

    def issue() -> None:
        for _ in range(count):
            few.add_(1.0)

    if way == "eager":
        yield [issue]
    elif way == "sync":

        def once() -> None:
            issue()
            torch.cuda.synchronize(place.device)

        yield [once]
    else:
        issue()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            issue()
        yield [graph.replay]
