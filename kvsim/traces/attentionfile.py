"""Attention traces as JSON files, strictly checked; docs/traces.md describes the format."""

import json
from dataclasses import MISSING
from datetime import date
from pathlib import Path
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.files import read_json, replace_text
from kvsim.files.kinds import ATTENTION
from kvsim.traces.attention import (
    GAMMAS,
    Acceptance,
    AttentionTrace,
    Prefetch,
    Quality,
    Retrieval,
    Saliency,
    TopK,
)

FORMAT = "kvsim attention trace 1"


def load(path: Path) -> AttentionTrace:
    """Read an attention trace.

    Raises
    ------
    InputError
        If the file is not one; the line names the field, and the nearest known one.
    """
    return of(read_json(path, ATTENTION), path)


def of(given: Any, path: Path) -> AttentionTrace:
    """The attention trace that a file holds; as ``load``."""
    return _FieldReader(str(path)).trace(given)


def write(path: Path, trace: AttentionTrace) -> None:
    """Write an attention trace, whole or not at all.

    Raises
    ------
    InputError
        If `load` would refuse it, or the place cannot be written.
    """
    made = record(trace)
    _FieldReader(str(path)).trace(json.loads(json.dumps(made)))
    replace_text(path, json.dumps(made, indent=1, allow_nan=False) + "\n")


def record(trace: AttentionTrace) -> dict[str, Any]:
    """A trace as the JSON object that its file holds."""
    fields: dict[str, Any] = _plain(trace)
    return {"format": FORMAT} | fields


def _plain(value: Any) -> Any:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


class _FieldReader:
    """Checks a record field by field."""

    def __init__(self, file: str) -> None:
        self.file = file

    def trace(self, record: object) -> AttentionTrace:
        given = dict(record) if isinstance(record, dict) else {}
        if given.pop("format", None) != FORMAT:
            raise InputError(f'{self.file}: expected a JSON object with "format": "{FORMAT}"')
        fields = self.fields("", given, AttentionTrace)
        layers = self.whole("layers", fields["layers"])
        return AttentionTrace(
            model=self.words("model", fields["model"]),
            weights=self.words("weights", fields["weights"]),
            text=self.words("text", fields["text"]),
            tokens=self.whole("tokens", fields["tokens"]),
            settings=self.words("settings", fields["settings"]),
            layers=layers,
            date=self.day("date", fields["date"]),
            perplexity=self.number("perplexity", fields["perplexity"], 1.0),
            quality=tuple(
                self.quality(where, item) for where, item in self.items("quality", fields)
            ),
            retrieval=None if fields["retrieval"] is None else self.retrieval(fields["retrieval"]),
            top_k=None if fields["top_k"] is None else self.top_k(fields["top_k"], layers),
            prefetch=tuple(
                self.prefetch(where, item, layers) for where, item in self.items("prefetch", fields)
            ),
            saliency=tuple(
                self.saliency(where, item, layers) for where, item in self.items("saliency", fields)
            ),
            acceptance=tuple(
                self.acceptance(where, item) for where, item in self.items("acceptance", fields)
            ),
        )

    def quality(self, where: str, item: object) -> Quality:
        fields = self.fields(where, item, Quality)
        return Quality(
            self.words(f"{where}.technique", fields["technique"]),
            self.number(f"{where}.perplexity", fields["perplexity"], 1.0),
            self.number(f"{where}.kl", fields["kl"]),
            None
            if fields["found"] is None
            else self.number(f"{where}.found", fields["found"], 0.0, 1.0),
        )

    def retrieval(self, item: object) -> Retrieval:
        fields = self.fields("retrieval", item, Retrieval)
        return Retrieval(
            self.whole("retrieval.facts", fields["facts"]),
            self.number("retrieval.found", fields["found"], 0.0, 1.0),
        )

    def top_k(self, item: object, layers: int) -> TopK:
        fields = self.fields("top_k", item, TopK)
        k = tuple(self.whole("top_k.k", one) for one in self.list("top_k.k", fields["k"]))
        if not k or list(k) != sorted(set(k)):
            raise self.wrong("top_k.k", fields["k"], "ascending numbers")
        mass = [
            self.shares(f"top_k.mass[{layer}]", row, len(k))
            for layer, row in enumerate(self.list("top_k.mass", fields["mass"], layers))
        ]
        for layer, row in enumerate(mass):
            if list(row) != sorted(row):
                raise self.wrong(f"top_k.mass[{layer}]", list(row), "more mass for more pairs")
        return TopK(k, tuple(mass))

    def prefetch(self, where: str, item: object, layers: int) -> Prefetch:
        fields = self.fields(where, item, Prefetch)
        return Prefetch(
            self.whole(f"{where}.k", fields["k"]),
            self.whole(f"{where}.bits", fields["bits"]),
            self.shares(f"{where}.pairs", fields["pairs"], layers),
            self.shares(f"{where}.mass", fields["mass"], layers),
        )

    def saliency(self, where: str, item: object, layers: int) -> Saliency:
        fields = self.fields(where, item, Saliency)
        return Saliency(
            self.number(f"{where}.salient", fields["salient"], 0.0, 1.0),
            self.number(f"{where}.probe", fields["probe"], 0.0, 1.0),
            self.shares(f"{where}.overlap", fields["overlap"], layers),
        )

    def acceptance(self, where: str, item: object) -> Acceptance:
        fields = self.fields(where, item, Acceptance)
        rows = self.list(f"{where}.reached", fields["reached"], len(GAMMAS))
        reached = []
        for gamma, row in zip(GAMMAS, rows, strict=True):
            place = f"{where}.reached[{gamma - 1}]"
            shares = self.shares(place, row, gamma)
            if list(shares) != sorted(shares, reverse=True):
                raise self.wrong(place, list(shares), "shares that do not rise with the position")
            reached.append(shares)
        technique = self.words(f"{where}.technique", fields["technique"])
        temperature = self.number(f"{where}.temperature", fields["temperature"], 0.0, 100.0)
        rounds = self.whole(f"{where}.rounds", fields["rounds"])
        return Acceptance(technique, temperature, rounds, tuple(reached))

    def fields(self, where: str, item: object, kind: Any) -> dict[str, Any]:
        """A record's fields by name: all that must be there, none that is not known."""
        if not isinstance(item, dict):
            raise self.wrong(where, item, "a JSON object")
        known = kind.__dataclass_fields__
        for name in item:
            if name not in known:
                raise unknown(f"field {where or 'on top'}", name, known, f"in {self.file}")
        found = dict(item)
        for name, made in known.items():
            if name in found:
                continue
            if made.default is MISSING:
                raise InputError(f"{self.file}, {where or 'on top'}: {name!r} is missing; add it")
            found[name] = made.default
        return found

    def items(self, name: str, fields: dict[str, Any]) -> list[tuple[str, object]]:
        listed = self.list(name, list(fields[name]) if fields[name] == () else fields[name])
        return [(f"{name}[{i}]", item) for i, item in enumerate(listed)]

    def list(self, where: str, item: object, length: int | None = None) -> list[Any]:
        if not isinstance(item, list) or (length is not None and len(item) != length):
            raise self.wrong(
                where, item, "a list" + (f" of {length}" if length is not None else "")
            )
        return item

    def shares(self, where: str, item: object, length: int) -> tuple[float, ...]:
        listed = self.list(where, item, length)
        return tuple(self.number(f"{where}[{i}]", one, 0.0, 1.0) for i, one in enumerate(listed))

    def number(self, where: str, item: object, least: float = 0.0, most: float = 1e12) -> float:
        if type(item) not in (int, float) or not least <= item <= most:  # type: ignore[operator]
            raise self.wrong(where, item, f"a number from {least:g} to {most:g}")
        return float(item)  # type: ignore[arg-type]

    def whole(self, where: str, item: object) -> int:
        if type(item) is not int or not 1 <= item <= 10**9:
            raise self.wrong(where, item, "a whole number from 1 to 1e9")
        return item

    def words(self, where: str, item: object) -> str:
        if not isinstance(item, str) or not item.strip() or not item.isprintable():
            raise self.wrong(where, item, "text in one line")
        return item

    def day(self, where: str, item: object) -> date:
        try:
            return date.fromisoformat(item)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.wrong(where, item, "a day as 2026-11-21") from None

    def wrong(self, where: str, item: object, expected: str) -> InputError:
        got = repr(item)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        return InputError(f"{self.file}, {where or 'on top'}: got {got}; expected {expected}")
