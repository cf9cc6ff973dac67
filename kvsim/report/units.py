"""Numbers for people, and one heading and one meaning per quantity for every table and answer.

Few digits, a unit that fits the size, a dash for what does not exist."""

from collections.abc import Callable
from functools import wraps
from math import floor, isfinite, log10
from typing import Any

from kvsim.frozen import frozen
from kvsim.machines.hardware import GIB
from kvsim.report.json import Row

DASH = "-"
TIME_UNITS = ((1e-3, "µs", 1e-6), (1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0))
"""Below which time a unit is used, the unit, and its size. [s]"""


def _dashed(write: Callable[..., str]) -> Callable[..., str]:
    """Write a dash for what does not exist: None, or a number that is not finite."""

    @wraps(write)
    def dashed(value: float | None, *given: int, **named: int) -> str:
        return DASH if value is None or not isfinite(value) else write(value, *given, **named)

    return dashed


@_dashed
def format_number(value: float, digits: int = 4) -> str:
    """Write a number with few significant digits and no power of ten.

    Parameters
    ----------
    value
        Number to write; None and values that are not finite become a dash, as in all functions
        here.
    digits
        Significant digits; numbers of more digits before the point are written in full.
    """
    whole = abs(value) >= 10**digits - 0.5  # or would be rounded to it
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def rounded(value: float, digits: int) -> str:
    """Write a number with a fixed count of significant digits, as 77.3 or 7.70.

    Parameters
    ----------
    value
        Finite number to write.
    digits
        Significant digits; digits before the point are all kept.
    """
    if value == 0:
        return "0"
    places = max(digits - 1 - floor(log10(abs(value))), 0)
    if places and abs(round(value, places)) >= 10 ** (digits - places):
        places -= 1  # 9.996 is 10.0
    return f"{value:,.{places}f}"


@_dashed
def seconds(value: float, digits: int = 3) -> str:
    """Write a time in µs, ms, s, min or h, whichever fits its size.

    Parameters
    ----------
    value
        Time. [s]
    digits
        Significant digits.
    """
    for below, unit, scale in TIME_UNITS:
        if abs(value) < below * (1 - 0.5 * 10**-digits):
            return f"{rounded(value / scale, digits)} {unit}"
    return f"{rounded(value / 3600, digits)} h"


def seconds_range(low: float, high: float) -> str:
    """Write a range of times, as 90.1–177 ms; the unit is written once where both share it.

    Parameters
    ----------
    low, high
        Ends of the range. [s]
    """
    start, end = seconds(low), seconds(high)
    same = start.partition(" ")[2] == end.partition(" ")[2]
    return f"{start.partition(' ')[0] if same else start}–{end}"


@_dashed
def gib(size: float, digits: int = 1) -> str:
    """Write bytes as GiB, without the unit, which stands in the heading.

    Parameters
    ----------
    size
        Size. [B]
    digits
        Digits after the point.
    """
    return f"{float(size) / GIB:,.{digits}f}"


@_dashed
def size(value: float) -> str:
    """Write bytes in B, KiB, MiB or GiB, whichever fits their size.

    Parameters
    ----------
    value
        Size. [B]
    """
    for below, unit, scale in ((2**10, "B", 1), (2**20, "KiB", 2**10), (GIB, "MiB", 2**20)):
        if value < below:
            return f"{rounded(value / scale, 3)} {unit}" if value else "0 B"
    return f"{value / GIB:,.1f} GiB"


@_dashed
def rate(value: float) -> str:
    """Write tokens or requests per second with three digits, without the unit.

    Parameters
    ----------
    value
        Rate. [1/s]
    """
    return rounded(value, 3)


@_dashed
def integer(value: float) -> str:
    """Write a count in full, with commas between thousands.

    Parameters
    ----------
    value
        Count.
    """
    return f"{value:,.0f}"


@_dashed
def percent(share: float, digits: int = 2) -> str:
    """Write a share as a percentage with its sign, as 12 %.

    Parameters
    ----------
    share
        Share of 1.
    digits
        Significant digits.
    """
    return f"{rounded(100 * share, digits)} %"


@_dashed
def times(ratio: float) -> str:
    """Write a ratio with three digits, as 1.90x.

    Parameters
    ----------
    ratio
        Ratio.
    """
    return f"{rounded(ratio, 3)}x"


@_dashed
def usd(value: float) -> str:
    """Write a price in dollars: whole from 100 on, else with three digits.

    Parameters
    ----------
    value
        Price. [USD]
    """
    return f"${value:,.0f}" if value >= 100 else f"${rounded(value, 3)}"


@_dashed
def likelihood(share: float) -> str:
    """Write a probability as a whole percentage, or as ``< 1 %`` or ``> 99 %`` near the ends.

    Parameters
    ----------
    share
        Probability between 0 and 1; None if it was not computed.
    """
    return "> 99 %" if share > 0.99 else "< 1 %" if share < 0.01 else f"{100 * share:.0f} %"


@frozen
class Quantity:
    """A quantity in results: its heading, format and meaning.

    Attributes
    ----------
    heading
        Heading of its column.
    show
        Formats a value.
    meaning
        Explanation for readers.
    engines
        Name of the quantity in serving engines, if it has one.
    """

    heading: str
    show: Callable[[Any], str]
    meaning: str
    engines: str = ""


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
    "disk_bytes": Quantity("disk GiB", gib, "peak space of the replica on its drive"),
    "max_batch": Quantity(
        "max batch",
        integer,
        "largest batch that engines hold in the GPU memory that they use by default",
    ),
    "max_seqs": Quantity("max seqs", integer, "sequences in a batch", "max-num-seqs"),
    "usd_per_million_tokens": Quantity("USD/Mtok", usd, "price of a million generated tokens"),
    "bound_by": Quantity("bound by", str, "what the busiest stream spends most of its time on"),
}


def comparison_key(row: Row) -> str:
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
