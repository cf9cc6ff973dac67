"""Numbers for people, and one heading and one meaning per quantity for every table and answer.

Few digits, a unit that fits the size, a dash for what does not exist."""

from collections.abc import Callable, Sequence
from math import floor, isfinite, log10
from typing import Any

from kvsim.frozen import frozen
from kvsim.machines.hardware import GIB

DASH = "-"


def format_number(value: Any, digits: int = 4) -> str:
    """Write a number with few significant digits and no power of ten.

    Parameters
    ----------
    value
        Number to write; None or a value that is not finite becomes a dash.
    digits
        Significant digits; numbers of more digits before the point are written in full.

    Returns
    -------
    str
        The number as text, such as 0.0123 or 1,234,567.
    """
    if value is None or not isfinite(value):
        return DASH
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def rounded(value: float, digits: int) -> str:
    """Write a number with a fixed count of significant digits, as 77.3 or 7.70.

    Parameters
    ----------
    value
        Finite number to write.
    digits
        Significant digits; digits before the point are all kept.

    Returns
    -------
    str
        The number as text, with commas between thousands.
    """
    if value == 0:
        return "0"
    places = max(digits - 1 - floor(log10(abs(value))), 0)
    if places and abs(round(value, places)) >= 10 ** (digits - places):
        places -= 1  # 9.996 is 10.0
    return f"{value:,.{places}f}"


def seconds(value: float | None, digits: int = 3) -> str:
    """Write a time in µs, ms, s, min or h, whichever fits its size.

    Parameters
    ----------
    value
        Time; None or a value that is not finite becomes a dash. [s]
    digits
        Significant digits.

    Returns
    -------
    str
        The time with its unit.
    """
    if value is None or not isfinite(value):
        return DASH
    for below, unit, scale in ((1e-3, "µs", 1e-6), (1.0, "ms", 1e-3), (120.0, "s", 1.0),
                               (7200.0, "min", 60.0)):  # fmt: skip
        if abs(value) < below * (1 - 0.5 * 10**-digits):
            return f"{rounded(value / scale, digits)} {unit}"
    return f"{rounded(value / 3600, digits)} h"


def seconds_range(low: float, high: float) -> str:
    """Write a range of times, as 90.1–177 ms.

    Parameters
    ----------
    low
        Start of the range. [s]
    high
        End of the range. [s]

    Returns
    -------
    str
        Both ends; the unit is written once where they share it.
    """
    start, end = seconds(low), seconds(high)
    same = start.partition(" ")[2] == end.partition(" ")[2]
    return f"{start.partition(' ')[0] if same else start}–{end}"


def gib(size: Any, digits: int = 1) -> str:
    """Write bytes as GiB, without the unit, which stands in the heading.

    Parameters
    ----------
    size
        Size; None becomes a dash. [B]
    digits
        Digits after the point.

    Returns
    -------
    str
        The number of GiB.
    """
    return DASH if size is None else f"{float(size) / GIB:,.{digits}f}"


def size(value: float | None) -> str:
    """Write bytes with a unit that fits their size.

    Parameters
    ----------
    value
        Size; None or a value that is not finite becomes a dash. [B]

    Returns
    -------
    str
        The size in B, KiB, MiB or GiB.
    """
    if value is None or not isfinite(value):
        return DASH
    for below, unit, scale in ((2**10, "B", 1), (2**20, "KiB", 2**10), (GIB, "MiB", 2**20)):
        if value < below:
            return f"{rounded(value / scale, 3)} {unit}" if value else "0 B"
    return f"{value / GIB:,.1f} GiB"


def rate(value: float | None) -> str:
    """Write tokens or requests per second, without the unit.

    Parameters
    ----------
    value
        Rate; None or a value that is not finite becomes a dash. [1/s]

    Returns
    -------
    str
        The rate with three significant digits.
    """
    return DASH if value is None or not isfinite(value) else rounded(value, 3)


def integer(value: float | None) -> str:
    """Write a count in full, with commas between thousands.

    Parameters
    ----------
    value
        Count; None or a value that is not finite becomes a dash.

    Returns
    -------
    str
        The count without digits after the point.
    """
    return DASH if value is None or not isfinite(value) else f"{value:,.0f}"


def percent(share: float | None, digits: int = 2) -> str:
    """Write a share as a percentage.

    Parameters
    ----------
    share
        Share of 1; None or a value that is not finite becomes a dash.
    digits
        Significant digits.

    Returns
    -------
    str
        The percentage with its sign, as 12 %.
    """
    if share is None or not isfinite(share):
        return DASH
    return f"{rounded(100 * share, digits)} %"


def times(ratio: float | None) -> str:
    """Write a ratio, as 1.90x.

    Parameters
    ----------
    ratio
        Ratio; None or a value that is not finite becomes a dash.

    Returns
    -------
    str
        The ratio with three significant digits and an x.
    """
    return DASH if ratio is None or not isfinite(ratio) else f"{rounded(ratio, 3)}x"


def usd(value: float | None) -> str:
    """Write a price in dollars: whole from 100 on, else with three digits.

    Parameters
    ----------
    value
        Price; None or a value that is not finite becomes a dash. [USD]

    Returns
    -------
    str
        The price with a dollar sign.
    """
    if value is None or not isfinite(value):
        return DASH
    return f"${value:,.0f}" if value >= 100 else f"${rounded(value, 3)}"


def likelihood(share: float) -> str:
    """Write a probability without false certainty.

    Parameters
    ----------
    share
        Probability between 0 and 1.

    Returns
    -------
    str
        A whole percentage; above 99 % and below 1 % only that it is so.
    """
    return "> 99 %" if share > 0.99 else "< 1 %" if share < 0.01 else f"{100 * share:.0f} %"


@frozen
class Quantity:
    """A number that results have: what it is called, how it is written, what it means."""

    heading: str
    show: Callable[[Any], str]
    meaning: str
    engines: str = ""  # what serving engines call it


QUANTITIES = {
    "batch": Quantity("batch", integer, "sequences decoded together", "max-num-seqs"),
    "concurrency": Quantity("clients", integer, "clients with a request each", "concurrency"),
    "prompt": Quantity("prompt", integer, "prompt tokens of each request", "input length, ISL"),
    "generate": Quantity("generate", integer, "tokens generated per request", "OSL"),
    "ttft_s": Quantity("TTFT", seconds, "time to the first token", "TTFT"),
    "tpot_s": Quantity("TPOT", seconds, "mean time per token after the first", "TPOT, ITL"),
    "gap_s": Quantity("ITL", seconds, "time between two tokens of a request", "ITL"),
    "queue_s": Quantity("queue", seconds, "from arrival to the first pass", "queue time"),
    "latency_s": Quantity("E2E", seconds, "from arrival to the last token", "E2EL"),
    "prefill_s": Quantity("prefill", seconds, "the pass over the prompts"),
    "decode_s": Quantity("decode", seconds, "all tokens after the first"),
    "decode_tok_s": Quantity(
        "decode tok/s",
        rate,
        "tokens per second while decoding: batch / TPOT",
        "generation throughput",
    ),
    "output_tok_s": Quantity(
        "output tok/s",
        rate,
        "generated tokens per second of the batch, prefill included",
        "output token throughput",
    ),
    "goodput_per_s": Quantity(
        "goodput req/s", rate, "requests per second that meet the targets", "goodput"
    ),
    "request_per_s": Quantity("req/s", rate, "finished requests per second"),
    "vs_full": Quantity("vs full", times, "output tok/s relative to full KV"),
    "gpu_bytes": Quantity("GPU GiB", gib, "peak memory of each GPU"),
    "host_bytes": Quantity("host GiB", gib, "peak host memory of the replica"),
    "max_batch": Quantity("max batch", integer, "largest batch that fits in memory"),
    "max_seqs": Quantity("max seqs", integer, "sequences in a batch", "max-num-seqs"),
    "usd_per_million_tokens": Quantity("USD/Mtok", usd, "price of a million generated tokens"),
    "bound_by": Quantity("bound by", str, "what the busiest stream spends most of its time on"),
}


def comparison_key(row: dict[str, Any]) -> str:
    """Return the key of the rate that rows are compared by.

    Parameters
    ----------
    row
        Row of a prediction with ``generate``, its tokens per request.

    Returns
    -------
    str
        The rate of decoding, or of the whole request where one token is generated.
    """
    return "decode_tok_s" if row["generate"] > 1 else "output_tok_s"


def legend(keys: Sequence[str]) -> str:
    """Explain some quantities in one line.

    Parameters
    ----------
    keys
        Contract names of quantities; unknown ones are skipped.

    Returns
    -------
    str
        Heading and meaning of each, separated by semicolons.
    """
    known = [QUANTITIES[key] for key in keys if key in QUANTITIES]
    return "; ".join(f"{q.heading}: {q.meaning}" for q in known)
