"""What techniques share that keep a part of the tokens and drop the rest."""

import numpy as np

from kvsim import attention, blocks
from kvsim.deployment import Deployment
from kvsim.graph import Buffers, Number, Op, Point
from kvsim.model import LayerShape


def compact(d: Deployment, p: Point, budget: Number, scored: Number) -> list[Op]:
    """After the prompt: select by ``scored`` tokens' scores, gather what is kept."""
    m = d.shard
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    kept = blocks.kv_bytes(m, p.batch * np.minimum(budget, p.prompt)) * evicts
    return [
        blocks.top_k("select", p.batch * m.cached_heads * scored * evicts),
        Op("compact", kernel="gather", bytes={"hbm": 2 * kept}),
    ]


def score_upkeep(d: Deployment, p: Point, tokens: Number) -> list[Op]:
    """Scores of ``tokens`` cached tokens leave the kernel and are added up in fp32 per head."""
    sums = p.batch * d.shard.heads * tokens
    moved = blocks.SCORE * p.new * sums + 8.0 * sums  # sums are read and written
    return [Op("scores", kernel="pointwise", bytes={"hbm": moved})]


def kept_cache(d: Deployment, p: Point, shape: LayerShape, budget: Number) -> Number:
    """Fp16 keys and values of the tokens kept in one layer. [B]"""
    tokens = np.minimum(attention.cached(d, p, shape), budget)
    return d.stack.cache_overhead * blocks.kv_bytes(d.shard, p.batch * tokens)


def scratch_cache(d: Deployment, p: Point) -> Buffers:
    """One layer's keys and values of the whole prompt, before anything is dropped. [B]"""
    return {"gpu": {"prompt kv": blocks.kv_bytes(d.shard, p.tokens) if p.prefill else 0.0}}
