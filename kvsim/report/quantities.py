"""One heading and one meaning per quantity, for every table, page and answer."""

from collections.abc import Callable
from typing import Any

from kvsim.frozen import frozen
from kvsim.report import units
from kvsim.report.json import Row


@frozen
class Quantity:
    """A number that results have: what it is called, how it is written, what it means."""

    heading: str
    show: Callable[[Any], str]
    meaning: str
    engines: str = ""  # what serving engines call it


QUANTITIES = {
    "batch": Quantity("batch", units.whole, "sequences decoded together", "max-num-seqs"),
    "prompt": Quantity("prompt", units.whole, "prompt tokens of each request", "input length, ISL"),
    "generate": Quantity("generate", units.whole, "tokens generated per request", "OSL"),
    "ttft_s": Quantity("TTFT", units.seconds, "time to the first token", "TTFT"),
    "tpot_s": Quantity("TPOT", units.seconds, "mean time per token after the first", "TPOT, ITL"),
    "gap_s": Quantity("ITL", units.seconds, "time between two tokens of a request", "ITL"),
    "queue_s": Quantity("queue", units.seconds, "from arrival to the first pass", "queue time"),
    "latency_s": Quantity("E2E", units.seconds, "from arrival to the last token", "E2EL"),
    "prefill_s": Quantity("prefill", units.seconds, "the pass over the prompts"),
    "decode_s": Quantity("decode", units.seconds, "all tokens after the first"),
    "decode_tok_s": Quantity(
        "decode tok/s", units.rate, "tokens per second while decoding: batch / TPOT",
        "generation throughput",
    ),
    "output_tok_s": Quantity(
        "output tok/s", units.rate, "generated tokens per second of the batch, prefill included",
        "output token throughput",
    ),
    "goodput_per_s": Quantity(
        "goodput req/s", units.rate, "requests per second that meet the targets", "goodput"
    ),
    "request_per_s": Quantity("req/s", units.rate, "finished requests per second"),
    "vs_full": Quantity("vs full", units.times, "output tok/s relative to full KV"),
    "gpu_bytes": Quantity("GPU GiB", units.gib, "peak memory of each GPU"),
    "host_bytes": Quantity("host GiB", units.gib, "peak host memory of the replica"),
    "max_batch": Quantity("max batch", units.whole, "largest batch that fits in memory"),
    "max_seqs": Quantity("max seqs", units.whole, "sequences in a batch", "max-num-seqs"),
    "usd_per_million_tokens": Quantity(
        "USD/Mtok", units.usd, "price of a million generated tokens"
    ),
    "bound_by": Quantity("bound by", str, "what the busiest stream spends most of its time on"),
}  # fmt: skip


def compared_by(row: Row) -> str:
    """The rate that rows are compared by: of decoding, of all where one token is generated."""
    return "decode_tok_s" if row["generate"] > 1 else "output_tok_s"


def legend(keys: list[str]) -> str:
    """The meaning of some quantities in one line."""
    known = [QUANTITIES[key] for key in keys if key in QUANTITIES]
    return "; ".join(f"{q.heading}: {q.meaning}" for q in known)
