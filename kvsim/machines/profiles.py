"""Loading the TOML files that describe hardware and software."""

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
    KERNEL_CLASSES,
    NODE,
    STANDS_FOR,
    Hardware,
    Kernel,
    Link,
    Stack,
)
from kvsim.machines.keys import (
    HARDWARE_FILE,
    KERNEL_NUMBERS,
    LINK_NAMES,
    STACK_FILE,
    STACK_NUMBERS,
    TENSOR_PEAK,
    mechanism_of,
)
from kvsim.machines.schema import WHOLE_NUMBER, Profile, entry_error, parse, read

MOST_BASES = 8  # stacks below a stack


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped hardware profiles."""
    return tuple(sorted(_files(_folder())))


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
    profile = read(file, HARDWARE_FILE)
    numbers = profile.numbers
    _check_rates(file, numbers)
    return Hardware(
        name=file.name.removesuffix(".toml"),
        title=profile.texts["title"],
        flops={
            dtype: numbers[f"compute.{dtype}_FLOPps"]
            for dtype in ARITHMETIC_DTYPES
            if f"compute.{dtype}_FLOPps" in numbers
        },
        cpu_flops=numbers["compute.cpu_fp32_FLOPps"],
        links={
            link: Link(numbers[f"{link}.bandwidth_Bps"], numbers[f"{link}.latency_s"])
            for link in LINK_NAMES
        },
        gpu_memory=numbers["memory.gpu_capacity_B"],
        host_memory=numbers["memory.host_capacity_B"],
        price=numbers.get("price.usd_per_hour"),
        power=numbers.get("power.rated_W"),
        linked=int(numbers.get("link.gpus", NODE)),
        basis=profile.texts["basis"],
        sources=profile.sources,
        notes=profile.lists.get("notes", ()),
        device=profile.texts.get("device", ""),
        date=profile.texts.get("date", ""),
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
        return _loaded(Path(name), _family(Path(name)))
    return _shipped_stack(name)


@cache
def _shipped_stack(name: str) -> Stack:
    file = _find("stack", name, _folder() / "stacks")
    engine, of_card, _ = name.strip().lower().partition("@")
    return _loaded(file, {}, engine) if of_card else _loaded(file, _family(file))


def _family(file: Traversable) -> dict[str, Stack]:
    """An engine's stacks by card: those measured there, and for cards near them."""
    folder = _folder() / "stacks" / file.name.removesuffix(".toml")
    shipped = str(file) == str(_folder() / "stacks" / file.name) and folder.is_dir()
    bases: dict[str, Profile] = {}
    measured = {
        one.name.removesuffix(".toml"): _loaded(one, {}, folder.name, bases)
        for one in (folder.iterdir() if shipped else ())
    }
    return {name: stack for stack in measured.values() for name in stack.near} | measured


def _loaded(
    file: Traversable,
    cards: Mapping[str, Stack],
    engine: str = "",
    bases: dict[str, Profile] | None = None,
) -> Stack:
    profile = _extended(file, (), {} if bases is None else bases)
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
            source="\n".join(f"{key}: {text}" for key, text in profile.sources.items()),
            kernels=_kernels(profile),
        ),
        {key: value for key, value in stated.items() if not key.startswith("kernel.")},
    )


def _stating(stack: Stack, stated: Mapping[str, float | bool]) -> Stack:
    """A stack whose mechanisms have these numbers and flags under their files' keys."""
    changes: dict[str, dict[str, Any]] = {}
    for key, value in stated.items():
        group, name = mechanism_of(key)
        whole = STACK_NUMBERS.get(key) is WHOLE_NUMBER
        changes.setdefault(group, {})[name] = int(value) if whole else value
    groups: dict[str, Any] = {
        group: replace(getattr(stack, group), **fields) for group, fields in changes.items()
    }
    return replace(stack, **groups)


def with_numbers(stack: Stack, numbers: Mapping[str, float]) -> Stack:
    """Return a stack with other numbers under some of its file's keys.

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


def number_of(stack: Stack, key: str) -> float:
    """Return a stack's number under a key of its file.

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


def _extended(file: Traversable, below: tuple[str, ...], bases: dict[str, Profile]) -> Profile:
    """A stack's entries over those of the stack it extends; ``bases`` are those read so far."""
    own = read(file, STACK_FILE)
    name = own.texts.get("extends")
    if name is None:
        return own
    if name in below or len(below) >= MOST_BASES:
        raise entry_error(
            file, "extends", name, f"a stack that does not extend this one, {MOST_BASES} at most"
        )
    if name not in bases:
        found = _find("stack", name, _folder() / "stacks")
        bases[name] = _extended(found, (*below, name), bases)
    base = bases[name]
    numbers, flags = base.numbers | own.numbers, base.flags | own.flags
    return Profile(numbers, flags, own.texts, own.lists, base.sources | own.sources, own.free)


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
    for file in shipped.values():
        if wanted in parse(file).get("aliases", ()):
            return file
    raise unknown(kind, name, shipped, "or give the path of a .toml file")


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
    """All classes, and those that the profile tells apart, over the class that stands for them."""
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
