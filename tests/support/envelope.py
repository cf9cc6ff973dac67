"""Answers of ``--json``, held to the schema that kvsim ships."""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from kvsim.report.json import COMMON

TYPES = {
    "object": dict, "array": list, "string": str, "null": type(None), "boolean": bool,
    "integer": int, "number": (int, float),
}  # fmt: skip
SAID = {"$schema", "title", "description", "$defs", "then"}
"""Keywords that check nothing by themselves."""


@cache
def schema() -> dict[str, Any]:
    """The shipped schema."""
    place = files("kvsim.report") / "schema" / "answer.schema.json"
    found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return found


def faults(value: Any, rules: dict[str, Any], where: str = "") -> Iterator[str]:
    """Why a value does not hold to a schema; of the draft of 2020-12 the keywords used here."""
    for key, rule in rules.items():
        if key == "type":
            yield from _of_type(value, rule, where)
        elif key == "const" or key == "enum":
            if value not in (rule if key == "enum" else [rule]):
                yield f"{where}: {value!r} is not {rule!r}"
        elif key == "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield f"{where}: {value!r} does not match {rule}"
        elif key == "required":
            if isinstance(value, dict):
                yield from (f"{where}: no {name}" for name in rule if name not in value)
        elif key == "properties":
            for name in rule.keys() & value.keys() if isinstance(value, dict) else ():
                yield from faults(value[name], rule[name], f"{where}.{name}")
        elif key == "additionalProperties":
            known = rules.get("properties", {}).keys()
            for name in value.keys() - known if isinstance(value, dict) else ():
                more = f"{where}.{name}"
                yield from faults(value[name], rule, more) if rule else [f"{more} is not known"]
        elif key == "items":
            for i, each in enumerate(value if isinstance(value, list) else ()):
                yield from faults(each, rule, f"{where}[{i}]")
        elif key == "allOf":
            for each in rule:
                yield from faults(value, each, where)
        elif key == "anyOf":
            tried = [list(faults(value, each, where)) for each in rule]
            if all(tried):
                yield from min(tried, key=len)
        elif key == "if":
            if not any(faults(value, rule, where)):
                yield from faults(value, rules["then"], where)
        elif key == "$ref":
            yield from faults(value, schema()["$defs"][rule.removeprefix("#/$defs/")], where)
        elif key not in SAID:
            raise ValueError(f"keyword {key!r} is not known here")


def _of_type(value: Any, rule: str | list[str], where: str) -> Iterator[str]:
    names = [rule] if isinstance(rule, str) else rule
    fits = any(isinstance(value, TYPES[name]) for name in names)  # type: ignore[arg-type]
    if not fits or (isinstance(value, bool) and "boolean" not in names):
        yield f"{where}: {value!r:.60} is no {' or '.join(names)}"


def answer_in(text: str) -> dict[str, Any]:
    """The answer that a command printed, once it holds to the schema."""
    found: dict[str, Any] = json.loads(text)
    wrong = list(faults(found, schema()))
    assert not wrong, f"{found.get('command')}: {wrong[:5]}"
    return found


def own_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the keys that every answer has."""
    return {key: value for key, value in answer.items() if key not in COMMON}
