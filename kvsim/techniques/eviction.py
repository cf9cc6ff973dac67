"""What selections share that keep a part of the tokens and drop the rest."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention, ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.layers import LayerPass
from kvsim.techniques.selection import Selection


@frozen
class Bounded(Selection):
    """A selection that keeps at most a budget of tokens at any time."""

    evicts = "always"

    @property
    def budget(self) -> Number:
        """Tokens kept at most. [tokens]"""
        raise NotImplementedError

    def kept(self, at: LayerPass) -> Number:
        """The budget at most."""
        return np.minimum(at.cached, self.budget)

    def prompt_kept(self, at: LayerPass) -> Number:
        """The budget at most."""
        return np.minimum(at.p.length, self.budget)

    def limit(self, at: LayerPass) -> Number:
        """Tokens that are kept, all of which a query sees. [tokens]"""
        return self.budget


def select(at: LayerPass, budget: Number, scored: Number) -> Op:
    """After the prompt: the tokens to keep by the scores of ``scored`` of them."""
    evicts = (at.p.prompt > np.asarray(budget)).astype(float)
    return ops.top_k("select", at.p.batch * at.d.shard.cached_heads * scored * evicts)


def gather_kept(at: LayerPass, budget: Number) -> Op:
    """After the prompt: copy what is kept to where it stays."""
    kept = ops.kv_bytes(at.d.shard, at.p.batch * np.minimum(budget, at.p.prompt))
    return Op("compact", kernel="gather", bytes={"hbm": 2 * kept})


def compact(at: LayerPass, budget: Number, scored: Number) -> list[Op]:
    """Select by ``scored`` tokens' scores and gather what is kept, where anything is dropped."""
    evicts = (at.p.prompt > np.asarray(budget)).astype(float)
    kept = gather_kept(at, budget)
    return [
        select(at, budget, scored),
        replace(kept, bytes={"hbm": kept.bytes["hbm"] * evicts}),
    ]


def score_upkeep(at: LayerPass, tokens: Number) -> list[Op]:
    """Scores of ``tokens`` cached tokens leave the kernel and are added up in fp32 per head."""
    sums = at.p.batch * at.d.shard.heads * tokens
    moved = ops.SCORE * at.p.new * sums + 8.0 * sums  # sums are read and written
    return [Op("scores", kernel="pointwise", bytes={"hbm": moved})]


def score_matrix(at: LayerPass) -> Buffers:
    """The prompt's scores of one layer, where the stack's attention keeps none itself. [B]"""
    d, p = at.d, at.p
    there = p.prefill and not attention.score_bytes(d, p)
    alive = np.minimum(p.tokens, d.stack.memory.prefill_chunk) * p.length
    scores = ops.HALF * d.shard.heads * alive if there else 0.0
    return {"gpu": {"score matrix": scores}}


def observe(at: LayerPass, window: Number, budget: Number) -> Op:
    """Scores of the prompt's last queries over all its keys, where any is dropped."""
    m, p = at.d.shard, at.p
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    asking = np.minimum(window, p.prompt)
    pairs = asking * p.prompt * evicts
    width = m.k_width / m.cached_heads
    keys = ops.HALF * p.batch * m.k_width * p.prompt * evicts
    queries = ops.HALF * p.batch * m.heads * width * asking * evicts
    scores = 2 * ops.SCORE * p.batch * m.heads * pairs  # softmax, then pooling over queries
    flops = 2.0 * p.batch * m.heads * width * pairs
    return Op("observe", kernel="attention", flops=flops, bytes={"hbm": keys + queries + scores})


def kept_tokens(at: LayerPass, budget: Number) -> Number:
    """The kept part of the prompt and everything generated since. [tokens]"""
    generated = np.maximum(at.p.length - at.p.prompt, 0.0)
    return np.minimum(at.p.prompt, budget) + generated
