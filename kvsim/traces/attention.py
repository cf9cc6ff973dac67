"""Attention traces: attention, quality and acceptance measured in a real run of one model.

Lossy techniques take their quality from it, speculative ones their accepted tokens;
``load`` reads a file of it and ``write`` writes one.
"""

import json
from dataclasses import MISSING, fields
from datetime import date
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.files import ATTENTION_FILE, read_json, replace_text
from kvsim.frozen import frozen
from kvsim.traces.requests import Floats, Integers

GAMMAS = range(1, 7)


@frozen
class Quality:
    """How far a technique's next-token distribution is from full-precision KV.

    Attributes
    ----------
    technique
        NAME:KEY=VALUE,... as on the command line.
    perplexity
        Of the text.
    kl
        Mean KL divergence from the run with full-precision KV, per token. [nat]
    found
        Share of the planted facts that it answered, 0 to 1; None if none were asked for.
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
        How many, in all windows.
    found
        Share of them that full-precision KV answered, 0 to 1.
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
    """Acceptance of drafted tokens.

    Attributes
    ----------
    technique
        The drafting technique, NAME:KEY=VALUE,... without its gamma.
    temperature
        0: greedy; otherwise tokens were drawn at this temperature.
    rounds
        Rounds measured per gamma, at least.
    reached
        For each gamma from 1 on: the share of rounds that accept at least 1, 2, ..., gamma tokens.
        (gammas, gamma)
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
        On what device, in which number format, how it was read.
    layers
        Layers of the model.
    date
        Day of the run.
    perplexity
        With full-precision KV.
    quality, retrieval, top_k, prefetch, saliency, acceptance
        What was measured; empty or None if it was not.
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

    Raises
    ------
    InputError
        If the file is not one; the line names the field, and the nearest known one.
    """
    return parse_record(read_json(path, ATTENTION_FILE), path)


def parse_record(given: object, path: Path) -> AttentionTrace:
    """Parse the attention trace that a file holds.

    Parameters
    ----------
    given
        The parsed JSON.
    path
        Path of the file.
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


class _FieldReader:
    """Checks a record field by field."""

    def __init__(self, file: str) -> None:
        self.file = file

    def trace(self, record: object) -> AttentionTrace:
        given = dict(record) if isinstance(record, dict) else {}
        if given.pop("format", None) != TRACE_FORMAT:
            raise InputError(f'{self.file}: expected a JSON object with "format": "{TRACE_FORMAT}"')
        fields = self.fields("", given, AttentionTrace)
        layers = self.integer("layers", fields["layers"])
        return AttentionTrace(
            model=self.words("model", fields["model"]),
            weights=self.words("weights", fields["weights"]),
            text=self.words("text", fields["text"]),
            tokens=self.integer("tokens", fields["tokens"]),
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
            self.integer("retrieval.facts", fields["facts"]),
            self.number("retrieval.found", fields["found"], 0.0, 1.0),
        )

    def top_k(self, item: object, layers: int) -> TopK:
        fields = self.fields("top_k", item, TopK)
        k = tuple(self.integer("top_k.k", one) for one in self.list("top_k.k", fields["k"]))
        if not k or list(k) != sorted(set(k)):
            raise self.error("top_k.k", fields["k"], "ascending numbers")
        mass = [
            self.shares(f"top_k.mass[{layer}]", row, len(k))
            for layer, row in enumerate(self.list("top_k.mass", fields["mass"], layers))
        ]
        for layer, row in enumerate(mass):
            if list(row) != sorted(row):
                raise self.error(f"top_k.mass[{layer}]", list(row), "more mass for more pairs")
        return TopK(k, tuple(mass))

    def prefetch(self, where: str, item: object, layers: int) -> Prefetch:
        fields = self.fields(where, item, Prefetch)
        return Prefetch(
            self.integer(f"{where}.k", fields["k"]),
            self.integer(f"{where}.bits", fields["bits"]),
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
                raise self.error(place, list(shares), "shares that do not rise with the position")
            reached.append(shares)
        technique = self.words(f"{where}.technique", fields["technique"])
        temperature = self.number(f"{where}.temperature", fields["temperature"], 0.0, 100.0)
        rounds = self.integer(f"{where}.rounds", fields["rounds"])
        return Acceptance(technique, temperature, rounds, tuple(reached))

    def fields(self, where: str, item: object, kind: type) -> dict[str, object]:
        """A record's fields by name: all that must be there, none that is not known."""
        if not isinstance(item, dict):
            raise self.error(where, item, "a JSON object")
        known = {f.name: f for f in fields(kind)}
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

    def items(self, name: str, fields: dict[str, object]) -> list[tuple[str, object]]:
        listed = self.list(name, [] if fields[name] == () else fields[name])
        return [(f"{name}[{i}]", item) for i, item in enumerate(listed)]

    def list(self, where: str, item: object, length: int | None = None) -> list[object]:
        if not isinstance(item, list) or (length is not None and len(item) != length):
            raise self.error(
                where, item, "a list" + (f" of {length}" if length is not None else "")
            )
        return item

    def shares(self, where: str, item: object, length: int) -> tuple[float, ...]:
        listed = self.list(where, item, length)
        return tuple(self.number(f"{where}[{i}]", one, 0.0, 1.0) for i, one in enumerate(listed))

    def number(self, where: str, item: object, least: float = 0.0, most: float = 1e12) -> float:
        if type(item) not in (int, float) or not least <= item <= most:  # type: ignore[operator]
            raise self.error(where, item, f"a number from {least:g} to {most:g}")
        return float(item)  # type: ignore[arg-type]

    def integer(self, where: str, item: object) -> int:
        if type(item) is not int or not 1 <= item <= 10**9:
            raise self.error(where, item, "a whole number from 1 to 1e9")
        return item

    def words(self, where: str, item: object) -> str:
        if not isinstance(item, str) or not item.strip() or not item.isprintable():
            raise self.error(where, item, "text in one line")
        return item

    def day(self, where: str, item: object) -> date:
        try:
            return date.fromisoformat(item)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.error(where, item, "a day as 2026-11-21") from None

    def error(self, where: str, item: object, expected: str) -> InputError:
        got = repr(item)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        return InputError(f"{self.file}, {where or 'on top'}: got {got}; expected {expected}")


def shipped_traces() -> dict[str, Path]:
    """Model and file of each attention trace that ships with kvsim."""
    folder = Path(str(files("kvsim.traces"))) / "measured"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}
