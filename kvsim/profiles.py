"""Loading the TOML files that describe hardware and software.

Nothing is guessed: an unknown, missing, mistyped or impossible entry is an error that names the
file and the key, and so is a number that does not say where it comes from.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from typing import Any

from kvsim.errors import InputError, unknown
from kvsim.hardware import (
    DTYPES,
    HARDWARE_FILE,
    KERNEL_NUMBERS,
    KERNELS,
    LINKS,
    STACK_FILE,
    STACK_FLAGS,
    STACK_NUMBERS,
    STANDS_FOR,
    TENSOR_PEAK,
    Hardware,
    Kernel,
    Link,
    Number,
    Schema,
    Stack,
)

FILE_LIMIT = 10_000_000  # a profile has some kB; more is another file by mistake [bytes]


@dataclass(frozen=True)
class Profile:
    """What a file says, checked."""

    numbers: dict[str, float]
    flags: dict[str, bool]
    texts: dict[str, str]
    lists: dict[str, tuple[str, ...]]
    sources: dict[str, str]
    free: dict[str, tuple[float, float]] = field(default_factory=dict)


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped hardware profiles."""
    return tuple(sorted(_files(_folder())))


def stack_names() -> tuple[str, ...]:
    """Names of the shipped software stacks."""
    return tuple(sorted(_files(_folder() / "stacks")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Load a GPU by its name, by one of its aliases or from a TOML file.

    Raises
    ------
    InputError
        If there is no such GPU, or the file is not a sound profile.
    """
    file = _find("GPU", str(name_or_path), _folder())
    profile = _read(file, HARDWARE_FILE)
    numbers = profile.numbers
    _check_rates(file, numbers)
    return Hardware(
        name=file.name.removesuffix(".toml"),
        title=profile.texts["title"],
        flops={
            dtype: numbers[f"compute.{dtype}_FLOPps"]
            for dtype in DTYPES
            if f"compute.{dtype}_FLOPps" in numbers
        },
        cpu_flops=numbers["compute.cpu_fp32_FLOPps"],
        links={
            link: Link(numbers[f"{link}.bandwidth_Bps"], numbers[f"{link}.latency_s"])
            for link in LINKS
        },
        gpu_memory=numbers["memory.gpu_capacity_B"],
        host_memory=numbers["memory.host_capacity_B"],
        price=numbers.get("price.usd_per_hour"),
        basis=profile.texts["basis"],
        sources=profile.sources,
        notes=profile.lists.get("notes", ()),
        device=profile.texts.get("device", ""),
        date=profile.texts.get("date", ""),
    )


def load_stack(name_or_path: str | Path) -> Stack:
    """Load a software stack by its name or from a TOML file; keys left out are ideal.

    Raises
    ------
    InputError
        If there is no such stack, or the file is not a sound one.
    """
    file = _find("stack", str(name_or_path), _folder() / "stacks")
    profile = _extended(file, ())
    changes: dict[str, Any] = {
        name: profile.numbers[key]
        for key, (name, _) in STACK_NUMBERS.items()
        if key in profile.numbers
    }
    changes["resident_layers"] = int(changes.get("resident_layers", 0))
    changes |= {STACK_FLAGS[key]: value for key, value in profile.flags.items()}
    return replace(
        Stack(
            name=file.name.removesuffix(".toml"),
            title=profile.texts["title"],
            basis=profile.texts["basis"],
            error=profile.texts["error"],
            fit=profile.texts.get("fit", ""),
            device=profile.texts.get("device", ""),
            date=profile.texts.get("date", ""),
            free=profile.free,
            source="\n".join(f"{key}: {text}" for key, text in profile.sources.items()),
            kernels=_kernels(profile),
        ),
        **changes,
    )


def with_numbers(stack: Stack, numbers: Mapping[str, float]) -> Stack:
    """A stack with other numbers under some of its file's keys."""
    changes: dict[str, Any] = {"kernels": dict(stack.kernels)}
    for key, value in numbers.items():
        if key in STACK_NUMBERS:
            changes[STACK_NUMBERS[key][0]] = value
        else:
            _, kernel, name = key.split(".")
            changed = {KERNEL_NUMBERS[name][0]: value}
            known = changes["kernels"].get(kernel) or stack.kernel(kernel)
            changes["kernels"][kernel] = replace(known, **changed)
    return replace(stack, **changes)


def number_of(stack: Stack, key: str) -> float:
    """A stack's number under a key of its file."""
    if key in STACK_NUMBERS:
        return float(getattr(stack, STACK_NUMBERS[key][0]))
    _, kernel, name = key.split(".")
    return float(getattr(stack.kernel(kernel), KERNEL_NUMBERS[name][0]))


def _extended(file: Traversable, below: tuple[str, ...]) -> Profile:
    """A stack's entries over those of the stack it extends."""
    own = _read(file, STACK_FILE)
    name = own.texts.get("extends")
    if name is None:
        return own
    if name in below:
        raise _wrong(file, "extends", name, "a stack that does not extend this one")
    base = _extended(_find("stack", name, _folder() / "stacks"), (*below, name))
    numbers, flags = base.numbers | own.numbers, base.flags | own.flags
    return Profile(numbers, flags, own.texts, own.lists, base.sources | own.sources, own.free)


def _find(kind: str, name: str, folder: Traversable) -> Traversable:
    """The file of a profile given by path, by name or by one of its aliases."""
    if name.endswith(".toml") or "/" in name or "\\" in name:
        return _sound(Path(name))
    shipped = _files(folder)
    wanted = name.strip().lower()
    if wanted in shipped:
        return shipped[wanted]
    for file in shipped.values():
        if wanted in _parse(file).get("aliases", ()):
            return file
    raise unknown(kind, name, shipped, "or give the path of a .toml file")


def _sound(path: Path) -> Path:
    """The path, unless it leads to something that cannot be a profile and may never end."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return path  # reading it says why
    if not S_ISREG(status.st_mode) or status.st_size > FILE_LIMIT:
        limit = f"expected a TOML file of at most {FILE_LIMIT // 10**6} MB"
        raise InputError(f"cannot read {_shown(path)}: {limit}; check the path")
    return path


def _read(file: Traversable, schema: Schema) -> Profile:
    """Read and check one file.

    Raises
    ------
    InputError
        If the file cannot be read, or any entry is unknown, missing, of the wrong type, out of
        range or without a source.
    """
    document = _parse(file)
    sources = document.pop("source", {})
    free = _free(file, document.pop("free", {}), schema)
    leaves = dict(_leaves(document))
    for key in leaves:
        if key not in schema.keys:
            raise unknown(f"key in {_shown(file)}:", key, schema.keys, "correct or remove it")
    groups = [schema.required, *(group for group in schema.together if group & leaves.keys())]
    for key in sorted(frozenset().union(*groups)):
        if key not in leaves:
            raise InputError(f"{_shown(file)}: {key} is missing; add it{_example(key, schema)}")
    profile = Profile({}, {}, {}, {}, _sources(file, sources, leaves), free)
    for key, value in leaves.items():
        if key in schema.numbers:
            profile.numbers[key] = _number(file, key, value, schema.numbers[key])
            if key not in profile.sources:
                raise InputError(
                    f"{_shown(file)}: {key} does not say where it comes from; "
                    f'add "{key}" = "..." under [source]'
                )
        elif key in schema.flags:
            if not isinstance(value, bool):
                raise _wrong(file, key, value, "true or false")
            profile.flags[key] = value
        elif key in schema.lists:
            if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
                raise _wrong(file, key, value, 'a list of texts such as ["..."]')
            profile.lists[key] = tuple(value)
        else:
            profile.texts[key] = _text(file, key, value, (schema.choices or {}).get(key))
    return profile


def _shown(file: Traversable) -> str:
    """A file's path for a message; quoted, so that odd characters stay on one line."""
    return repr(str(file))


def _files(folder: Traversable) -> dict[str, Traversable]:
    return {
        file.name.removesuffix(".toml"): file
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


def _parse(file: Traversable) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"cannot read {_shown(file)}: {reason}; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{_shown(file)} is not UTF-8 text; expected a TOML file") from error
    except RecursionError as error:
        raise InputError(f"{_shown(file)} is nested too deeply; expected tables of keys") from error
    except ValueError as error:  # TOML syntax, integers of thousands of digits, a NUL in the path
        raise InputError(f"{_shown(file)} is not valid TOML: {error}; correct it there") from error


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All entries with their tables' names; tables deeper than ``[a.b]`` stay whole."""
    for key, value in document.items():
        if not (isinstance(value, dict) and value):
            yield key, value
            continue
        for inner, entry in value.items():
            if isinstance(entry, dict) and entry:
                yield from ((f"{key}.{inner}.{last}", leaf) for last, leaf in entry.items())
            else:
                yield f"{key}.{inner}", entry


def _sources(file: Traversable, sources: Any, leaves: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(sources, dict):
        raise _wrong(file, "source", sources, "a table of texts")
    for key, text in sources.items():
        if key not in leaves:
            raise unknown(
                f"key under [source] of {_shown(file)}:",
                key,
                leaves,
                'quote it as "table.key", or remove it',
            )
        _text(file, f"source of {key}", text, None)
    return sources


def _free(file: Traversable, free: Any, schema: Schema) -> dict[str, tuple[float, float]]:
    """Bounds of the numbers that a fit may change."""
    if not isinstance(free, dict):
        raise _wrong(file, "free", free, "a table of [lowest, highest] by key")
    for key, bounds in free.items():
        if key not in schema.numbers:
            raise unknown(f"key under [free] of {_shown(file)}:", key, schema.numbers)
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise _wrong(file, f"free {key}", bounds, "[lowest, highest]")
        low, high = (_number(file, f"free {key}", b, schema.numbers[key]) for b in bounds)
        if not low < high:
            raise _wrong(file, f"free {key}", bounds, "[lowest, highest]")
    return {key: (float(low), float(high)) for key, (low, high) in free.items()}


def _number(file: Traversable, key: str, value: Any, rule: Number) -> float:
    expected = f"a number {rule.expected}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(file, key, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise _wrong(file, key, "more than 1e308", expected) from None
    if not (isfinite(number) and rule.holds(number)):
        raise _wrong(file, key, value, expected)
    return number


def _text(file: Traversable, key: str, value: Any, choices: tuple[str, ...] | None) -> str:
    if choices and value not in choices:
        raise _wrong(file, key, value, "one of " + ", ".join(repr(x) for x in choices))
    # "error" alone may be empty: nothing is known of a stack's error until it was measured.
    if not isinstance(value, str) or not (value.strip() or key == "error"):
        raise _wrong(file, key, value, "a text")
    return value


def _wrong(file: Traversable, key: str, value: object, expected: str) -> InputError:
    return InputError(f"{_shown(file)}: {key} is {repr(value)[:80]}; expected {expected}")


def _example(key: str, schema: Schema) -> str:
    if key in schema.numbers:
        return f" as a number {schema.numbers[key].expected}, with its source"
    choices = (schema.choices or {}).get(key)
    return f" as one of {', '.join(choices)}" if choices else " as a text"


def _folder() -> Traversable:
    return files("kvsim") / "hwprofiles"


def _kernels(profile: Profile) -> dict[str, Kernel]:
    """All classes, and those that the profile tells apart, over the class that stands for them."""
    kernels = {kernel: _kernel(profile, kernel, Kernel()) for kernel in KERNELS}
    for kernel, other in STANDS_FOR.items():
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
                f"{_shown(file)}: compute.fp16_FLOPps is {rate:.4g}, above sm x clock x FLOP per "
                f"clock = {peak:.4g}; it looks like a sparse rate, give the dense one"
            )
    for link in ("h2d", "d2h"):
        achieved = numbers[f"{link}.bandwidth_Bps"]
        line = numbers.get(f"{link}.line_rate_Bps", achieved)
        if achieved > line:
            raise InputError(
                f"{_shown(file)}: {link}.bandwidth_Bps is {achieved:.4g}, above its line rate "
                f"{line:.4g}; expected what large copies achieve in one direction"
            )
