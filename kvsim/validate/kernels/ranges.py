"""Rows that are worked on together, so that what is made of them stays in a processor's cache."""

from collections.abc import Iterator

NUMBERS = 1 << 17  # half a MiB in fp32


def ranges(rows: int, width: int, most: int | None = None, whole: int = 1) -> Iterator[slice]:
    """Rows of ``width`` numbers in ranges of at most so many numbers, but of a row at least.

    Parameters
    ----------
    most : numbers of a range; what a core's cache holds if not given.
    whole : ranges are multiples of it, rounded up, but for the last. [rows]
    """
    each = max(1, (NUMBERS if most is None else most) // max(width, 1))
    each = -(-each // whole) * whole
    for start in range(0, rows, each):
        yield slice(start, min(start + each, rows))
