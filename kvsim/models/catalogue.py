"""The models that ship: one line of ``catalogue.jsonl`` each.

A line has the model's name, its Hugging Face id, other names in use (``also``), where its shape
comes from, and its ``config.json``. A model shaped as another names it (``like``) and gives only
the fields that differ.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, TypedDict

from kvsim.errors import unknown

PARAMETER_COUNTS = {"published_parameters", "counted_parameters", "stated_parameters"}


class CatalogueEntry(TypedDict):
    """Provenance of a model of the catalogue."""

    hf_id: str
    published: int | None  # parameters of the published checkpoint, where known exactly
    counted: int | None  # those of the transformers class made from the configuration
    stated: str | None  # what its makers say, rounded as they do: "31.6B"
    stated_active: str | None  # the same of the parameters that a token meets
    recalled: bool  # fields from memory: no copy of the file was at hand
    source: str


def model_names() -> list[str]:
    """The names of the catalogue."""
    return list(_lines())


def catalogue_entry(name: str) -> CatalogueEntry:
    """Return where the shape of a catalogue model comes from.

    Parameters
    ----------
    name
        Name in the catalogue.

    Raises
    ------
    InputError
        If the catalogue has no such name.
    """
    line = _lines().get(name)
    if line is None:
        raise unknown("model", name, model_names())
    base = line
    while "like" in base:
        base = _lines()[base["like"]]
    counts = line if line.keys() & PARAMETER_COUNTS else base
    return {
        "hf_id": line["hf_id"],
        "published": counts.get("published_parameters"),
        "counted": counts.get("counted_parameters"),
        "stated": counts.get("stated_parameters"),
        "stated_active": counts.get("stated_active_parameters"),
        "recalled": line.get("recalled", base.get("recalled", False)),
        "source": line.get("source") or f"shaped as {base['name']}: {base['source']}",
    }


@cache
def catalogue_config(name: str) -> Mapping[str, object]:
    """Return the ``config.json`` of a catalogue model.

    Parameters
    ----------
    name
        Name in the catalogue.
    """
    line = _lines()[name]
    base = catalogue_config(line["like"]) if "like" in line else {}
    return MappingProxyType({**base, **line.get("config", {})})


def names_in_use() -> dict[str, str]:
    """Every name of the catalogue, Hugging Face id and other name in use, with the model's name."""
    return {
        text: name
        for name, line in _lines().items()
        for text in (name, line["hf_id"], *line.get("also", ()))
    }


@cache  # what ships stays as it is while kvsim runs
def _lines() -> dict[str, dict[str, Any]]:
    text = (files("kvsim") / "models" / "catalogue.jsonl").read_text(encoding="utf-8")
    return {line["name"]: line for line in map(json.loads, text.splitlines())}
