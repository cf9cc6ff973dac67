"""How a technique is written, and every name that may stand in it.

``snapkv:budget=1024 + kivi:bits=4 + offload:host_share=0.5`` composes terms, each a name with
settings; ``0-1: full; 2-31: kcache:n=64 + bits=4`` says what ranges of layers do, counted from 0; a
setting without a name belongs to the plain term that has it (``bits`` to ``grouped``,
``host_share`` to ``place``). The path of a plan's JSON file stands for the technique it chose.

The techniques are the classes of ``papers/``, one file each with the pieces that are its own;
variants of a paper stand in its file, and pieces that several papers share are named here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isclass
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules

from kvsim.errors import InputError, unknown
from kvsim.files import PLAN, read_json
from kvsim.frozen import frozen
from kvsim.techniques import papers
from kvsim.techniques.axes.base import Term
from kvsim.techniques.axes.drafting import Selfdraft
from kvsim.techniques.axes.storage import Grouped
from kvsim.techniques.papers.cache import FORMATS
from kvsim.techniques.technique import Layers, Technique

SHARED: tuple[type[Term], ...] = (Grouped, Selfdraft)


ENTRY_POINTS = "kvsim.techniques"
"""Group in which an installed package names its techniques' classes."""


@cache
def terms() -> dict[str, type[Term]]:
    """Return every term by its name: first full, then the others in alphabetical order."""
    of_papers = (kind for file in _paper_files() for kind in _terms_of_file(file))
    found = {kind.name: kind for kind in (*SHARED, *of_papers)}
    return {name: found[name] for name in sorted(found, key=lambda n: (n != "full", n))}


@cache
def presets() -> dict[str, type[Term]]:
    """Return the terms that are a paper's technique, rather than pieces of one."""
    return {name: kind for name, kind in terms().items() if kind.preset}


class TechniqueMapping(Mapping[str, type[Term]]):
    """The presets by name, whose files are read once they are asked for."""

    def __getitem__(self, name: str) -> type[Term]:
        return presets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(presets())

    def __len__(self) -> int:
        return len(presets())


def find_term(name: str) -> type[Term] | None:
    """Find a term by its name; for a name in ``papers/`` only that file is imported.

    Parameters
    ----------
    name
        As in the notation.

    Returns
    -------
    type[Term] or None
        None where no term has that name.
    """
    file = name.replace("-", "_")
    if terms.cache_info().currsize or file not in _paper_files():
        return terms().get(name)
    return next((kind for kind in _terms_of_file(file) if kind.name == name), None)


def register_technique(kind: type[Term]) -> type[Term]:
    """Add a technique of your own, which every command then knows by its name.

    An installed package can name its classes under the entry point ``kvsim.techniques`` instead:
    they are loaded when such a name is first asked for. ``python3 make.py new-technique NAME``
    writes a class to start from.

    Parameters
    ----------
    kind
        A ``@frozen`` class that extends :class:`kvsim.techniques.axes.base.Term`.

    Returns
    -------
    type[Term]
        The class itself, so that the function can be used as a decorator.

    Raises
    ------
    InputError
        If it is not such a class, or its name is taken.
    """
    what = getattr(kind, "__name__", str(kind))[:80]
    if not isclass(kind) or not issubclass(kind, Term):
        raise InputError(f"technique {what}: expected a class that extends Term")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"technique {what}: it has no name; add name: ClassVar[str] = ...")
    if terms().get(name, kind) is not kind:
        raise InputError(f"technique {what}: the name {name!r} is taken; choose another")
    terms()[name] = kind
    if kind.preset:
        presets()[name] = kind
    return kind


@cache
def load_installed() -> None:
    """Register the techniques of installed packages, which takes about 0.1 s."""
    for point in entry_points(group=ENTRY_POINTS):
        register_technique(point.load())


@cache
def _paper_files() -> list[str]:
    return [module.name for module in iter_modules(papers.__path__)]


def _terms_of_file(name: str) -> list[type[Term]]:
    """The public terms that a paper's file defines; a base has no name of its own."""
    module = import_module(f"{papers.__name__}.{name}")
    return [
        kind
        for kind in vars(module).values()
        if isclass(kind)
        and issubclass(kind, Term)
        and kind.__module__ == module.__name__
        and not kind.__name__.startswith("_")
        and "name" in vars(kind)
    ]


BARE = ("grouped", "place")  # terms whose settings may stand without their name
EVERY = "all", "any", "every", "*"  # typed for all techniques at once
LAYER_RANGE = re.compile(r"\s*+(\d++)\s*+(?:(-)\s*+(\d*+)\s*+)?:(?!\w*=)")
SEPARATORS = re.compile(r"(?<!\s)\s*+([+;:=,])\s*+")
MAX_LAYERS = 10_000
MAX_NOTATION_CHARS = 20_000  # characters: eighty layers of four parts each


@frozen
class _Piece:
    """A part of the text with the column it begins in, from 1."""

    text: str
    column: int

    def strip(self) -> "_Piece":
        ahead = len(self.text) - len(self.text.lstrip())
        return _Piece(self.text.strip(), self.column + ahead)

    def split(self, separator: str) -> "list[_Piece]":
        """Return the pieces between separators, without blanks around them.

        Parameters
        ----------
        separator : the text between the pieces.
        """
        found, column = [], self.column
        for text in self.text.split(separator):
            found.append(_Piece(text, column).strip())
            column += len(text) + len(separator)
        return found

    def error(self, problem: str) -> InputError:
        """Return the error about this piece.

        Parameters
        ----------
        problem : what is wrong with it.
        """
        return InputError(f"{problem} (column {self.column})")


def parse(text: str) -> Technique:
    """Parse a technique, or read the one that a plan chose.

    Parameters
    ----------
    text : notation, or the path of a plan's JSON file.

    Raises
    ------
    InputError
        If the text is not valid; the message names the column and the nearest valid words.
    """
    if text.strip().endswith(".json"):
        return _from_plan(Path(text.strip()))
    if len(text) > MAX_NOTATION_CHARS:
        raise InputError(
            f"technique: {len(text)} characters; expected at most {MAX_NOTATION_CHARS}"
        )
    clauses = _Piece(text, 1).split(";")
    if clauses[-1].text == "" and len(clauses) > 1:
        clauses.pop()
    ranges: list[tuple[Layers, _Piece]] = []
    whole: tuple[Term, ...] = ()
    for clause in clauses:
        layers = _clause(clause, alone=len(clauses) == 1)
        if layers.last == -1:
            whole += layers.terms
        else:
            ranges.append((layers, clause))
    if not ranges:
        return Technique((Layers(whole),))
    ranges.sort(key=lambda found: found[0].first)
    for (before, _), (after, piece) in pairwise(ranges):
        if before.last is None or after.first <= before.last:
            raise piece.error(
                f"layers of {str(after)!r} are also in {str(before)!r}; give each once"
            )
        if after.first > before.last + 1:
            missing = f"{before.last + 1} to {after.first - 1}"
            raise piece.error(f"no technique for layers {missing}; add one")
    if ranges[0][0].first:
        raise ranges[0][1].error(f"no technique for layers 0 to {ranges[0][0].first - 1}; add one")
    for layers, piece in ranges:
        drafting = [t.name for t in layers.terms if any(p.axis == "drafting" for p in t.pieces())]
        if drafting and len(ranges) > 1:
            raise piece.error(
                f"{drafting[0]} drafts for the whole model; write it in a clause without layers"
            )
    return Technique(tuple(found for found, _ in ranges), whole)


def _clause(clause: _Piece, alone: bool) -> Layers:
    """Parse a range of layers with its terms; without a range, ``last`` is -1."""
    if not clause.text:
        raise clause.error("unknown technique ''; expected one, as in 'kivi:bits=4 + offload'")
    matched = LAYER_RANGE.match(clause.text)
    if matched is None:
        terms = _terms(clause)
        if alone:
            return Layers(terms)
        axes = {part.axis for term in terms for part in term.pieces()}
        if axes != {"drafting"}:
            raise clause.error(
                "a clause without layers may only contain drafting; write '0-1: ...; 2-: ...'"
            )
        return Layers(terms, 0, -1)
    first = _layer(clause, matched.group(1))
    last = first if matched.group(2) is None else None
    if matched.group(3):
        last = _layer(clause, matched.group(3))
    if last is not None and last < first:
        raise clause.error(f"layers {first}-{last} end before they begin; write {last}-{first}")
    rest = _Piece(clause.text[matched.end() :], clause.column + matched.end()).strip()
    if not rest.text:
        raise rest.error("no technique after the layers; expected one, as in '0-1: full'")
    return Layers(_terms(rest), first, last)


def _layer(clause: _Piece, text: str) -> int:
    if len(text) > 5 or int(text) > MAX_LAYERS:
        raise clause.error(f"layer {text[:20]} is beyond the {MAX_LAYERS} layers of any model")
    return int(text)


def _terms(clause: _Piece) -> tuple[Term, ...]:
    """Parse terms joined by plus signs; a setting without a term belongs to the term before it."""
    found: list[tuple[type[Term], dict[str, object], _Piece]] = []
    for piece in clause.split("+"):
        if not piece.text:
            raise piece.error(
                "nothing between the plus signs; expected a term, as in 'kivi:bits=4'"
            )
        name, given = _term(piece)
        kind = _kind(piece, name)
        found.append((kind, given, piece))
    built = []
    for kind, given, piece in found:
        try:
            built.append(kind(**given))
        except InputError as error:
            raise piece.error(str(error)) from None
    try:
        Technique((Layers(tuple(built)),))
    except InputError as error:
        raise found[-1][2].error(str(error)) from None
    return tuple(built)


def _term(piece: _Piece) -> tuple[str, dict[str, object]]:
    """Parse a term into its name and its settings."""
    name = piece.text.partition(":")[0]
    if "=" in name:  # settings without a name
        owner = next((n for n in BARE if name.partition("=")[0].strip() in _keys(n)), None)
        if owner is None:
            key = name.partition("=")[0].strip()
            known = [k for n in BARE for k in _keys(n)]
            raise piece.error(
                f"{key!r} without a name before it; {_suggest(key, known)}; "
                f"other settings follow a name, as in 'kcache:n=64'"
            )
        return owner, _settings(piece, owner)
    key = name.strip().lower()
    if key in FORMATS:  # an engine's format by its own name
        return "cache", {"format": key}
    _kind(piece, key)
    rest = piece.text[len(name) + 1 :]
    if not rest.strip():
        return key, {}
    return key, _settings(_Piece(rest, piece.column + len(name) + 1), key)


def _settings(piece: _Piece, name: str) -> dict[str, object]:
    """Parse settings into a mapping, and check their names."""
    kind, given = _kind(piece, name), {}
    known = [f.name for f in fields(kind)]
    for item in piece.split(","):
        key, equals, value = (part.strip() for part in item.text.partition("="))
        if not item.text:
            raise item.error(f"nothing between the commas; expected key=value{_show_example(kind)}")
        if not equals or not value:
            raise item.error(f"{name}: {item.text!r}; expected key=value{_show_example(kind)}")
        if key not in known:
            raise item.error(
                str(unknown(f"parameter of {name}", key, known, _show_example(kind)[2:]))
            )
        if key in given:
            raise item.error(f"{name}: {key} is given twice; keep one")
        given[key] = _value(value)
        _check(item, kind, key, given[key])
    return given


def _check(item: _Piece, kind: type[Term], key: str, value: object) -> None:
    """Check a setting's value, with its column in the error message."""
    from kvsim.techniques.axes.settings import check

    about = next(f.metadata for f in fields(kind) if f.name == key)
    try:
        check(kind.name, key, value, about)
    except InputError as error:
        raise item.error(str(error)) from None


def _kind(piece: _Piece, name: str) -> type[Term]:
    found = find_term(name)
    if found is None:
        load_installed()
        found = terms().get(name)
    if found is None:
        if name in EVERY:
            raise piece.error(
                f"{name!r} is no technique; list several, such as full,fp8,eagle3, or compare all "
                "that engines run with `kvsim predict --technique all`"
            )
        raise piece.error(str(unknown("technique", name, terms(), "see `kvsim techniques`")))
    return found


def _keys(name: str) -> list[str]:
    return [f.name for f in fields(terms()[name])]


def _suggest(word: str, known: list[str]) -> str:
    near = get_close_matches(word.lower()[:40], known, n=3, cutoff=0.4)
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known[:12])}"


def _show_example(kind: type[Term]) -> str:
    text = str(kind()) if not _required(kind) else kind.name
    return f", as in {text}" if ":" in text else f"; {kind.name} has no parameters"


def _required(kind: type[Term]) -> bool:
    try:
        kind()
    except InputError:
        return True
    return False


def _value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _from_plan(path: Path) -> Technique:
    """Read the technique that a plan chose, layer by layer.

    Raises
    ------
    InputError
        If the file cannot be read or is not a plan.
    """
    shown = repr(str(path))
    content = read_json(path, PLAN)
    choice = content.get("choice") if isinstance(content, dict) else None
    layers = choice.get("layers") if isinstance(choice, dict) else None
    if not isinstance(layers, list) or not layers:
        raise InputError(f"{shown} has no choice.layers; expected what `kvsim plan --json` prints")
    try:
        clauses = []
        for entry in layers:
            first, count = int(entry["first"]), int(entry["count"])
            given = ",".join(f"{k}={v}" for k, v in dict(entry["params"]).items())
            spec = str(entry.get("notation") or entry["technique"])
            spec = f"{spec}:{given}" if given and "notation" not in entry else spec
            clauses.append(f"{first}-{first + count - 1}: {spec}")
        if len(clauses) == 1:
            return parse(spec)
        whole = content["choice"].get("whole")
        return parse("; ".join([*clauses, *([str(whole)] if whole else [])]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise InputError(f"{shown}: {error}") from None
        raise InputError(f"{shown}: choice.layers lacks {error}; plan again") from None


def parse_several(text: str) -> list[Technique]:
    """Parse several techniques, separated by commas or spaces.

    Parameters
    ----------
    text : techniques in the notation.

    Raises
    ------
    InputError
        As ``parse``, and for a technique that comes twice.
    """
    close = SEPARATORS.sub(r"\1", text.strip())
    specs: list[str] = []
    for item in filter(None, re.split(r"[,\s]+", close)):
        head = re.split(r"[+;:]", item, maxsplit=1)[0]
        if "=" in head and specs:
            specs[-1] += f",{item}"
        else:
            specs.append(item)
    found = [parse(one) for one in specs]
    for t in found:
        if sum(str(t) == str(other) for other in found) > 1:
            raise InputError(f"{t.name}: is given twice; omit one, or change its settings")
    return found
