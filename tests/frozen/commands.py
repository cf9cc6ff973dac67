"""What ``plan``, ``simulate`` and ``capacity`` answer with ``--json``: numbers and names.

A case is the command line. Sentences are not kept, and new fields of an answer are no difference.
"""

import json
import re
import shlex
from typing import Any

from tests.frozen.store import Answer, Kind
from tests.support.commands import run

TEXTS = ("answer", "command", "seconds", "version", "date", "advice", "why", "reason")
"""Parts of names of fields that hold sentences, or differ from run to run."""
ENVELOPE = ("kvsim", "schema", "command", "data", "verdict", "notes", "evidence")
"""Keys that every answer has."""
LONG = 6  # spaces of a sentence


def compute(case: str) -> Answer:
    """Run a command and return its exit code with the numbers and names that it prints."""
    ended = run(*shlex.split(case), "--json")
    if not ended.out:
        return {"code": ended.code, "numbers": re.findall(r"\d[\d,.]*", ended.err)}
    document = json.loads(ended.out)
    own = {key: value for key, value in document.items() if key not in ENVELOPE}
    return {"code": ended.code, **_without_sentences(own)}


def _without_sentences(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not any(text in k for text in TEXTS)}
        return {k: _without_sentences(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [_without_sentences(each) for each in value]
    return "a sentence" if isinstance(value, str) and value.count(" ") > LONG else value


PLANS = Kind("plans", compute, tolerance=1e-6, every=18, depth=3, additions=True)
"""Solvers stop at tolerances of their own."""
SIMULATIONS = Kind("simulations", compute, every=8, depth=3, additions=True)
CAPACITY = Kind("capacity", compute, tolerance=1e-6, every=11, depth=3, additions=True)
