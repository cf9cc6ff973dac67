"""The models that ship, one line of ``catalogue.jsonl`` each, and the names people type for them.

A line has the model's name, its Hugging Face id, other names in use (``also``), where its shape
comes from, and its ``config.json``. A model shaped as another names it (``like``) and gives only
the fields that differ.

A typed name (Hugging Face id, Ollama tag, quantised checkpoint) is split into words. Words that
name a weight format set it, words that do not change the shape (instruct, chat, the owner of the
repository) are left out, and the rest must be those of one model, all of them. A word that is left
over, as of a fine-tune, matches nothing: a name is refused with its nearest ones rather than read
as another model.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from kvsim.console import print_once
from kvsim.errors import InputError, unknown
from kvsim.files import TEXT, read_text

PARAMETER_COUNTS = {"published_parameters", "counted_parameters", "stated_parameters"}


class CatalogueEntry(TypedDict):
    """Provenance of a model of the catalogue.

    Attributes
    ----------
    hf_id
        Hugging Face id.
    published
        Parameters of the published checkpoint; None if not known exactly.
    counted
        Parameters of the transformers class that the configuration makes.
    stated, stated_active
        Parameters, and those active per token, as the makers round them, such as "31.6B".
    recalled
        Whether fields were written from memory, without a copy of the ``config.json``.
    source
        Where the configuration comes from.
    """

    hf_id: str
    published: int | None
    counted: int | None
    stated: str | None
    stated_active: str | None
    recalled: bool
    source: str


def model_names() -> list[str]:
    """Return the names of all models of the catalogue."""
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
    """Return every name under which a catalogue model can be asked for.

    Returns
    -------
    dict of str to str
        Name of the model by catalogue name, Hugging Face id or other common name.
    """
    return {
        text: name
        for name, line in _lines().items()
        for text in (name, line["hf_id"], *line.get("also", ()))
    }


@cache  # what ships stays as it is while kvsim runs
def _lines() -> dict[str, dict[str, Any]]:
    text = (files("kvsim") / "models" / "catalogue.jsonl").read_text(encoding="utf-8")
    return {line["name"]: line for line in map(json.loads, text.splitlines())}


WORD_SEPARATORS = re.compile(r"[\s_\-:/@,()+]+")
PREFIX = re.compile(
    r"^(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co|ollama\.com/library|"
    r"ollama\.com|openrouter\.ai)/|^(?:ollama|library|hf|models)/"
)
GLUED_WORDS = re.compile(r"([a-z]{2,})(\d.*)|(\d[\d.]*)([a-z]{3,}.*)")
NO_SHAPE = frozenset(
    {"meta", "instruct", "it", "chat", "hf", "base", "pt", "latest", "instruction", "tuned", "text"}
)
"""Words that name a training or an owner and leave the shape as it is."""

GGUF_TAG = re.compile(
    r"(?:^|[\s\-_:./])(?:ud[-_])?(i?q\d(?:_(?:[01]|k|nl|xxs|xs|s|m|l|xl))+)(?=$|[\s\-:./])"
)
WIDTHS = (
    (r"fp8[-_]?dynamic", "fp8-dynamic"),
    (r"fp8[-_]block", "fp8-block"),
    (r"fp8(?:[-_]?static)?(?:[-_]?per[-_]?tensor)?(?:[-_]?kv)?", "fp8"),
    (r"mxfp4", "mxfp4"),
    (r"nvfp4|fp4", "nvfp4"),
    (r"w4a16[-_]g32|int4[-_]g32", "int4-g32"),
    (r"w4a16(?:[-_]g\d+)?|int4|4[-_]?bits?|nf4|q4", "int4"),
    (r"w8a8|w8a16|int8|8[-_]?bits?|q8", "int8"),
    (r"bf16|fp16|f16|16[-_]?bit", "fp16"),
)
METHODS = (
    (r"awq", "awq"),
    (r"gptq|bnb|bitsandbytes|autoround|qat", "int4"),
    (r"quantized\.?|gguf|mlx|dwq", ""),
)
BLOCK_SCALED = ("qwen/",)
"""Owners whose checkpoints named FP8 have a scale per block of 128 by 128."""

MOST_CANDIDATES = 8


class NamedModel(NamedTuple):
    """A catalogue model and the weight format that a typed name refers to.

    Attributes
    ----------
    name
        Name in the catalogue.
    weights
        Format that the typed name states, such as "awq"; empty for none.
    repository
        Hugging Face id, if one was typed.
    """

    name: str
    weights: str = ""
    repository: str = ""


def find_model(typed: str) -> NamedModel | None:
    """Find the catalogue model that a name refers to.

    Parameters
    ----------
    typed
        Name as typed: of the catalogue, a Hugging Face id, an Ollama tag.

    Returns
    -------
    NamedModel | None
        None if no model has all the words of the name.

    Raises
    ------
    InputError
        If several models have them, or the name is of files in several formats.

    Examples
    --------
    >>> find_model("meta-llama/Llama-3.1-8B-Instruct")[:2]
    ('llama3.1-8b', '')
    >>> find_model("Qwen2.5-7B-Instruct-AWQ")[:2]
    ('qwen2.5-7b-instruct', 'awq')
    """
    exact = find_exact(typed)
    if exact is not None:
        return exact
    text = PREFIX.sub("", typed.strip().lower().rstrip("/")).removeprefix("models--")
    owner, _, last = text.replace("--", "/", 1).rpartition("/")
    rest, weights = _split_format(last.removesuffix(".gguf"), typed)
    if weights == "fp8" and f"{owner}/" in BLOCK_SCALED and "tensor" not in last:
        weights = "fp8-block"
    words = split_words(rest)
    found = _match(words) or _match_without_size(words) or _whole_name(typed, words)
    if len(found) == 1:
        if "gguf" in text and not weights:
            raise InputError(
                f"{typed[:80]!r} holds files in several formats; expected the name with one, as "
                f"{typed[:80]}:Q4_K_M, or {found[0]} with --weights"
            )
        repository = _repository(typed) or ("" if weights else _checkpoint(found[0], words))
        return NamedModel(found[0], weights, repository)
    some = found or candidates(words)
    if some:
        raise _ambiguous(typed, some)
    return None


def find_exact(typed: str) -> NamedModel | None:
    """Find the model with exactly this name or Hugging Face id, ignoring case.

    Parameters
    ----------
    typed
        Name as typed.

    Returns
    -------
    NamedModel or None
        The model; None if no name matches.
    """
    name = _exact_names().get(typed.strip().lower())
    return NamedModel(name, "", _repository(typed)) if name is not None else None


def candidates(words: Iterable[str]) -> list[str]:
    """List the models whose names have all the given words and at least one more.

    Parameters
    ----------
    words
        Words of the name, as :func:`split_words` gives them.

    Returns
    -------
    list of str
        Names in the catalogue, the shortest first; empty if the words are too general.
    """
    wanted = {word for word in words if word not in NO_SHAPE}
    if not any(len(word) > 1 and word[0].isalpha() for word in wanted):
        return []
    found = [name for name in model_names() if wanted < set(split_words(name))]
    return sorted(found, key=lambda name: (len(split_words(name)), name))


def unknown_model(typed: str) -> InputError:
    """Create the error about a name that matches no model of the catalogue.

    Parameters
    ----------
    typed
        Name as typed.

    Returns
    -------
    InputError
        The error, with the nearest names.
    """
    mend = "see `kvsim models`, or give a path to a config.json"
    if _repository(typed):
        mend += (
            f", which `hf download {typed.strip()[:80]} config.json` puts where kvsim finds it by "
            "this name"
        )
    plain = "-".join(w for w in split_words(typed.rpartition("/")[2]) if w not in NO_SHAPE)
    error = unknown("model", plain or typed, model_names(), mend)
    return InputError(str(error).replace(repr((plain or typed)[:80]), repr(typed[:80]), 1))


def cached_config(typed: str) -> Path | None:
    """Find the ``config.json`` of a repository in the local Hugging Face cache.

    Parameters
    ----------
    typed
        Hugging Face id, as ``owner/name``.

    Returns
    -------
    Path | None
        The file of the revision that ``main`` names, else of the latest one.
    """
    if not _repository(typed):
        return None
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hub = os.environ.get("HF_HUB_CACHE") or (
        f"{os.environ.get('HF_HOME', f'{home}/huggingface')}/hub"
    )
    folder = Path(hub).expanduser() / f"models--{typed.strip().replace('/', '--')}"
    try:
        main = folder / "refs" / "main"
        stated = read_text(main, TEXT).strip() if main.is_file() else ""
        revision = stated if re.fullmatch(r"[0-9a-f]{7,64}", stated) else "*"
        there = sorted(folder.glob(f"snapshots/{revision}/config.json"))
    except (OSError, RuntimeError, ValueError, InputError):
        return None
    return max(there, key=lambda file: file.stat().st_mtime) if there else None


def stated_format(typed: object) -> str:
    """Return the weight format that a model name states, such as "awq" for "Qwen3-8B-AWQ".

    Parameters
    ----------
    typed
        Name as typed, or a parsed configuration.

    Returns
    -------
    str
        The format; empty if the name states none, or is a path.
    """
    if not isinstance(typed, str) or find_exact(typed) or is_path(typed):
        return ""
    found = find_model(typed)
    return found.weights if found else ""


def is_path(typed: str) -> bool:
    """Tell whether a text looks like a path, or names an existing file.

    Parameters
    ----------
    typed
        Name or path as typed.
    """
    try:
        there = bool(typed) and Path(typed).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return True  # which reading it explains
    return there or typed.endswith(".json") or typed.startswith((".", "/", "~"))


def split_words(text: str) -> tuple[str, ...]:
    """Split a name into its words.

    Parameters
    ----------
    text
        Name of a model without its owner.

    Returns
    -------
    tuple of str
        The words in lower case.

    Examples
    --------
    >>> split_words("Qwen3-Next-80B-A3B")
    ('qwen', '3', 'next', '80b', 'a3b')
    """
    found: list[str] = []
    for piece in WORD_SEPARATORS.split(re.sub(r"(?<=\d)p(?=\d)", ".", text.strip().lower())):
        pieces = [piece]
        while (glued := GLUED_WORDS.fullmatch(pieces[-1])) is not None:
            pieces[-1:] = [part for part in glued.groups() if part]
        found += [re.sub(r"^v(?=\d)|(?<=[a-z]{4})v$", "", part) for part in pieces if part]
    return tuple(found)


def _split_format(text: str, typed: str) -> tuple[str, str]:
    """Split the words of a weight format off a name."""
    tag = GGUF_TAG.search(text)
    if tag is not None:
        text = text[: tag.start()] + " " + text[tag.end() :]
    widths: list[str] = []
    methods: list[str] = []
    for patterns, into in ((WIDTHS, widths), (METHODS, methods)):
        for pattern, form in patterns:
            changed = re.sub(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", " ", text)
            if changed != text:
                text = changed
                into.append(form)
    if tag is not None:
        return text, tag[1]
    if "fp16" in widths and (len(widths) > 1 or any(methods)):
        widths.remove("fp16")  # of what was quantised, as in NAME-BF16-AWQ
    if len(widths) > 1:
        given = " and ".join(widths)
        raise InputError(f"{typed[:80]!r} names several weight formats ({given}); expected one")
    stated = [form for form in methods if form]
    if stated == ["awq"] and widths in ([], ["int4"]):
        widths = stated
    return text, (widths or stated or [""])[0]


def _repository(typed: str) -> str:
    """The typed name if it is a Hugging Face id."""
    text = typed.strip()
    return text if re.fullmatch(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+", text) else ""


def _checkpoint(name: str, words: tuple[str, ...]) -> str:
    """The Hugging Face id of a model whose words are those typed, as of its chat version."""
    same = set(words) - {"meta", "hf"}
    for text, model in names_in_use().items():
        words = split_words(text.rpartition("/")[2])
        if model == name and "/" in text and set(words) - {"meta", "hf"} == same:
            return text
    return ""


def _match(words: tuple[str, ...]) -> list[str]:
    index = _index()
    for key in _keys(words):
        names = index.get(key)
        if names:
            plain = [name for name in names if not NO_SHAPE & set(split_words(name))]
            return plain if len(plain) == 1 else sorted(names)
    return []


def _match_without_size(words: tuple[str, ...]) -> list[str]:
    """Models named with a size that their own name leaves out, as phi4:14b."""
    sizes = [word for word in words if re.fullmatch(r"a?\d+(?:\.\d+)?[bt]", word)]
    rest = tuple(word for word in words if word not in sizes)
    found = _match(rest) if sizes and rest else []
    return [name for name in found if all(_has_size(name, size) for size in sizes)]


def _whole_name(typed: str, words: tuple[str, ...]) -> list[str]:
    """The model of a name without its active parameters (qwen3-30b) or its version (mistral-7b)."""
    plain = {word for word in words if word not in NO_SHAPE}
    rests = {name: set(split_words(name)) - plain for name in candidates(words)}
    active = [
        name
        for name, rest in rests.items()
        if all(re.fullmatch(r"a\d+(\.\d+)?b", word) for word in rest)
    ]
    versions = {
        name: float(*rest)
        for name, rest in rests.items()
        if len(rest) == 1 and name.endswith(f"-v{min(rest)}")
    }
    if len(active) == 1 or len(versions) < 2 or "/" in typed:
        return active if len(active) == 1 else []
    newest = max(versions, key=versions.__getitem__)
    others = ", ".join(name for name in versions if name != newest)
    print_once(f"model {typed.strip()} is taken as {newest}, the newest; there are also {others}")
    return [newest]


def _has_size(name: str, size: str) -> bool:
    """Whether a model's total or active parameters match a size such as 14b, 1t or a32b."""
    entry = catalogue_entry(name)
    stated = entry["stated_active"] if size[0] == "a" else entry["stated"]
    exact = None if size[0] == "a" else entry["published"] or entry["counted"]
    count = exact or (_count(stated) if stated else 0.0)
    return 0.85 < count / _count(size.strip("a")) < 1.15


def _count(text: str) -> float:
    """Parse a parameter count such as 1.5B or 1t."""
    return float(text[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1].lower()]


def _keys(words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Lookup keys of a name, strictest first."""
    plain = tuple(word for word in words if word not in NO_SHAPE)
    yield ("words", *words)
    yield ("set", *sorted(plain))
    yield ("dotless", *(word.replace(".", "") for word in plain))
    yield ("dotless", *(part for word in plain for part in word.split(".")))
    yield ("joined", re.sub(r"(?<!\d) | (?!\d)", "", " ".join(plain)))


@cache
def _index() -> dict[tuple[str, ...], set[str]]:
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for text, name in names_in_use().items():
        last = text.rpartition("/")[2].lower()
        for part in {last, _split_format(last, text)[0]}:
            for key in _keys(split_words(part)):
                found[key].add(name)
    return dict(found)


@cache
def _exact_names() -> dict[str, str]:
    return {text.lower(): name for text, name in names_in_use().items()}


def _ambiguous(typed: str, names: list[str]) -> InputError:
    some = ", ".join(names[:MOST_CANDIDATES]) + (", ..." if len(names) > MOST_CANDIDATES else "")
    several = f"could be any of {len(names)} models" if len(names) > 1 else "is not a full name"
    return InputError(f"model {typed[:80]!r} {several}: {some}; expected one of them")
