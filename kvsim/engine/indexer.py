"""The indexer of sparse attention: scores of every cached token, and the choice of the best."""

from kvsim.engine.ops import HALF, top_k
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment


def ops(deployment: Deployment, point: Point, tokens: Number) -> list[Op]:
    """Scores of ``tokens`` cached tokens per sequence and query, and the best of them.

    Every head's scores are rectified, weighted and summed in the kernel, so that one number per
    pair leaves it. Keys are as many on every shard: the indexer is not split.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1, equation 1.
    """
    m = deployment.shard
    chooser = m.indexer
    if chooser is None:
        return []
    pairs = point.new * tokens
    if point.prefill:
        pairs = point.new * point.context + point.new * (point.new + 1) / 2
    pairs = point.batch * pairs
    keys = chooser.key_bytes * (point.batch * tokens + point.tokens)
    queries = point.tokens * chooser.heads * (chooser.head_dim + HALF)
    scores = Op(
        "index",
        kernel="index",
        flops=2.0 * chooser.heads * chooser.head_dim * pairs,
        bytes={"hbm": keys + queries},
        size=point.new,
        columns=point.tokens * chooser.heads if point.prefill else chooser.heads,
        dtype="fp8",
    )
    return [scores, top_k("index_topk", pairs)]


def resident(deployment: Deployment, batch: Number, tokens: Number) -> Number:
    """Keys of one layer's ``tokens`` kept tokens per sequence. [B]"""
    chooser = deployment.shard.indexer
    return 0.0 if chooser is None else batch * tokens * chooser.key_bytes
