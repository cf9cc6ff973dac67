"""Attention traces: attention, quality and acceptance measured in a real run of one model.

Lossy techniques take their quality from it, speculative ones their accepted tokens;
``load`` reads a file of it and ``write`` writes one.
"""

import json
from dataclasses import MISSING, fields
from datetime import date
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_origin, get_type_hints

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.files import ATTENTION_FILE, read_json, replace_text
from kvsim.frozen import frozen
from kvsim.traces.requests import Floats, Integers

GAMMAS = range(1, 7)


@frozen
class Quality:
    """Difference of a technique's next-token distribution from that of full-precision KV.

    Attributes
    ----------
    technique
        The technique, ``NAME:KEY=VALUE,...`` as on the command line.
    perplexity
        Perplexity of the text.
    kl
        Mean KL divergence from the run with full-precision KV. [nat/token]
    found
        Share of the planted facts that were answered, 0 to 1; None if none were asked for.
    """

    technique: str
    perplexity: float
    kl: float
    found: float | None = None


@frozen
class Retrieval:
    """Retrieval of facts that were planted in the text and asked for at its end.

    Attributes
    ----------
    facts
        Number of facts in all windows.
    found
        Share of the facts that full-precision KV answered, 0 to 1.
    """

    facts: int
    found: float


@frozen
class TopK:
    """Share of attention mass that the k largest scores hold.

    Attributes
    ----------
    k
        Pairs kept, ascending.
    mass
        Mean attention mass of a query head's k largest, per layer and k, 0 to 1. (layers, len(k))
    """

    k: tuple[int, ...]
    mass: tuple[tuple[float, ...], ...]


@frozen
class Prefetch:
    """Share of the most attended pairs that SpeCache had prefetched.

    An oracle would fetch the k pairs with most attention mass of the output token, averaged over
    the query heads that share a KV head.

    Attributes
    ----------
    k
        Pairs fetched per KV head.
    bits
        Width of the low-precision keys that it chose them by.
    pairs
        Share of the oracle's pairs that were fetched, per layer, 0 to 1. (layers,)
    mass
        Mass of the fetched pairs over that of the oracle's, per layer, 0 to 1. (layers,)
    """

    k: int
    bits: int
    pairs: tuple[float, ...]
    mass: tuple[float, ...]


@frozen
class Saliency:
    """Recall of salient tokens by ZipCache's probe queries.

    Attributes
    ----------
    salient
        Share of tokens counted as salient, 0 to 1.
    probe
        Share of queries used as probes, 0 to 1.
    overlap
        Share of the truly salient tokens that the probes find, per layer, 0 to 1. (layers,)
    """

    salient: float
    probe: float
    overlap: tuple[float, ...]


@frozen
class Acceptance:
    """Acceptance of drafted tokens in speculative decoding.

    Attributes
    ----------
    technique
        The drafting technique, ``NAME:KEY=VALUE,...``, without its number of drafts (gamma).
    temperature
        Sampling temperature; 0 for greedy decoding.
    rounds
        Least number of rounds that were measured for any gamma.
    reached
        For gamma = 1, 2, ...: the shares of rounds in which at least 1, 2, ..., gamma drafts are
        accepted. (gammas, gamma)
    """

    technique: str
    temperature: float
    rounds: int
    reached: tuple[tuple[float, ...], ...]

    def tokens(self, gamma: int) -> float:
        """Compute the mean tokens per round: accepted ones and the one that verification adds.

        Parameters
        ----------
        gamma
            Drafted tokens per round. [tokens]

        Returns
        -------
        float
            Mean. [tokens per round]

        Raises
        ------
        InputError
            If the trace has no such gamma.
        """
        return 1.0 + sum(self._row(gamma))

    def draw(self, random: "np.random.Generator", gamma: int, rounds: int) -> Integers:
        """Draw the tokens of some rounds independently.

        Parameters
        ----------
        random
            Random generator.
        gamma
            Drafted tokens per round. [tokens]
        rounds
            Number of rounds.

        Returns
        -------
        Integers
            Tokens of each round, shape (rounds,). [tokens]
        """
        falling: Floats = np.array(self._row(gamma))
        accepted: Integers = (random.random(rounds)[:, None] < falling).sum(axis=1, dtype=np.int64)
        return accepted + 1

    def _row(self, gamma: int) -> tuple[float, ...]:
        if not 1 <= gamma <= len(self.reached):
            known = f"1 to {len(self.reached)}"
            raise InputError(f"{self.technique}: gamma {gamma} was not measured; expected {known}")
        return self.reached[gamma - 1]


@frozen
class AttentionTrace:
    """The measurements of one run.

    Attributes
    ----------
    model
        Name in the catalogue, or path of its configuration.
    weights
        Where the weights are from, with a checksum.
    text
        The text that was read, with a checksum.
    tokens
        Tokens of it that were read. [tokens]
    settings
        Device, number format, and how the text was read.
    layers
        Layers of the model.
    date
        Day of the run.
    perplexity
        With full-precision KV.
    quality, retrieval, top_k, prefetch, saliency, acceptance
        The measurements; empty or None if not measured.
    """

    model: str
    weights: str
    text: str
    tokens: int
    settings: str
    layers: int
    date: date
    perplexity: float
    quality: tuple[Quality, ...] = ()
    retrieval: Retrieval | None = None
    top_k: TopK | None = None
    prefetch: tuple[Prefetch, ...] = ()
    saliency: tuple[Saliency, ...] = ()
    acceptance: tuple[Acceptance, ...] = ()


TRACE_FORMAT = "kvsim attention trace 1"


def load(path: Path) -> AttentionTrace:
    """Read an attention trace.

    Parameters
    ----------
    path
        Path of the file.

    Returns
    -------
    AttentionTrace
        The trace.

    Raises
    ------
    InputError
        If the file is not an attention trace; the message names the field, and the nearest known
        one.
    """
    return parse_record(read_json(path, ATTENTION_FILE), path)


def parse_record(given: object, path: Path) -> AttentionTrace:
    """Parse the attention trace that a file holds.

    Parameters
    ----------
    given
        The parsed JSON.
    path
        Path of the file, for error messages.

    Returns
    -------
    AttentionTrace
        The trace.

    Raises
    ------
    InputError
        If a field is missing, unknown or invalid.
    """
    return _FieldReader(str(path)).trace(given)


def write(path: Path, trace: AttentionTrace) -> None:
    """Write an attention trace, whole or not at all.

    Parameters
    ----------
    path
        Path of the file.
    trace
        The trace.

    Raises
    ------
    InputError
        If `load` would refuse it, or the place cannot be written.
    """
    made = record(trace)
    _FieldReader(str(path)).trace(json.loads(json.dumps(made)))
    replace_text(path, json.dumps(made, indent=1, allow_nan=False) + "\n")


def record(trace: AttentionTrace) -> dict[str, object]:
    """Return a trace as the JSON object that its file holds.

    Parameters
    ----------
    trace
        The trace.
    """
    return {
        "format": TRACE_FORMAT,
        **{name: _as_json(getattr(trace, name)) for name in trace.__dataclass_fields__},
    }


def _as_json(value: object) -> object:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, tuple):
        return [_as_json(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


RANGES = {"perplexity": (1.0, 1e12), "kl": (0.0, 1e12), "temperature": (0.0, 100.0)}
"""Of numbers; those that are not listed are shares, from 0 to 1."""


class _FieldReader:
    """Makes a record of JSON, field by field, as the annotations of its class say."""

    def __init__(self, file: str) -> None:
        self.file = file

    def trace(self, given: object) -> AttentionTrace:
        """The whole trace, whose lists are as long as its layers and rounds ask for."""
        plain = dict(given) if isinstance(given, dict) else {}
        if plain.pop("format", None) != TRACE_FORMAT:
            raise InputError(f'{self.file}: expected a JSON object with "format": "{TRACE_FORMAT}"')
        found: AttentionTrace = self._record("", plain, AttentionTrace)
        if found.top_k is not None:
            k, mass = found.top_k.k, found.top_k.mass
            if not k or list(k) != sorted(set(k)):
                raise self._error("top_k.k", list(k), "ascending numbers")
            self._check_length("top_k.mass", mass, found.layers)
            for layer, row in enumerate(mass):
                self._check_length(f"top_k.mass[{layer}]", row, len(k))
                if list(row) != sorted(row):
                    raise self._error(
                        f"top_k.mass[{layer}]", list(row), "mass that rises with pairs"
                    )
        for name, parts in (("prefetch", found.prefetch), ("saliency", found.saliency)):
            for i, part in enumerate(parts):
                for each, shares in vars(part).items():
                    if isinstance(shares, tuple):
                        self._check_length(f"{name}[{i}].{each}", shares, found.layers)
        for i, part in enumerate(found.acceptance):
            self._check_length(f"acceptance[{i}].reached", part.reached, len(GAMMAS))
            for gamma, row in zip(GAMMAS, part.reached, strict=True):
                place = f"acceptance[{i}].reached[{gamma - 1}]"
                self._check_length(place, row, gamma)
                if list(row) != sorted(row, reverse=True):
                    expected = "shares that do not rise with the position"
                    raise self._error(place, list(row), expected)
        return found

    def _record(self, where: str, item: object, kind: type) -> Any:
        """A record of a class: all fields that must be there, none that is not known."""
        if not isinstance(item, dict):
            raise self._error(where, item, "a JSON object")
        hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
        for name in item:
            if name not in known:
                raise unknown(f"field {where or 'on top'}", name, known, f"in {self.file}")
        for name, made in known.items():
            if name not in item and made.default is MISSING:
                raise InputError(f"{self.file}, {where or 'on top'}: {name!r} is missing; add it")
        path = f"{where}." if where else ""
        return kind(**{name: self._value(path + name, item[name], hints[name]) for name in item})

    def _value(self, where: str, item: object, hint: Any) -> object:
        if isinstance(hint, UnionType):
            return None if item is None else self._value(where, item, hint.__args__[0])
        if get_origin(hint) is tuple:
            if not isinstance(item, list):
                raise self._error(where, item, "a list")
            inner = hint.__args__[0]
            return tuple(self._value(f"{where}[{i}]", one, inner) for i, one in enumerate(item))
        if hint is str and not (isinstance(item, str) and item.strip() and item.isprintable()):
            raise self._error(where, item, "text in one line")
        if hint is int and not (type(item) is int and 1 <= item <= 10**9):
            raise self._error(where, item, "a whole number from 1 to 1e9")
        if hint is float:
            least, most = RANGES.get(where.rpartition(".")[2], (0.0, 1.0))
            if not (type(item) in (int, float) and least <= cast(float, item) <= most):
                raise self._error(where, item, f"a number from {least:g} to {most:g}")
            return float(cast(float, item))
        if hint is date:
            try:
                return date.fromisoformat(cast(str, item))
            except (TypeError, ValueError):
                raise self._error(where, item, "a day as 2026-11-21") from None
        return self._record(where, item, hint) if hasattr(hint, "__dataclass_fields__") else item

    def _check_length(self, where: str, given: tuple[object, ...], length: int) -> None:
        if len(given) != length:
            raise self._error(where, _as_json(given), f"a list of {length}")

    def _error(self, where: str, item: object, expected: str) -> InputError:
        got = repr(item)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        return InputError(f"{self.file}, {where or 'on top'}: got {got}; expected {expected}")


def shipped_traces() -> dict[str, Path]:
    """Return the attention traces that ship with kvsim.

    Returns
    -------
    dict of str to Path
        File by name of the model.
    """
    folder = Path(str(files("kvsim.traces"))) / "measured"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
