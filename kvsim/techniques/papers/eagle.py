"""EAGLE: a small head drafts from the model's hidden states, in chains, in trees or in one pass.

``Head`` is the head, ``Tree`` one whose drafts may branch; then come EAGLE-3 as in its paper, with
the defaults of serving engines, EAGLE-2 and P-EAGLE.
"""

from dataclasses import replace
from math import ceil
from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import layer_weights
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Group, Number, Op, Point, Step
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import PLAIN, Launches, LayerPass, Parts
from kvsim.techniques.axes.drafting import MOST_DRAFTS, Rounds
from kvsim.techniques.axes.settings import param
from kvsim.techniques.steps import layer_ops

MOST_VERIFIED = 256


@frozen
class Head(Rounds):
    """Base of draft heads: decoder layers that read hidden states joined with embeddings.

    The first pass of a round processes the tokens accepted in the previous round, with the model's
    own hidden states; later passes continue from the head's. During prefill the token after the
    prompt is not known yet, so the head processes one token less.
    """

    fused: ClassVar[int] = 0  # hidden states of the model that a product makes one of
    depth: ClassVar[int] = 1  # decoder layers
    parallel: ClassVar[bool] = False  # one pass drafts all tokens of a round
    branches: ClassVar[int] = 1  # tokens that a draft pass after the first goes on from

    def vocab(self, deployment: Deployment) -> int:
        """Return the vocabulary of the draft's output head, on one GPU. [tokens]"""
        return deployment.shard.vocab

    def layer_shape(self, deployment: Deployment) -> LayerShape:
        """Return the shape of the head's decoder layers."""
        return LayerShape()

    def steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return one pass of the head per drafted token, or a single pass if it is parallel."""
        if not self.gamma:
            return ()
        known = 1.0 + self.accepted
        more = self.gamma - 1.0 if self.parallel else 0.0
        first = replace(point, context=np.maximum(point.context - known, 0.0), new=known + more)
        passes = [self._pass(deployment, first, 1.0 + more, settled=known)]
        wide = float(self.branches)
        for i in range(0 if self.parallel else self.gamma - 1):
            q = replace(point, context=point.context + i, new=wide)
            passes.append(self._pass(deployment, q, wide))
        return tuple(passes)

    def prompt_steps(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return the head's pass over the prompt."""
        read = replace(point, new=point.new - np.where(np.asarray(point.context) > 0, 0.0, 1.0))
        return (self._pass(deployment, read, 1.0, settled=read.new),) if self.gamma else ()

    def _pass(
        self, deployment: Deployment, point: Point, chosen: float, settled: Number = 0.0
    ) -> Step:
        """Return a pass of new tokens through the head, with logits of the chosen tokens only."""
        m, fp16 = deployment.shard, WEIGHT_FORMATS["fp16"]
        layer = layer_ops(LayerPass(deployment, point, self.layer_shape(deployment), PLAIN))
        made: dict[str, tuple[int, Number]] = {"join_inputs": (2, point.tokens)}
        if self.fused and np.any(np.asarray(settled) > 0):
            made["fuse_states"] = self.fused, point.batch * settled
        joins = [
            ops.gemm(deployment, name, tokens, (many * m.hidden, m.hidden), fp16)
            for name, (many, tokens) in reversed(made.items())
        ]
        groups = [Group(((*joins, *layer),), 1)]
        if self.depth > 1:
            groups.append(Group((tuple(layer),), self.depth - 1))
        moved = 2 * ops.FP16_BYTES * m.hidden * point.tokens
        if point.prefill:
            return Step(tuple(groups), (Op("sample", bytes={"hbm": moved}),))
        vocab, rows = self.vocab(deployment), point.batch * chosen
        # a head over the whole vocabulary is the model's own
        stored = deployment.vocabulary_stored("lm_head") if vocab == m.vocab else fp16
        logits = ops.gemm(deployment, "draft_head", rows, (m.hidden, vocab), stored)
        moved = moved + ops.FP16_BYTES * rows * (vocab + 2 * m.hidden)
        fixed = deployment.stack.drafts.draft or deployment.stack.time.step
        choice = Op("sample", bytes={"hbm": moved}, fixed=fixed)
        return Step(tuple(groups), (logits, choice))

    def draft_memory(self, deployment: Deployment, point: Point) -> Buffers:
        """Return the memory of the head's layers, projections, output head and cache. [B]"""
        if not self.gamma:
            return {}
        m = deployment.shard
        size = (
            self.depth * layer_weights(deployment, self.layer_shape(deployment))
            + ops.FP16_BYTES * (2 + self.fused) * m.hidden**2
        )
        if self.vocab(deployment) != m.vocab:
            size += ops.FP16_BYTES * m.hidden * self.vocab(deployment)
        tokens = point.max_length if deployment.stack.cache.static else point.length
        drafted = self.gamma if self.branches == 1 else self.verified
        cache = self.depth * ops.kv_bytes(m, point.batch * (tokens + drafted))
        return {"gpu": {"draft weights": deployment.stack.weights.copies * size, "draft kv": cache}}


@frozen
class Tree(Head):
    """Base class of draft heads whose drafts branch into a tree; with a width of 1 it is a chain.

    Every pass after the first extends the ``width`` best tokens. The ``verify`` best of all drafted
    tokens are checked in one pass of the model. Acceptance counts along the deepest path.
    """

    width: int = param(1, "branches per draft pass (1: a chain)", low=1, high=32)
    verify: int | str = param(
        "auto", "tokens verified per round, including the model's own",
        low=2, high=MOST_VERIFIED, choices=("auto",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        few = not isinstance(self.verify, str) and self.verify < self.gamma + 1
        most = 1 + self.width + max(self.gamma - 1, 0) * self.width**2
        many = not isinstance(self.verify, str) and self.verify > most
        if self.gamma and (few or many):
            raise InputError(
                f"{self.name}: verify={self.verify}; {self.gamma} drafts in a row at a width of "
                f"{self.width} make {self.gamma + 1} to {most} tokens, the model's own included"
            )

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the engine cannot draft such a tree, or an empty string."""
        most, stack = deployment.stack.drafts.widest, deployment.stack.name.partition("@")[0]
        if self.gamma and most and self.width > most:
            takes = "chains alone" if most == 1 else f"trees of at most {most:.0f} branches"
            return (
                f"{stack} takes {takes}, and width={self.width}; give {self.name}:width={most:.0f},"
                f"verify=auto, or --stack sglang"
            )
        return super().refuses(deployment, parts)

    @property
    def branches(self) -> int:  # type: ignore[override]
        """Tokens per sequence in a draft pass after the first: the width of the tree."""
        return self.width

    @property
    def verified(self) -> int:
        """Tokens per sequence that the model checks at a time, including its own next token."""
        if not self.gamma:
            return 1
        if isinstance(self.verify, str):
            return self.gamma + 1 if self.width == 1 else 1 + self.width * self.gamma
        return int(self.verify)

    @property
    def branching(self) -> bool:
        """Whether the width is above 1."""
        return self.width > 1

    @property
    def shape(self) -> str:  # type: ignore[override]
        """Shape of the acceptance summaries that apply: chain or tree."""
        return "chain" if self.width == 1 else "tree"


@frozen
class Eagle(Tree):
    """EAGLE-3: drafts a chain or a tree of tokens with a small head.

    The head reads three of the model's hidden states with the embedding, and drafts from a part of
    the vocabulary.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3: scaling up inference acceleration of large language models via
       training-time test", NeurIPS 2025, section 3.1: three hidden states join the embedding.
    """

    name = "eagle"
    like = "eagle3"
    fused = 3
    launches = Launches(prefill={"attn": 2}, decode={"attn": 8})

    tokens: int = param(32000, "vocabulary of the draft head", low=1, high=1e6)

    def vocab(self, deployment: Deployment) -> int:
        """Return the size of the drafted part of the vocabulary, on one GPU. [tokens]"""
        return ceil(min(self.tokens, deployment.model.vocab) / deployment.tp)


@frozen
class Eagle3(Eagle):
    """EAGLE-3 as in SGLang and vLLM: a chain of three drafts by default.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-3", NeurIPS 2025; drafts of SpecForge (github.com/sgl-project).
    """

    name = "eagle3"
    launches = Launches(prefill={"attn": 2}, decode={"attn": 7})

    gamma: int = param(3, "tokens drafted in a row per round", high=MOST_DRAFTS)


@frozen
class Eagle2(Tree):
    """EAGLE-2: drafts a tree by the draft's own confidence, over the whole vocabulary.

    References
    ----------
    .. [1] Y. Li et al., "EAGLE-2: faster inference of language models with dynamic draft trees",
       EMNLP 2024, section 4: 60 tokens besides the model's own, six deep, ten wide.
    """

    name = "eagle2"
    like = "eagle3"
    launches = Launches(prefill={"attn": 2}, decode={"attn": 7})

    gamma: int = param(6, "tokens drafted in a row per round", high=MOST_DRAFTS)
    width: int = param(10, "branches per draft pass", low=1, high=32)
    verify: int | str = param(
        61, "tokens verified per round, including the model's own",
        low=2, high=MOST_VERIFIED, choices=("auto",),
    )  # fmt: skip


@frozen
class PEagle(Head):
    """P-EAGLE: drafts all tokens of a round in one pass of a multi-layer EAGLE-3 head.

    Positions of tokens not yet known hold a mask token and a learned hidden state.

    References
    ----------
    .. [1] "P-EAGLE: faster LLM inference with parallel speculative decoding in vLLM", vLLM blog,
       2026: heads of four layers, seven drafts.
    """

    name = "p-eagle"
    fused = 3
    depth = 4
    parallel = True
    shape = "parallel"

    gamma: int = param(7, "tokens drafted per round, in one pass", high=MOST_DRAFTS)
