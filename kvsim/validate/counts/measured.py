"""Bytes that ops name, beside those that their kernels were seen to read and write on a CPU."""

from collections.abc import Iterator

from kvsim.frozen import frozen
from kvsim.graph import Channel
from kvsim.validate.counter import CountedPass, OpCounter

READS_NORMS = "weights of norms and the rotations of positions are read too"
GATHERS_ROWS = "the run gathers rows into a tensor of its own and writes or packs them from there"
HANDED = "a tensor is handed from one op of the run to the next, which one kernel would keep"
ONE_KERNEL = "stated as kernels that hand a tensor on, or read one again; measured as one"
OUT_IN_FP32 = "packed attention leaves its kernel in fp32, and small tables are read"
SUMS_IN_FP32 = "sums are kept, read and written in fp32"
READS_TABLES = "small tables beside the numbers are read or written too"
OWN_ROWS = "each query head gathers rows of its own; those of a KV head are stated once"
BY_PARTS = "partial outputs in fp32 are handed to the kernel that joins them"
BY_BLOCKS = "each row of blocks reads its keys again, and its output is joined to the others"
HEADS = "scores of every query head are read; one per KV head is stated"
PUSHED = "rows are read, widened and written one by one as tokens are pushed down"
AHEAD = "the run fetches for a round that does not come"
NO_LANE = "the calling thread gathers or hands over rows without a lane that is measured"
MASKED = "queries attend over all keys behind masks, as PyTorch has no kernel for diagonals"
STAGED = "rows are gathered into one buffer and copied to another"

LINKS: tuple[Channel, ...] = ("h2d", "d2h")
DIFFERENCES = {
    ("", "pointwise"): READS_NORMS,
    ("", "sample"): READS_NORMS,
    ("", "compact"): GATHERS_ROWS,
    ("cachegen", "decode_stream"): READS_TABLES,
    ("expected-attention", "query_spread"): SUMS_IN_FP32,
    ("expected-attention", "expect"): SUMS_IN_FP32,
    ("fastdecode", "h2d"): NO_LANE,
    ("fastdecode", "d2h"): NO_LANE,
    ("flexgen", "h2d"): AHEAD,
    ("flexprefill", "attn"): BY_BLOCKS,
    ("flexprefill", "rank_blocks"): SUMS_IN_FP32,
    ("gear", "attn"): HANDED,
    ("gear", "correct"): HANDED,
    ("gear", "quantise"): GATHERS_ROWS,
    ("h2o", "attn"): HANDED,
    ("h2o", "graduate"): SUMS_IN_FP32,
    ("h2o", "lowest"): SUMS_IN_FP32,
    ("h2o", "scores"): SUMS_IN_FP32,
    ("h2o", "select"): HEADS,
    ("infinigen", "h2d"): f"{AHEAD}; {STAGED}",
    ("infinigen", "partial_keys"): SUMS_IN_FP32,
    ("infinigen", "topk"): HEADS,
    ("kcache", "attn"): OWN_ROWS,
    ("kcache", "h2d"): NO_LANE,
    ("kcache", "scores"): HANDED,
    ("kivi", "attn"): OUT_IN_FP32,
    ("kivi", "quantise"): GATHERS_ROWS,
    ("kvpr", "h2d"): AHEAD,
    ("kvquant", "attn"): OUT_IN_FP32,
    ("kvquant", "outliers"): HANDED,
    ("kvquant", "quantise"): HANDED,
    ("kvzip", "repeat"): HANDED,
    ("mikv", "attn"): HANDED,
    ("mikv", "balance"): READS_TABLES,
    ("mikv", "lowest"): PUSHED,
    ("mikv", "quantise"): PUSHED,
    ("mikv", "rank"): SUMS_IN_FP32,
    ("mikv", "scores"): SUMS_IN_FP32,
    ("minference", "attn"): MASKED,
    ("offload", "h2d"): AHEAD,
    ("quantspec", "attn"): OUT_IN_FP32,
    ("quantspec", "quantise"): GATHERS_ROWS,
    ("quest", "topk"): HEADS,
    ("shadowkv", "h2d"): NO_LANE,
    ("shadowkv", "restore_keys"): HANDED,
    ("shadowkv", "topk"): HEADS,
    ("specache", "attn"): OUT_IN_FP32,
    ("specache", "attn_again"): OUT_IN_FP32,
    ("specache", "h2d"): STAGED,
    ("specache", "quantise"): GATHERS_ROWS,
    ("streamingllm", "turn"): READS_TABLES,
    ("think", "attn"): BY_PARTS,
    ("turboquant", "attn"): READS_TABLES,
    ("turboquant", "quantise"): READS_TABLES,
    ("turboquant", "rotate"): READS_TABLES,
    ("xattention", "antidiagonals"): SUMS_IN_FP32,
    ("xattention", "attn"): BY_BLOCKS,
    ("xattention", "rank_blocks"): SUMS_IN_FP32,
    ("zipcache", "attn"): HANDED,
    ("zipcache", "probe"): SUMS_IN_FP32,
}
"""Why more is measured, by technique (none: all of them) and op; a test keeps it to what is."""


@frozen
class MeasuredBytes:
    """What an op moved in a phase, over all layers."""

    phase: str
    op: str
    stated: int  # by the implementation [B]
    measured: int  # [B]
    reason: str  # why they differ, if they do and that is known

    @property
    def equal(self) -> bool:
        """Whether both are the same."""
        return self.stated == self.measured


def measured_bytes(technique: str, counter: OpCounter) -> Iterator[MeasuredBytes]:
    """Hold the bytes that ops named against those that were measured.

    Parameters
    ----------
    counter
        What counted its ops on a CPU, where every kernel is PyTorch's own.

    Yields
    ------
    MeasuredBytes
        Both, by phase and op, and of copies by direction.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    links = dict.fromkeys(LINKS, 0)
    for one in counter.passes:
        for name, count in one.ops.items():
            stated, measured = found.get((_phase(one), name), (0, 0))
            found[_phase(one), name] = stated + count.stated, measured + count.measured
            links = {way: n + count.bytes.get(way, 0) for way, n in links.items()}
    rows = [(*key, *both) for key, both in found.items()]
    rows += [("", way, n, counter.links.get(way, 0)) for way, n in links.items()]
    for phase, op, stated, measured in rows:
        if stated or measured:
            named = DIFFERENCES.get((technique, op)) or DIFFERENCES.get(("", op), "")
            less = ONE_KERNEL if measured < stated and op not in LINKS else ""
            reason = "" if measured == stated else named or less
            yield MeasuredBytes(phase, op, stated, measured, reason)


def _phase(one: CountedPass) -> str:
    return one.kind if one.kind in ("prefill", "between") else "decode"
