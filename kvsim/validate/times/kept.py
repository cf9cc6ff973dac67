"""Points that a validation has timed, on disk until it is whole, so that it can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsim.engine.timeline import OpSpan
from kvsim.errors import InputError
from kvsim.files import SAMPLES_FILE, append, own_output, read_bytes, replace_text
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.expected import Replay
from kvsim.validate.times.compared import Compared, Measured, Round

Key = tuple[str, int, int, str]
"""Model, batch, prompt, and the technique that was asked for."""


class KeptPoints:
    """Comparisons in a file with one JSON object per line, of which the first says what of.

    Parameters
    ----------
    about
        What is timed, with which profile; a file about something else is begun anew.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.found: dict[Key, Compared] = {}
        first = json.dumps({"points": 1, **about})
        lines = self._read()
        if lines and lines[0] == first:
            try:
                self.found = dict(_parse(line) for line in lines[1:])
            except (ValueError, KeyError, TypeError, AttributeError, InputError):
                self.found = {}  # no line of ours: measured again
        if not self.found or len(self.found) + 1 != len(lines):
            self.found = {}
            replace_text(path, first + "\n")

    def add(self, asked: Technique, one: Compared) -> None:
        """Keep a comparison; it is on disk before this returns.

        Parameters
        ----------
        asked
            The technique as it was asked for.
        """
        key = (one.model, one.batch, one.prompt, str(asked))
        row = {**asdict(one), "technique": str(one.technique), "asked": key[3]}
        append(self.path, json.dumps(row) + "\n")
        self.found[key] = one

    def remove(self) -> None:
        """The validation is whole, so that the next one begins anew."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[str]:
        """Whole lines; what was being written when a run was killed is cut off."""
        if not self.path.exists():
            return []
        with own_output():
            text = read_bytes(self.path, SAMPLES_FILE)
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            replace_text(self.path, whole.decode("utf-8", "replace"))
        return whole.decode("utf-8", "replace").splitlines()


def _parse(line: str) -> tuple[Key, Compared]:
    row = json.loads(line)
    asked = str(row.pop("asked"))
    row["technique"] = parse(row["technique"])
    for name in ("whole", "ops"):
        row[name] = tuple(Measured(**m) for m in row[name])
    row["rounds"] = tuple(Round(tuple(OpSpan(**s) for s in r["spans"])) for r in row["rounds"])
    row["replays"] = tuple(Replay(**replay) for replay in row.get("replays", ()))
    one = Compared(**row)
    return (one.model, one.batch, one.prompt, asked), one
