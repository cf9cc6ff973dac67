"""Requests from logs: spans of OpenTelemetry, and access logs of web servers."""

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.traces.lengths import Lengths
from kvsim.traces.requests import Requests

PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
GENERATE = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
ACCESS = re.compile(
    r"\S++ \S++ [^\[]*+\[(?P<time>[^\]]{1,64}+)\] "
    r'"(?P<method>[A-Z]{1,20}+) (?P<path>[^\s"]++)[^"]*+" (?P<status>\d{3}) '
)
SERVED = re.compile(r"completions|generate|messages|responses")
CLOCK = "%d/%b/%Y:%H:%M:%S %z"


def of_spans(documents: list[Any], where: str) -> tuple[Requests, list[str]]:
    """The requests of spans with token counts, in the JSON of OTLP.

    Raises
    ------
    InputError
        If no span has them.
    """
    rows = []
    left_out = 0
    for document in documents:
        for span in _spans(document):
            found = _attributes(span)
            prompt, generate = (
                next((found[k] for k in keys if k in found), None) for keys in (PROMPT, GENERATE)
            )
            try:
                if prompt is None or generate is None:
                    continue
                row = (int(span["startTimeUnixNano"]) * 1e-9, int(prompt), int(generate))
            except (KeyError, TypeError, ValueError):
                left_out += 1
                continue
            if row[1] >= 1 and row[2] >= 1:
                rows.append(row)
            else:
                left_out += 1
    if not rows:
        raise InputError(f"{where}: no span with {PROMPT[0]} and {GENERATE[0]}; is tracing on?")
    rows.sort()
    arrival = np.array([row[0] for row in rows])
    prompt_tokens, generated = (np.array([row[i] for row in rows], np.int64) for i in (1, 2))
    notes = [f"{left_out:,} spans without a start or tokens were left out"] if left_out else []
    return Requests(arrival - arrival[0], prompt_tokens, generated), notes


def _spans(document: Any) -> Iterator[dict[str, Any]]:
    """Every span of an OTLP document, whatever is missing."""
    if not isinstance(document, dict):
        return
    for resource in document.get("resourceSpans") or []:
        for scope in (resource or {}).get("scopeSpans") or []:
            yield from (s for s in (scope or {}).get("spans") or [] if isinstance(s, dict))


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for entry in span.get("attributes") or []:
        if isinstance(entry, dict) and isinstance(entry.get("value"), dict):
            found[str(entry.get("key"))] = next(iter(entry["value"].values()), None)
    return found


def of_access(lines: Iterator[str], lengths: Lengths, where: str, seed: int) -> tuple[
    Requests, list[str]
]:  # fmt: skip
    """Arrivals of an access log in the common or combined format; lengths are drawn.

    Raises
    ------
    InputError
        If no line is of an answered request for tokens.
    """
    times, skipped = [], 0
    for line in lines:
        found = ACCESS.match(line)
        try:
            when = datetime.strptime(found["time"], CLOCK).timestamp() if found else None
        except ValueError:
            when = None
        if found is None or when is None:
            skipped += bool(line.strip())
        elif (
            found["method"] == "POST" and found["status"][0] == "2" and SERVED.search(found["path"])
        ):
            times.append(when)
    if not times:
        raise InputError(
            f"{where}: no answered POST of completions in the common log format; check the file"
        )
    arrival = np.sort(np.array(times))
    prompt, generate = lengths.draw(np.random.default_rng(seed), len(arrival))
    notes = [f"lengths are drawn from --lengths: {where} has arrivals only"]
    if skipped:
        notes.append(f"{skipped:,} lines of another format were left out")
    return Requests(arrival - arrival[0], prompt, generate), notes
