"""When each kind of replica runs, as the terminal and the page of ``kvsim capacity`` show it."""

from dataclasses import replace

from kvsim.report.json import Row
from kvsim.report.table import Table, of_cells

NOTE = (
    "from: since the first request of the trace, in hours, minutes and seconds; below the kinds of "
    "replica, how many of each run"
)


def schedule(answer: Row) -> list[Table]:
    """What runs when, in as few rows as there are changes; nothing if all replicas always run."""
    if answer["schedule"] is None:
        return []
    names = [r["name"] for r in answer["fleet"]]
    rows: list[tuple[float, list[str]]] = []
    for window in answer["schedule"]:
        counts = [str(window["replicas"].get(name, 0)) for name in names]
        if rows and rows[-1][1] == counts:
            rows.pop()  # what ran before runs longer
        rows.append((window["until_h"], counts))
    begins = [0.0, *(until for until, _ in rows)]
    cells = [
        (f"{_clock(begin)} to {_clock(until)}", *counts)
        for begin, (until, counts) in zip(begins, rows, strict=False)
    ]
    return [replace(of_cells(("from", *names), cells), note=NOTE)]


def windows(count: int) -> str:
    """How often a window was simulated alone; empty if never."""
    return f", and {count} times a window of the schedule alone" if count else ""


def _clock(hours: float) -> str:
    """A time of the trace, as 0:29:10."""
    seconds = round(3600 * hours)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
