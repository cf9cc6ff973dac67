"""What techniques share that keep a part of the tokens and drop the rest."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape


def select(d: Deployment, p: Point, budget: Number, scored: Number) -> Op:
    """After the prompt: the tokens to keep by the scores of ``scored`` of them."""
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    return blocks.top_k("select", p.batch * d.shard.cached_heads * scored * evicts)


def gather_kept(d: Deployment, p: Point, budget: Number) -> Op:
    """After the prompt: copy what is kept to where it stays."""
    kept = blocks.kv_bytes(d.shard, p.batch * np.minimum(budget, p.prompt))
    return Op("compact", kernel="gather", bytes={"hbm": 2 * kept})


def compact(d: Deployment, p: Point, budget: Number, scored: Number) -> list[Op]:
    """Select by ``scored`` tokens' scores and gather what is kept, where anything is dropped."""
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    kept = gather_kept(d, p, budget)
    return [
        select(d, p, budget, scored),
        replace(kept, bytes={"hbm": kept.bytes["hbm"] * evicts}),
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
