"""Names of GPUs, and the TOML files that describe hardware and software.

A name, as nvidia-smi, rocm-smi, clouds or shops write it, is split into words
(``NVIDIA A100-SXM4-80GB`` is a100, sxm and 80g; the maker is left out). It means the profile of
which one name has only words of it and whose title has the rest: a word that is in neither, as
laptop or ti, makes it another card.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from kvsim.console import print_once
from kvsim.errors import InputError, unknown
from kvsim.files import display
from kvsim.frozen import frozen
from kvsim.machines.hardware import (
    ARITHMETIC_DTYPES,
    HALF_ACCUMULATION,
    KERNEL_CLASSES,
    NODE,
    NVME_READ_RATE,
    NVME_WRITE_RATE,
    STANDS_FOR,
    WHOLE,
    Checked,
    Hardware,
    Kernel,
    Link,
    Stack,
)
from kvsim.machines.prices import choose_seller
from kvsim.machines.schema import (
    CHECKED_FIGURES,
    CHECKED_KINDS,
    HARDWARE_FILE,
    HOST_FILE,
    KERNEL_NUMBERS,
    LINK_NAMES,
    STACK_FIELDS,
    STACK_FILE,
    STACK_NUMBERS,
    TENSOR_PEAK,
    Profile,
    entry_error,
    parse,
    read,
)

NAME_SEPARATORS = re.compile(r"[\s_\-/@,():]+")
UNSPACED = re.compile(
    r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})|(?<=\d)(?=[A-Z][a-z]{2})|"
    r"(?i:(?<=\brtx)(?=[a-z])|(?<=\bnvidia)(?=[a-z\d]))"
)
"""Between the words of InstinctMI50, JetsonAGXOrin, M4Max and RTXA5000."""
NAME_ENDINGS = ("ti", "super", "pcie", "nvl", "ada", "max", "ultra")
GLUED = re.compile(rf"([a-z]{{2,}})(\d.*)|(.*\d)({'|'.join(NAME_ENDINGS)}|sxm\d?)")
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
    """The names under which a GPU profile is found.

    Attributes
    ----------
    title
        Name in reports.
    names
        Name of the profile and its aliases.
    """

    title: str
    names: Sequence[str]


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
            f"GPU {typed[:80]!r} contains a number; expected only the name, such as "
            f"--gpu {best[0]} --tp {count}"
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
    """Return the distinguishing words of a name, and the number of GPUs that it states."""
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
            if pieces[-1] in NAME_ENDINGS or "sxm" in pieces[-1]:
                break
        found |= {re.sub(r"^sxm\d$", "sxm", part) for part in pieces if part not in MAKERS}
    return frozenset(found - {""}), "" if count == "1" else count


VERSION_NAME = re.compile(
    r"(?P<engine>[a-z].*?)-v?(?P<number>\d+\.\d+)(?P<rest>(\.|rc|post|-)?[\w.+]*)"
)


@frozen
class Release:
    """An engine version that was asked for, and the measured version whose numbers are used.

    Attributes
    ----------
    engine
        Name of the engine.
    asked
        Requested version, such as "0.11".
    nearest
        Nearest measured version; equal to ``asked`` if that one was measured.
    file
        Name of the stack file that has its numbers.
    """

    engine: str
    asked: str
    nearest: str
    file: str

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


CHANNEL_BYTES = 8.0  # that a channel of memory moves at a time [B]
MOST_BASES = 8  # profiles below a profile
RATES = frozenset(f"compute.{dtype}_FLOPps" for dtype in ARITHMETIC_DTYPES) | {
    *TENSOR_PEAK,
    "compute.half_accumulation_gain",
}
NON_MECHANISM_KEYS = ("kernel.", "checked.")  # of a stack's file: fields of no mechanism
PRICE = "price.usd_per_hour"  # of a user's own profile; shipped ones take listed prices
NOT_INHERITED = ("price.", "power.", "checked.")  # from the profile that one extends


def hardware_names() -> tuple[str, ...]:
    """Return the names of the GPU profiles that ship with kvsim."""
    return tuple(sorted(_files(_folder())))


_ENGINES = {
    **dict.fromkeys(("hf", "huggingface", "transformers"), "hf-sdpa"),
    **dict.fromkeys(("tensorrt-llm", "tensorrt_llm", "trt-llm"), "trtllm"),
    **dict.fromkeys(("llama.cpp", "llama-cpp", "lmstudio"), "llamacpp"),
}
"""Engines as their users write them, and their stacks."""

_ENGINE_SPELLING = re.compile(rf"^({'|'.join(map(re.escape, _ENGINES))})(?=$|@|-\d)")


def spell_engine(name: str) -> str:
    """Normalise the spelling of an engine or stack name.

    Parameters
    ----------
    name
        Name as typed; a stack's name begins with its engine's.

    Returns
    -------
    str
        The name in lower case as kvsim spells it: "llama.cpp" becomes "llamacpp".
    """
    return _ENGINE_SPELLING.sub(lambda found: _ENGINES[found[1]], name.strip().lower())


def stack_names() -> tuple[str, ...]:
    """Return the names of the software stacks that ship with kvsim."""
    return tuple(sorted(_files(_folder() / "stacks")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Load a GPU by its name, by one of its aliases or from a TOML file.

    Parameters
    ----------
    name_or_path
        Name, alias, or path of a profile.

    Returns
    -------
    Hardware
        The GPU with its host and links.

    Raises
    ------
    InputError
        If there is no such GPU, or the file is not a valid profile.
    """
    name = str(name_or_path)
    return _hardware(Path(name)) if _is_path(name) else _shipped_hardware(name)


@cache  # what ships stays as it is while kvsim runs
def _shipped_hardware(name: str) -> Hardware:
    return _hardware(_find("GPU", name, _folder()))


def _hardware(file: Traversable) -> Hardware:
    profile = _extended(file, "GPU", (), {})
    numbers = profile.numbers
    _check_rates(file, numbers)
    name, price, sources = file.name.removesuffix(".toml"), numbers.get(PRICE), profile.sources
    listed = choose_seller([name], optional=[name]).get(name) if price is None else None
    if listed is not None:
        price, sources = listed.usd, {**sources, PRICE: f"{listed.words}; {listed.source}"}
    return Hardware(
        name=name,
        title=profile.texts["title"],
        flops=_rates(numbers),
        cpu_flops=numbers["compute.cpu_fp32_FLOPps"],
        links={
            link: Link(numbers[f"{link}.bandwidth_Bps"], numbers[f"{link}.latency_s"])
            for link in LINK_NAMES
        }
        | {
            f"disk_{way}": Link(numbers[f"disk.{way}_Bps"])
            for way in ("read", "write")
            if f"disk.{way}_Bps" in numbers
        },
        disk_memory=numbers.get("disk.capacity_B", 0.0),
        gpu_memory=numbers["memory.gpu_capacity_B"],
        host_memory=numbers["memory.host_capacity_B"],
        price=price,
        listed=listed,
        power=numbers.get("power.rated_W"),
        units=numbers.get("compute.sm", 0.0),
        sustained=numbers.get("compute.sustained", 1.0),
        boost=numbers.get("compute.boost_s", 0.0),
        linked=int(numbers.get("link.gpus", NODE)),
        basis=profile.texts["basis"],
        sources=sources,
        notes=profile.lists.get("notes", ()),
        device=profile.texts.get("device", ""),
        date=profile.texts.get("date", ""),
    )


def _rates(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return dense rates by number format, including fp16 accumulation if it differs."""
    stated = {dtype: numbers.get(f"compute.{dtype}_FLOPps") for dtype in ARITHMETIC_DTYPES}
    found = {dtype: rate for dtype, rate in stated.items() if rate is not None}
    gain = numbers.get("compute.half_accumulation_gain", 1.0)
    return found | ({HALF_ACCUMULATION: gain * found["fp16"]} if gain > 1 else {})


def price_together(cards: Sequence[Hardware]) -> list[Hardware]:
    """Return GPUs that are compared with each other at prices that can be compared.

    Parameters
    ----------
    cards
        The GPUs.

    Returns
    -------
    list of Hardware
        The same GPUs at the prices of one seller who offers all of them, or else each where it is
        cheapest; those whose profile states a price, or for which none is known, are unchanged.
    """
    sold = choose_seller(h.name for h in cards if h.listed)
    return [
        replace(h, price=sold[h.name].usd, listed=sold[h.name]) if h.listed else h for h in cards
    ]


def with_drive(
    hardware: Hardware, size: float, read: float | None = None, write: float | None = None
) -> Hardware:
    """Return a GPU whose host has a drive for the cache.

    Parameters
    ----------
    hardware
        The GPU with its usual host.
    size
        Capacity of the drive. [B]
    read, write
        Rates of the drive; None for those of the host's own drive, or typical NVMe rates. [B/s]

    Returns
    -------
    Hardware
        The same GPU with the drive.
    """
    links, sources = dict(hardware.links), dict(hardware.sources)
    for way, rate, usual in (("read", read, NVME_READ_RATE), ("write", write, NVME_WRITE_RATE)):
        key = f"disk.{way}_Bps"
        if rate is not None:
            links[f"disk_{way}"], sources[key] = Link(rate), f"given as --nvme-{way}"
        elif not hardware.disk_memory:
            links[f"disk_{way}"] = Link(usual)
            sources[key] = "assumed: data sheet of Samsung's PM9A3, PCIe 4.0"
    return replace(hardware, disk_memory=size, links=links, sources=sources)


def with_host(hardware: Hardware, name_or_path: str) -> Hardware:
    """Return a GPU in another host, with that host's processor, memory size and memory rate.

    Parameters
    ----------
    hardware
        The GPU with its usual host.
    name_or_path
        Name of a host's profile, or path of one.

    Returns
    -------
    Hardware
        The same GPU in the other host.

    Raises
    ------
    InputError
        If there is no such host, or the file is not a valid profile.
    """
    file = _find("host", name_or_path, _folder() / "hosts")
    profile = read(file, HOST_FILE)
    n = profile.numbers
    sockets = n.get("sockets.count", 1.0)
    rate = n["memory.channels"] * n["memory.rate_Tps"] * CHANNEL_BYTES * n["memory.share"]
    name = file.name.removesuffix(".toml")
    said = f"host {name}: "
    sources = {
        "compute.cpu_fp32_FLOPps": said + profile.sources["cpu.cores"],
        "dram.bandwidth_Bps": said + profile.sources["memory.share"],
        "memory.host_capacity_B": said + profile.sources["memory.capacity_B"],
    }
    return replace(
        hardware,
        cpu_flops=sockets * n["cpu.cores"] * n["cpu.clock_Hz"] * n["cpu.FLOP_per_clock"],
        links={**hardware.links, "dram": Link(sockets * rate)},
        host_memory=sockets * n["memory.capacity_B"],
        sockets=int(sockets),
        host=name,
        sources={**hardware.sources, **sources},
    )


def load_stack(name_or_path: str | Path) -> Stack:
    """Load a software stack by its name or from a TOML file; missing keys get ideal values.

    Parameters
    ----------
    name_or_path
        Name, or path of a stack's file.

    Returns
    -------
    Stack
        The stack.

    Raises
    ------
    InputError
        If there is no such stack, or the file is not a valid one.
    """
    name = str(name_or_path)
    if _is_path(name):
        stack = _loaded(Path(name), _family(Path(name)))
        if stack.fit and stack.extends:  # another fit of the same engine
            return replace(stack, engine=load_stack(stack.extends).family)
        return stack
    return _shipped_stack(name)


@cache
def _shipped_stack(name: str) -> Stack:
    name = spell_engine(name)
    folder, wanted = _folder() / "stacks", name
    engine, of_card, card = wanted.partition("@")
    release = _release(engine)
    if release is None:
        file = _find("stack", name, folder)
        return _loaded(file, {}, engine) if of_card else _loaded(file, _family(file))
    family, over = folder / f"{release.engine}.toml", None
    if release.file != release.engine:
        over = read(_files(folder)[release.file], STACK_FILE)
    stack = _loaded(family, _family(family, over), over=over)
    named = {gpu: _as_release(own, release) for gpu, own in stack.cards.items()}
    if of_card:
        if card not in named:
            raise unknown("stack", name, [f"{engine}@{each}" for each in named])
        return named[card]
    return replace(_as_release(stack, release), cards=named)


def _release(engine: str) -> Release | None:
    """Return the version in a stack's name; None for a file or a name without a version."""
    folder = _folder() / "stacks"
    files = _files(folder)
    split = split_name(engine, files)
    if split is None:
        return None
    engine, asked = split
    listed = {
        name: read(file, STACK_FILE).lists
        for name, file in files.items()
        if name == engine or split_name(name, (engine,))
    }
    if "releases" not in listed[engine]:
        return None
    measured = {v: name for name, lists in listed.items() for v in lists.get("measured", ())}
    return choose_release(engine, asked, listed[engine]["releases"], measured)


def _as_release(stack: Stack, release: Release) -> Stack:
    """Return a copy of a stack under the name of the requested version."""
    _, at, card = stack.name.partition("@")
    return replace(
        stack,
        name=f"{release.engine}-{release.asked}{at}{card}",
        engine=release.engine,
        unmeasured=release.note,
    )


def _family(file: Traversable, over: Profile | None = None) -> dict[str, Stack]:
    """Return the stacks of an engine by card: measured there, or used for similar cards."""
    folder = _folder() / "stacks" / file.name.removesuffix(".toml")
    shipped = str(file) == str(_folder() / "stacks" / file.name) and folder.is_dir()
    bases: dict[str, Profile] = {}
    measured = {
        one.name.removesuffix(".toml"): _loaded(one, {}, folder.name, bases, over)
        for one in (folder.iterdir() if shipped else ())
    }
    return {name: stack for stack in measured.values() for name in stack.near} | measured


def _loaded(
    file: Traversable,
    cards: Mapping[str, Stack],
    engine: str = "",
    bases: dict[str, Profile] | None = None,
    over: Profile | None = None,
) -> Stack:
    profile = _extended(file, "stack", (), {} if bases is None else bases)
    if over is not None:  # of a version: what it has otherwise, on every card
        profile = replace(_merge_profiles(profile, over), lists=profile.lists)
    stated = profile.numbers | profile.flags
    texts: dict[str, Any] = {key: x for key, x in profile.texts.items() if "." not in key}
    return _stating(
        Stack(
            name=(f"{engine}@" if engine else "") + file.name.removesuffix(".toml"),
            **texts,
            near=profile.lists.get("near", ()),
            cards=cards,
            free=profile.free,
            checked=_checked(profile),
            source="\n".join(f"{key}: {text}" for key, text in profile.sources.items()),
            kernels=_kernels(profile),
        ),
        {key: value for key, value in stated.items() if not key.startswith(NON_MECHANISM_KEYS)},
    )


def _checked(profile: Profile) -> Checked | None:
    """Return the error that a run found for a stack, if its file states one."""
    numbers, texts = profile.numbers, profile.texts
    if "checked.rows" not in numbers:
        return None
    off = {}
    for kind in CHECKED_KINDS:
        keys = [f"checked.{kind}_{figure}" for figure in CHECKED_FIGURES]
        if numbers.keys() >= {*keys}:
            median, p90, low, high = (float(numbers[key]) for key in keys)
            off[kind] = median, p90, low, high
    device, model, technique = (texts[f"checked.{x}"] for x in ("device", "model", "technique"))
    return Checked(device, model, technique, int(numbers["checked.rows"]), off)


def _stating(stack: Stack, stated: Mapping[str, float | bool]) -> Stack:
    """Build a stack from numbers and flags by the keys of its file."""
    changes: dict[str, dict[str, float | bool]] = {}
    for key, value in stated.items():
        group, name, rule = STACK_FIELDS[key]
        changes.setdefault(group, {})[name] = int(value) if rule is WHOLE else value
    groups: dict[str, Any] = {
        group: replace(getattr(stack, group), **fields) for group, fields in changes.items()
    }
    return replace(stack, **groups)


def with_numbers(stack: Stack, numbers: Mapping[str, float]) -> Stack:
    """Copy a stack with some numbers replaced.

    Parameters
    ----------
    stack
        The stack to copy.
    numbers
        New values by key of the stack file, in the unit that the key ends with (``_s``: seconds).

    Returns
    -------
    Stack
        The changed copy.
    """
    kernels, rest = dict(stack.kernels), {}
    changes: dict[str, dict[str, float]] = {}  # by kernel: a fit asks thousands of times
    for key, value in numbers.items():
        if key in STACK_NUMBERS:
            rest[key] = value
        else:
            _, kernel, name = key.split(".")
            changes.setdefault(kernel, {})[KERNEL_NUMBERS[name][0]] = value
    for kernel, fields in changes.items():
        kernels[kernel] = replace(kernels.get(kernel) or stack.kernel(kernel), **fields)
    return replace(_stating(stack, rest), kernels=kernels)


def numbers_apart(stack: Stack, base: Stack) -> dict[str, float | bool]:
    """Return the numbers and flags in which a stack differs from another.

    Parameters
    ----------
    stack
        The stack.
    base
        The stack to compare with.

    Returns
    -------
    dict
        Values of ``stack`` by key of the stack file.
    """
    found: dict[str, float | bool] = {}
    for key, (group, name, _) in STACK_FIELDS.items():
        own = getattr(getattr(stack, group), name)
        if own != getattr(getattr(base, group), name):
            found[key] = own
    for kernel in stack.kernels:
        for key, (name, _) in KERNEL_NUMBERS.items():
            own = getattr(stack.kernels[kernel], name)
            if kernel not in base.kernels or own != getattr(base.kernels[kernel], name):
                found[f"kernel.{kernel}.{key}"] = own
    return found


def number_of(stack: Stack, key: str) -> float:
    """Look up a stack's number by the key of its file.

    Parameters
    ----------
    stack
        The stack.
    key
        Key of the file, as ``time.launch_s``.

    Returns
    -------
    float
        The number, in the unit of the key.
    """
    if key in STACK_NUMBERS:
        group, field, _ = STACK_FIELDS[key]
        return float(getattr(getattr(stack, group), field))
    _, kernel, name = key.split(".")
    return float(getattr(stack.kernel(kernel), KERNEL_NUMBERS[name][0]))


def _extended(
    file: Traversable, kind: str, below: tuple[str, ...], bases: dict[str, Profile]
) -> Profile:
    """Merge the entries of a profile with those that it extends; ``bases`` have been visited."""
    own = read(file, HARDWARE_FILE if kind == "GPU" else STACK_FILE)
    name = own.texts.get("extends")
    if name is None:
        return own
    if name in below or len(below) >= MOST_BASES:
        raise entry_error(
            file, "extends", name, f"a {kind} that does not extend this one, {MOST_BASES} at most"
        )
    if name not in bases:
        found = _find(kind, name, _folder() if kind == "GPU" else _folder() / "stacks")
        bases[name] = _extended(found, kind, (*below, name), bases)
    base = bases[name]
    return _merge_profiles(base, own)


def _merge_profiles(base: Profile, own: Profile) -> Profile:
    """Merge entries over those of a base; texts, lists and prices are not inherited.

    A card that states its fp16 rate has no rate of the other's: they come as a set.
    """
    rates = RATES if "compute.fp16_FLOPps" in own.numbers else frozenset()
    below = {
        k: v for k, v in base.numbers.items() if k not in rates and not k.startswith(NOT_INHERITED)
    }
    numbers = below | own.numbers
    flags, sources = base.flags | own.flags, base.sources | own.sources
    sources = {key: text for key, text in sources.items() if key in numbers or key in flags}
    return Profile(numbers, flags, own.texts, own.lists, sources, own.free)


def _find(kind: str, name: str, folder: Traversable) -> Traversable:
    """Find the file of a profile given by path, by name or by an alias."""
    if _is_path(name):
        return Path(name)
    shipped = _files(folder)
    wanted = name.strip().lower()
    engine, at, card = wanted.partition("@")
    if at and (folder / engine).is_dir() and card in _files(folder / engine):
        return _files(folder / engine)[card]
    if wanted in shipped:
        return shipped[wanted]
    if kind == "GPU":
        typed = match_gpu(name, _gpu_names())
        if typed is not None:
            return shipped[typed]
    what = "engine or stack" if kind == "stack" else kind
    raise unknown(what, name, shipped, "or give the path of a .toml file")


@cache
def _gpu_names() -> dict[str, GpuNames]:
    """Return the names of every shipped GPU."""
    found = {}
    for name, file in _files(_folder()).items():
        said = parse(file)
        found[name] = GpuNames(said["title"], (name, *said.get("aliases", ())))
    return found


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or "\\" in name


def _files(folder: Traversable) -> dict[str, Traversable]:
    return {
        file.name.removesuffix(".toml"): file
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


def _folder() -> Traversable:
    return files("kvsim") / "hwprofiles"


def _kernels(profile: Profile) -> dict[str, Kernel]:
    """Return the kernel classes, with missing ones taken from their base class."""
    kernels = {kernel: _kernel(profile, kernel, Kernel()) for kernel in KERNEL_CLASSES}
    for kernel in STANDS_FOR:
        other = kernel
        while other not in kernels:
            other = STANDS_FOR[other]
        apart = _kernel(profile, kernel, kernels[other])
        if apart != kernels[other]:
            kernels[kernel] = apart
    return kernels


def _kernel(profile: Profile, kernel: str, base: Kernel) -> Kernel:
    stated = {
        name: profile.numbers[f"kernel.{kernel}.{key}"]
        for key, (name, _) in KERNEL_NUMBERS.items()
        if f"kernel.{kernel}.{key}" in profile.numbers
    }
    return replace(base, **stated)


def _check_rates(file: Traversable, numbers: Mapping[str, float]) -> None:
    """Refuse rates beyond the hardware: sparse tensor rates, copies above the line rate."""
    rate = numbers["compute.fp16_FLOPps"]
    if TENSOR_PEAK[0] in numbers:
        sm, clock, per_clock = (numbers[key] for key in TENSOR_PEAK)
        peak = sm * clock * per_clock
        if rate > 1.01 * peak:
            raise InputError(
                f"{display(file)}: compute.fp16_FLOPps is {rate:.4g}, above sm x clock x FLOP per "
                f"clock = {peak:.4g}; it looks like a sparse rate, give the dense one"
            )
    for link in ("h2d", "d2h"):
        achieved = numbers[f"{link}.bandwidth_Bps"]
        line = numbers.get(f"{link}.line_rate_Bps", achieved)
        if achieved > line:
            raise InputError(
                f"{display(file)}: {link}.bandwidth_Bps is {achieved:.4g}, above its line rate "
                f"{line:.4g}; expected what large copies achieve in one direction"
            )
