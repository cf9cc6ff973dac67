"""Options of the command line that would admit what the user does not accept yet."""

from collections.abc import Iterator
from math import ceil

from kvsim.planner.question import Question, Search


def needs(question: Question, search: Search, row: int) -> Iterator[str]:
    """Options of the command line that would admit a row."""
    if search.table.columns["loss"][row] > question.limits.loss:
        found = search.table.evidence[row]
        if found.kind == "none" or found.missing:
            yield "--lossy"
        else:
            yield f"--max-loss {ceil(found.loss * 100) / 100:g}"
    if search.table.columns["assumed"][row] > question.limits.assumed:
        yield "--acceptance"
