"""Names of GPUs as nvidia-smi, rocm-smi, clouds and shops write them.

A name is split into words (``NVIDIA A100-SXM4-80GB`` is a100, sxm and 80g; the maker is left
out). It means the profile of which one name has only words of it and whose title has the rest:
a word that is in neither, as laptop or ti, makes it another card.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvsim.console import print_once
from kvsim.errors import InputError
from kvsim.frozen import frozen

NAME_SEPARATORS = re.compile(r"[\s_\-/@,():]+")
UNSPACED = re.compile(
    r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})|(?<=\d)(?=[A-Z][a-z]{2})|"
    r"(?i:(?<=\brtx)(?=[a-z])|(?<=\bnvidia)(?=[a-z\d]))"
)
"""Between the words of InstinctMI50, JetsonAGXOrin, M4Max and RTXA5000."""
ENDINGS = ("ti", "super", "pcie", "nvl", "ada", "max", "ultra")
GLUED = re.compile(rf"([a-z]{{2,}})(\d.*)|(.*\d)({'|'.join(ENDINGS)}|sxm\d?)")
MAKERS = {
    "nvidia",
    "amd",
    "geforce",
    "tesla",
    "instinct",
    "apple",
    "intel",
    "radeon",
    "corporation",
}
MAKERS |= {"gpu", "graphics", "generation", "edition", "card", "oam", "blackwell", "of", "with"}
MAKERS |= {"hbm2", "hbm2e", "hbm3", "hbm3e", "gddr5", "gddr6", "gddr6x", "gddr7", "memory", "vram"}
MAKERS |= {"accelerator", "the", "single", "one"}
"""Words that tell no two cards apart."""

INSTANCE = re.compile(r"(a[23]-(?:high|mega|ultra)gpu|g2-standard)-\d+g?|([gp]\d\w*)\.\w+")
INSTANCES = {
    **{"g4dn": "t4", "g5": "a10g", "g6": "l4", "g6e": "l40s", "p3": "v100-16g", "p3dn": "v100-32g"},
    **{"p4d": "a100-40g", "p4de": "a100-80g", "p5": "h100", "p5e": "h200", "p5en": "h200"},
    **{"a2-highgpu": "a100-40g", "a2-ultragpu": "a100-80g", "g2-standard": "l4"},
    **{"a3-highgpu": "h100", "a3-megagpu": "h100", "a3-ultragpu": "h200"},
}
"""The GPU of instance families, as the documentation of AWS and Google Cloud has them in 2026."""

MEMORY_WORD = re.compile(r"\d+g")
GPU_COUNT = re.compile(r"([1-9]\d?)x(?=$|[a-z])|x([1-9]\d?)$")


class GpuNames(NamedTuple):
    """The names of a profile."""

    title: str
    names: Sequence[str]  # its own and its aliases


def match_gpu(typed: str, known: Mapping[str, GpuNames]) -> str | None:
    """Find the profile that a name refers to.

    Parameters
    ----------
    typed
        Name as typed.
    known
        Names by profile.

    Returns
    -------
    str | None
        None if no profile has all the words of the name.

    Raises
    ------
    InputError
        If several profiles have them, or the name says how many GPUs there are.
    """
    instance = INSTANCE.fullmatch(typed.strip().lower())
    if instance and (family := instance[1] or instance[2]) in INSTANCES:
        taken = INSTANCES[family]
        print_once(f"GPU {typed.strip()} is taken as one {taken}; --gpus or --tp sets the number")
        return taken
    words, count = _split(typed)
    found = []
    for name, called in known.items():
        keys = [_words(text) for text in (name, *called.names)]
        allowed = _words(called.title).union(*keys)
        if words <= allowed and any(key and key <= words for key in keys):
            found.append((words in keys, name))
    best = [name for exact, name in found if exact] or [name for _, name in found]
    if len(best) == 1 and count:
        raise InputError(
            f"GPU {typed[:80]!r} contains a number; expected only the name, as --gpu {best[0]} "
            f"--tp {count}"
        )
    if len(best) == 1:
        _tell_others(typed, best[0], words, known)
        return best[0]
    some = best or [
        name
        for name, called in known.items()
        if words and words < _words(called.title).union(*map(_words, (name, *called.names)))
    ]
    if not some:
        return None
    if len(some) == 1:
        keys = [_words(text) for text in (some[0], *known[some[0]].names)]
        if any(words & key and all(map(MEMORY_WORD.fullmatch, key - words)) for key in keys):
            print_once(f"GPU {typed.strip()} is taken as {some[0]}, the only one with a profile")
            return some[0]
        raise InputError(f"unknown GPU {typed[:80]!r}; nearest: {some[0]}")
    listed = ", ".join(sorted(some))
    raise InputError(
        f"GPU {typed[:80]!r} could be any of {len(some)}: {listed}; expected one of them"
    )


def _tell_others(
    typed: str, taken: str, words: frozenset[str], known: Mapping[str, GpuNames]
) -> None:
    """Tell which card an ambiguous name without a memory size is resolved to."""
    others = [
        name
        for name, called in known.items()
        if name != taken
        and any(words < _words(text) for text in (called.title, name, *called.names))
    ]
    if others and words != _words(taken):
        print_once(f"GPU {typed.strip()} is taken as {taken}; there are also {', '.join(others)}")


def _words(text: str) -> frozenset[str]:
    return _split(text)[0]


def _split(text: str) -> tuple[frozenset[str], str]:
    """Distinguishing words of a name, and the number of GPUs it states."""
    text = re.sub(r"(?i)(\d+)[\s\-_]*(?:gib|gb|g)\b", r" \1g ", text.strip())
    text = UNSPACED.sub(" ", text).lower()
    found: set[str] = set()
    count = ""
    for given in NAME_SEPARATORS.split(text):
        several = GPU_COUNT.match(given)
        if several is not None:
            count = several[1] or several[2]
        pieces = [given[several.end() :] if several is not None else given]
        while (glued := GLUED.fullmatch(pieces[-1])) is not None and glued[0] not in MAKERS:
            pieces[-1:] = [part for part in glued.groups() if part]
            if pieces[-1] in ENDINGS or "sxm" in pieces[-1]:
                break
        found |= {re.sub(r"^sxm\d$", "sxm", part) for part in pieces if part not in MAKERS}
    return frozenset(found - {""}), "" if count == "1" else count


VERSION_NAME = re.compile(
    r"(?P<engine>[a-z].*?)-v?(?P<number>\d+\.\d+)(?P<rest>(\.|rc|post|-)?[\w.+]*)"
)


@frozen
class Release:
    """A requested version, and the measured version that is used for it."""

    engine: str
    asked: str  # as "0.11"
    nearest: str  # measured version; the same if it was measured itself
    file: str  # name of the file that states it

    @property
    def note(self) -> str:
        """Note for the user where another version is used than requested, else empty."""
        if self.asked == self.nearest:
            return ""
        side = "older" if _order(self.nearest) < _order(self.asked) else "newer"
        return (
            f"no whole run of {self.engine} {self.asked} was measured; it has the numbers of "
            f"{self.nearest}, the nearest {side} version that was"
        )


def split_name(name: str, engines: Iterable[str]) -> tuple[str, str] | None:
    """Split the name of an engine at a version.

    Parameters
    ----------
    name
        Name of a stack without its card, in lower case.
    engines
        Engines that have versions.

    Returns
    -------
    tuple of str or None
        The engine and its version as "major.minor"; None where the name has no version.
    """
    found = VERSION_NAME.fullmatch(name)
    if not found or found["engine"] not in engines:
        return None
    return found["engine"], found["number"]


def choose_release(
    engine: str, asked: str, releases: Sequence[str], measured: Mapping[str, str]
) -> Release:
    """Choose the measured version that is used for a requested one.

    Parameters
    ----------
    engine
        Name of the engine.
    asked
        Version, as "major.minor".
    releases
        Versions that exist.
    measured
        Versions of which whole runs were measured, with the stack's file that has their numbers.

    Returns
    -------
    Release
        Itself if it was measured, else the nearest older one, else the oldest.

    Raises
    ------
    InputError
        If there never was such a version.
    """
    if asked not in releases:
        listed = ", ".join(releases)
        raise InputError(f"--stack: {engine} has no version {asked}; expected one of {listed}")
    older = [v for v in measured if _order(v) <= _order(asked)]
    nearest = max(older, key=_order) if older else min(measured, key=_order)
    return Release(engine, asked, nearest, measured[nearest])


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
