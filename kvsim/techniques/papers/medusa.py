"""Medusa: heads beside the output head guess several tokens ahead, checked as a tree."""

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Group, Op, Point, Step
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Rounds
from kvsim.techniques.axes.settings import param


@frozen
class Medusa(Rounds):
    """Medusa: drafts each position with its own head over the vocabulary.

    The heads run over every token of the verified tree, as the last accepted one is known only
    afterwards. Their best tokens form the next tree.

    References
    ----------
    .. [1] T. Cai et al., "Medusa: simple LLM inference acceleration framework with multiple
       decoding heads", ICML 2024, section 2.1; five heads and trees of 64 tokens as released.
    """

    name = "medusa"
    shape = "heads"

    gamma: int = param(5, "number of heads, each of which drafts one token", high=MOST_DRAFTS)
    verify: int = param(64, "tokens of the tree, including the model's own", low=2, high=256)

    @property
    def verified(self) -> int:
        """Tokens per sequence in the verifying pass: those of the tree."""
        return max(self.verify, self.gamma + 1) if self.gamma else 1

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return the step of all heads over the last hidden states."""
        if not self.gamma:
            return ()
        m, fp16, rows = deployment.shard, WEIGHT_FORMATS["fp16"], point.batch * self.verified
        rows = np.broadcast_to(rows, np.broadcast_shapes(np.shape(rows), np.shape(point.context)))
        wide = self.gamma * deployment.model.hidden // deployment.tp
        mixed = ops.gemm(deployment, "head_mix", rows, (m.hidden, wide), fp16)
        logits = ops.gemm(deployment, "draft_head", rows, (m.hidden, self.gamma * m.vocab), fp16)
        moved = ops.FP16_BYTES * rows * self.gamma * (m.vocab + 2 * m.hidden)
        choice = Op("sample", bytes={"hbm": moved}, fixed=deployment.stack.drafts.draft)
        return (Step((Group(((mixed, logits),), 1),), (choice,)),)

    def draft_memory(self, deployment: Deployment, point: Point) -> Buffers:
        """Return the memory of the heads: a residual block and an output head each. [B]"""
        m, hidden = deployment.shard, deployment.model.hidden
        size = ops.FP16_BYTES * self.gamma * (m.hidden * hidden / deployment.tp + hidden * m.vocab)
        return {"gpu": {"draft weights": deployment.stack.weights.copies * size}} if size else {}
