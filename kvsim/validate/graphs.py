"""Decoding rounds as CUDA graphs: issued kernel by kernel once, replayed with one launch later.

A round is the same work as an earlier one where shapes and addresses are the same; everything else
that changes between rounds has to be on the device. Implementations say so by ``eager`` and
``branch``. The first round of a branch is issued as it is, which compiles and chooses kernels, the
second one is captured, and from there on it is replayed. Where that cannot be, rounds are issued
kernel by kernel, and ``why`` says what for.
"""

from collections.abc import Callable, Hashable

import torch

from kvsim.errors import brief
from kvsim.validate.machine import refusals
from kvsim.validate.run import Generation


class ReplayedRounds:
    """The decoding rounds of a generation that has read its prompt."""

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
        """Whether the next round will be replayed; captures it where that is still to be done."""
        key = self.run.impl.branch(self.run.cached)
        if self.why or key not in self._issued:
            return False
        if key not in self._graphs:
            try:
                self._graphs[key] = captured(self.run.decode_in_place)
            except refusals() as problem:
                self.why = f"it could not be captured: {brief(problem, 120)}"
        return not self.why

    @torch.inference_mode()
    def round(self) -> None:
        """One round, replayed if ``ready`` has said so."""
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
    """Work on the current GPU as one launch; it is not done yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
