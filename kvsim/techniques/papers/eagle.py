"""EAGLE-3: a one-layer head drafts from the model's low, middle and high hidden states."""

from dataclasses import replace
from math import ceil
from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import layer_weights
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Group, Op, Point, Step
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import (
    Drafting,
    Launches,
    LayerPass,
    Parts,
    Placement,
    Selection,
    Storage,
)
from kvsim.techniques.axes.drafting import Rounds
from kvsim.techniques.axes.settings import param
from kvsim.techniques.steps import layer_ops


@frozen
class Head(Rounds):
    """Base: one decoder layer of the model's shape over a hidden state joined with an embedding.

    A round's first pass reads the tokens that the round before has settled, with the model's own
    hidden states; later passes go on from the head's. The token after the prompt's last one is not
    known while the prompt is read, so that the head reads one token less.
    """

    fused: ClassVar[int] = 0  # hidden states of the model that a product makes one of

    def vocab(self, deployment: Deployment) -> int:
        """Tokens that a draft chooses among."""
        return deployment.shard.vocab

    def shape(self, deployment: Deployment) -> LayerShape:
        """The kind of its layer."""
        return LayerShape()

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """One pass of the head per draft."""
        known = 1.0 + self.accepted
        first = replace(point, context=np.maximum(point.context - known, 0.0), new=known)
        later = (replace(point, context=point.context + i, new=1.0) for i in range(self.gamma - 1))
        passes = [self._pass(deployment, q) for q in later]
        return (self._pass(deployment, first, settled=True), *passes) if self.gamma else ()

    def prompt_steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """The head reads the prompt too."""
        read = replace(point, new=point.new - np.where(np.asarray(point.context) > 0, 0.0, 1.0))
        return (self._pass(deployment, read, settled=True),) if self.gamma else ()

    def _pass(self, deployment: Deployment, point: Point, settled: bool = False) -> Step:
        """New tokens through the head; a prompt yields no draft yet."""
        m, fp16 = deployment.shard, WEIGHT_FORMATS["fp16"]
        parts = Parts(Selection(), Storage(), Placement(), Drafting())
        layer = layer_ops(LayerPass(deployment, point, self.shape(deployment), parts))
        made = {"join_inputs": 2} | ({"fuse_states": self.fused} if settled and self.fused else {})
        joins = [
            ops.gemm(deployment, name, point.tokens, (many * m.hidden, m.hidden), fp16)
            for name, many in reversed(made.items())
        ]
        group, moved = Group(((*joins, *layer),), 1), 2 * ops.FP16_BYTES * m.hidden * point.tokens
        if point.prefill:
            return Step((group,), (Op("sample", bytes={"hbm": moved}),))
        vocab = self.vocab(deployment)
        logits = ops.gemm(deployment, "draft_head", point.batch, (m.hidden, vocab), fp16)
        moved = moved + ops.FP16_BYTES * point.batch * (vocab + 2 * m.hidden)
        choice = Op("sample", bytes={"hbm": moved}, fixed=deployment.stack.time.step)
        return Step((group,), (logits, choice))

    def draft_memory(self, deployment: Deployment, point: Point) -> Buffers:
        """The layer, its joining product, a head of its own vocabulary, and a cache. [B]"""
        if not self.gamma:
            return {}
        m = deployment.shard
        size = (
            layer_weights(deployment, self.shape(deployment))
            + ops.FP16_BYTES * (2 + self.fused) * m.hidden**2
        )
        if self.vocab(deployment) != m.vocab:
            size += ops.FP16_BYTES * m.hidden * self.vocab(deployment)
        tokens = point.max_length if deployment.stack.cache.static else point.length
        cache = deployment.stack.cache.overhead * ops.kv_bytes(
            m, point.batch * (tokens + self.gamma)
        )
        return {"gpu": {"draft weights": deployment.stack.weights.copies * size, "draft kv": cache}}


@frozen
class Eagle(Head):
    """A chain of drafts; trees of drafts are not modelled. Acceptance has to be given.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3: scaling up inference acceleration of large language models via
       training-time test", NeurIPS 2025, section 3.1: three hidden states join the embedding.
    """

    name = "eagle"
    fused = 3
    launches = Launches(prefill={"attn": 3}, decode={"attn": 7})

    tokens: int = param(32000, "tokens that a draft chooses among", low=1, high=1e6)

    def vocab(self, deployment: Deployment) -> int:
        """A part of the vocabulary."""
        return ceil(min(self.tokens, deployment.model.vocab) / deployment.tp)
