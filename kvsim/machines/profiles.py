"""Loading the TOML files that describe hardware and software."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.files import display
from kvsim.machines.hardware import (
    ARITHMETIC_DTYPES,
    HALF_ACCUMULATION,
    KERNEL_CLASSES,
    NODE,
    STANDS_FOR,
    Checked,
    Hardware,
    Kernel,
    Link,
    Stack,
)
from kvsim.machines.keys import (
    CHECKED_FIGURES,
    CHECKED_KINDS,
    HARDWARE_FILE,
    HOST_FILE,
    KERNEL_NUMBERS,
    LINK_NAMES,
    STACK_FILE,
    STACK_FLAGS,
    STACK_NUMBERS,
    TENSOR_PEAK,
    mechanism_of,
)
from kvsim.machines.names import GpuNames, Release, choose_release, match_gpu, split_name
from kvsim.machines.schema import WHOLE_NUMBER, Profile, entry_error, parse, read

CHANNEL_BYTES = 8.0  # that a channel of memory moves at a time [B]
MOST_BASES = 8  # profiles below a profile
RATES = frozenset(f"compute.{dtype}_FLOPps" for dtype in ARITHMETIC_DTYPES) | {
    *TENSOR_PEAK,
    "compute.half_accumulation_gain",
}
NON_MECHANISM_KEYS = ("kernel.", "checked.")  # of a stack's file: fields of no mechanism
NOT_INHERITED = ("price.", "power.", "checked.")  # from the profile that one extends


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped hardware profiles."""
    return tuple(sorted(_files(_folder())))


_ENGINES = {
    **dict.fromkeys(("hf", "huggingface", "transformers"), "hf-sdpa"),
    **dict.fromkeys(("tensorrt-llm", "tensorrt_llm", "trt-llm"), "trtllm"),
    **dict.fromkeys(("llama.cpp", "llama-cpp", "lmstudio"), "llamacpp"),
}
"""Engines as their users write them, and their stacks."""

_ENGINE_SPELLING = re.compile(rf"^({'|'.join(map(re.escape, _ENGINES))})(?=$|@|-\d)")


def stack_names() -> tuple[str, ...]:
    """Names of the shipped software stacks."""
    return tuple(sorted(_files(_folder() / "stacks")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Load a GPU by its name, by one of its aliases or from a TOML file.

    Parameters
    ----------
    name_or_path
        Name, alias, or path of a profile.

    Raises
    ------
    InputError
        If there is no such GPU, or the file is not a sound profile.
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
    return Hardware(
        name=file.name.removesuffix(".toml"),
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
        price=numbers.get("price.usd_per_hour"),
        power=numbers.get("power.rated_W"),
        units=numbers.get("compute.sm", 0.0),
        linked=int(numbers.get("link.gpus", NODE)),
        basis=profile.texts["basis"],
        sources=profile.sources,
        notes=profile.lists.get("notes", ()),
        device=profile.texts.get("device", ""),
        date=profile.texts.get("date", ""),
    )


def _rates(numbers: Mapping[str, float]) -> dict[str, float]:
    """Dense rates by number format, with one for products accumulated in fp16 where it differs."""
    stated = {dtype: numbers.get(f"compute.{dtype}_FLOPps") for dtype in ARITHMETIC_DTYPES}
    found = {dtype: rate for dtype, rate in stated.items() if rate is not None}
    gain = numbers.get("compute.half_accumulation_gain", 1.0)
    return found | ({HALF_ACCUMULATION: gain * found["fp16"]} if gain > 1 else {})


def with_host(hardware: Hardware, name_or_path: str) -> Hardware:
    """Return a GPU in another host: its processor, and its memory's size and rate.

    Parameters
    ----------
    hardware
        The GPU with its usual host.
    name_or_path
        Name of a host's profile, or path of one.

    Raises
    ------
    InputError
        If there is no such host, or the file is not a sound profile.
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
    """Load a software stack by its name or from a TOML file; keys left out are ideal.

    Parameters
    ----------
    name_or_path
        Name, or path of a stack's file.

    Raises
    ------
    InputError
        If there is no such stack, or the file is not a sound one.
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
    name = _ENGINE_SPELLING.sub(lambda found: _ENGINES[found[1]], name.strip().lower())
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
    """The version in a stack's name; None for a file or a name without a version."""
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
    """A copy of a stack under the name of the requested version."""
    _, at, card = stack.name.partition("@")
    return replace(
        stack,
        name=f"{release.engine}-{release.asked}{at}{card}",
        engine=release.engine,
        unmeasured=release.note,
    )


def _family(file: Traversable, over: Profile | None = None) -> dict[str, Stack]:
    """Stacks of an engine by card: those measured on it, and those used for similar cards."""
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
        profile = replace(_over(profile, over), lists=profile.lists)
    stated = profile.numbers | profile.flags
    return _stating(
        Stack(
            name=(f"{engine}@" if engine else "") + file.name.removesuffix(".toml"),
            title=profile.texts["title"],
            version=profile.texts.get("version", ""),
            extends=profile.texts.get("extends", ""),
            near=profile.lists.get("near", ()),
            cards=cards,
            basis=profile.texts["basis"],
            error=profile.texts["error"],
            fit=profile.texts.get("fit", ""),
            device=profile.texts.get("device", ""),
            date=profile.texts.get("date", ""),
            free=profile.free,
            checked=_checked(profile),
            source="\n".join(f"{key}: {text}" for key, text in profile.sources.items()),
            kernels=_kernels(profile),
        ),
        {key: value for key, value in stated.items() if not key.startswith(NON_MECHANISM_KEYS)},
    )


def _checked(profile: Profile) -> Checked | None:
    """The error that a run found for a stack, if its file states one."""
    numbers, texts = profile.numbers, profile.texts
    if "checked.rows" not in numbers:
        return None
    off = {}
    for kind in CHECKED_KINDS:
        found = [numbers.get(f"checked.{kind}_{figure}") for figure in CHECKED_FIGURES]
        if None not in found:
            median, p90, low, high = (float(x or 0.0) for x in found)
            off[kind] = median, p90, low, high
    device, model, technique = (texts[f"checked.{x}"] for x in ("device", "model", "technique"))
    return Checked(device, model, technique, int(numbers["checked.rows"]), off)


def _stating(stack: Stack, stated: Mapping[str, float | bool]) -> Stack:
    """Build a stack from numbers and flags by the keys of its file."""
    changes: dict[str, dict[str, float | bool]] = {}
    for key, value in stated.items():
        group, name = mechanism_of(key)
        whole = STACK_NUMBERS.get(key) is WHOLE_NUMBER
        changes.setdefault(group, {})[name] = int(value) if whole else value
    groups: dict[str, Any] = {
        group: replace(getattr(stack, group), **fields) for group, fields in changes.items()
    }
    return replace(stack, **groups)


def with_numbers(stack: Stack, numbers: Mapping[str, float]) -> Stack:
    """Copy a stack with some numbers replaced, by the keys of its file.

    Parameters
    ----------
    stack
        The stack to change.
    numbers
        New values by key, in the units of the keys.
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
    """Return the numbers and flags in which a stack differs from another, by key.

    Parameters
    ----------
    stack
        The stack.
    base
        The one it is compared with.
    """
    found: dict[str, float | bool] = {}
    for key in STACK_NUMBERS:
        if number_of(stack, key) != number_of(base, key):
            found[key] = number_of(stack, key)
    for key in STACK_FLAGS:
        group, name = mechanism_of(key)
        own = getattr(getattr(stack, group), name)
        if own != getattr(getattr(base, group), name):
            found[key] = bool(own)
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
        group, field = mechanism_of(key)
        return float(getattr(getattr(stack, group), field))
    _, kernel, name = key.split(".")
    return float(getattr(stack.kernel(kernel), KERNEL_NUMBERS[name][0]))


def _extended(
    file: Traversable, kind: str, below: tuple[str, ...], bases: dict[str, Profile]
) -> Profile:
    """Entries of a profile merged over those it extends; ``bases`` have been visited."""
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
    return _over(base, own)


def _over(base: Profile, own: Profile) -> Profile:
    """Entries over those below; texts, lists, prices and what a fit may change are its own.

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
    """The file of a profile given by path, by name or by one of its aliases."""
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
    raise unknown(kind, name, shipped, "or give the path of a .toml file")


@cache
def _gpu_names() -> dict[str, GpuNames]:
    """Names of every shipped GPU."""
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
    """Kernel classes with missing ones filled in from their base class."""
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
    """Refuse rates that the silicon cannot reach: a sparse tensor rate, a copy above its line."""
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
