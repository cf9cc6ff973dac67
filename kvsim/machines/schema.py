"""Schemas, keys and units of TOML files, and strict reading of them.

Nothing is guessed: an unknown, missing, mistyped or impossible entry is an error that names the
file and the key, and so is a number that does not say where it comes from.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from functools import cached_property
from importlib.resources.abc import Traversable
from math import isfinite
from typing import Any, TypeVar

from kvsim.errors import InputError, unknown
from kvsim.files import TOML_PROFILE, display, read_toml
from kvsim.frozen import frozen
from kvsim.machines.hardware import (
    ARITHMETIC_DTYPES,
    AT_LEAST_ONE,
    EFFICIENCY,
    KERNEL_CLASSES,
    NON_NEGATIVE,
    POSITIVE,
    STANDS_FOR,
    Condition,
    Kernel,
    Stack,
)

T = TypeVar("T")


# The bounds of the next two catch figures left in GB/s, TFLOP/s, GB or MiB.
RATE = Condition("of at least 1e6 in B/s or FLOP/s, at most 1e21", lambda x: 1e6 <= x <= 1e21)
COUNT = Condition("that is whole and from 1 to 1e6", lambda x: 1 <= x <= 1e6 and x % 1 == 0)
BYTE_SIZE = Condition("of at least 1e6 in bytes, at most 1e18", lambda x: 1e6 <= x <= 1e18)


@frozen
class Schema:
    """The keys that a kind of TOML file may have, each as ``table.key``.

    Attributes
    ----------
    numbers
        Conditions of the keys whose values are numbers.
    required
        Keys that must be there.
    texts, flags, lists
        Keys of texts, of booleans, and of lists of texts.
    choices
        Valid values of texts that have few.
    together
        Sets of keys that must all be there if one of them is.
    """

    numbers: Mapping[str, Condition]
    required: frozenset[str]
    texts: frozenset[str]
    flags: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    choices: Mapping[str, tuple[str, ...]] | None = None
    together: tuple[frozenset[str], ...] = ()

    @cached_property
    def keys(self) -> frozenset[str]:
        """Every key that a file may have."""
        return self.texts | self.flags | self.lists | self.numbers.keys()


@frozen
class Profile:
    """The checked contents of a profile, by ``table.key``.

    Attributes
    ----------
    numbers, flags, texts, lists
        Entries by type, in the units that keys end with.
    sources
        Where each number comes from.
    free
        Lower and upper bounds of the numbers that a fit may change.
    """

    numbers: dict[str, float]
    flags: dict[str, bool]
    texts: dict[str, str]
    lists: dict[str, tuple[str, ...]]
    sources: dict[str, str]
    free: dict[str, tuple[float, float]] = field(default_factory=dict)


def read(file: Traversable, schema: Schema) -> Profile:
    """Read and check one profile.

    Parameters
    ----------
    file
        The TOML file.
    schema
        Keys that it may have, and valid values.

    Returns
    -------
    Profile
        The checked contents.

    Raises
    ------
    InputError
        For the first entry that is unknown, missing, of the wrong type, out of range or without
        a source; or if the file cannot be read.
    """
    profile, faults = inspect(file, schema)
    if faults:
        raise faults[0]
    return profile


def inspect(file: Traversable, schema: Schema) -> tuple[Profile, list[InputError]]:
    """Read the valid part of a profile, and collect every fault.

    Parameters
    ----------
    file
        The TOML file.
    schema
        Keys that it may have, and valid values.

    Returns
    -------
    tuple[Profile, list[InputError]]
        The sound entries, and the faults in the order they were found.

    Raises
    ------
    InputError
        If the file cannot be read at all.
    """
    document = parse(file)
    sources = document.pop("source", {})
    if isinstance(sources, dict):
        sources = _of_tables(sources, document)
    profile = Profile({}, {}, {}, {}, {})
    faults: list[InputError] = []

    def check(rule: Callable[..., T], *arguments: object) -> T | None:
        try:
            return rule(file, *arguments)
        except InputError as fault:
            faults.append(fault)
            return None

    profile.free.update(check(_free, document.pop("free", {}), schema) or {})
    leaves = dict(_leaves(document))
    known = {key: value for key, value in leaves.items() if key in schema.keys}
    for key in (key for key in leaves if key not in known):
        faults.append(unknown(f"key in {display(file)}:", key, schema.keys, "correct or remove it"))
    own = schema.required - (schema.numbers.keys() if "extends" in leaves else set())
    groups = [own, *(group for group in schema.together if group & leaves.keys())]
    for key in sorted(frozenset().union(*groups) - leaves.keys()):
        faults.append(
            InputError(f"{display(file)}: '{key}' is missing; add it{_example(key, schema)}")
        )
    if isinstance(sources, dict):
        for key, text in sources.items():
            check(_source, key, text, leaves)
        profile.sources.update(sources)
    else:
        faults.append(entry_error(file, "source", sources, "a table of texts"))
    for key, value in known.items():
        check(_entry, schema, profile, key, value)
    return profile, list({str(fault): fault for fault in faults}.values())


def _of_tables(sources: dict[str, object], document: Mapping[str, Any]) -> dict[str, object]:
    """Return sources by key; entries without one inherit the source of their table."""
    found = {key: text for key, text in sources.items() if not isinstance(document.get(key), dict)}
    for table in [name for name in sources if name not in found]:
        for key in document[table]:
            found.setdefault(f"{table}.{key}", sources[table])
    return found


def _entry(file: Traversable, schema: Schema, profile: Profile, key: str, value: object) -> None:
    """Check an entry and store it in the profile."""
    if key in schema.numbers:
        profile.numbers[key] = _number(file, key, value, schema.numbers[key])
        if key not in profile.sources:
            raise InputError(
                f"{display(file)}: {key} does not say where it comes from; "
                f'add "{key}" = "..." under [source]'
            )
    elif key in schema.flags:
        if not isinstance(value, bool):
            raise entry_error(file, key, value, "true or false")
        profile.flags[key] = value
    elif key in schema.lists:
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise entry_error(file, key, value, 'a list of texts such as ["..."]')
        profile.lists[key] = tuple(value)
    else:
        profile.texts[key] = _text(file, key, value, (schema.choices or {}).get(key))


def parse(file: Traversable) -> dict[str, Any]:
    """Parse the tables and entries of a profile.

    Parameters
    ----------
    file
        The TOML file.

    Returns
    -------
    dict
        The parsed document.

    Raises
    ------
    InputError
        If it cannot be read, or is not TOML.
    """
    return read_toml(str(file), TOML_PROFILE)


def keys_of(file: Traversable) -> list[str]:
    """List the keys of a profile as ``table.key``, valid or not.

    Parameters
    ----------
    file
        The TOML file.

    Returns
    -------
    list of str
        The keys in the order of the file.

    Raises
    ------
    InputError
        If it cannot be read, or is not TOML.
    """
    return [key for key, _ in _leaves(parse(file))]


def _leaves(document: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield entries as ``table.key``; tables nested deeper than ``[a.b]`` are not divided."""
    for key, value in document.items():
        if not (isinstance(value, dict) and value):
            yield key, value
            continue
        for inner, entry in value.items():
            if isinstance(entry, dict) and entry:
                yield from ((f"{key}.{inner}.{last}", leaf) for last, leaf in entry.items())
            else:
                yield f"{key}.{inner}", entry


def _source(file: Traversable, key: str, text: object, leaves: Mapping[str, object]) -> None:
    """Refuse sources of unknown numbers and sources that are not texts."""
    if key not in leaves:
        raise unknown(
            f"key under [source] of {display(file)}:",
            key,
            leaves,
            'quote it as "table.key", or remove it',
        )
    _text(file, f"source of {key}", text, None)


def _free(file: Traversable, free: object, schema: Schema) -> dict[str, tuple[float, float]]:
    """Return the bounds of the numbers that a fit may change."""
    if not isinstance(free, dict):
        raise entry_error(file, "free", free, "a table of [lowest, highest] by key")
    for key, bounds in free.items():
        if key not in schema.numbers:
            raise unknown(f"key under [free] of {display(file)}:", key, schema.numbers)
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise entry_error(file, f"free {key}", bounds, "[lowest, highest]")
        low, high = (_number(file, f"free {key}", b, schema.numbers[key]) for b in bounds)
        if not low < high:
            raise entry_error(file, f"free {key}", bounds, "[lowest, highest]")
    return {key: (float(low), float(high)) for key, (low, high) in free.items()}


def _number(file: Traversable, key: str, value: object, rule: Condition) -> float:
    expected = f"a number {rule.expected}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise entry_error(file, key, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise entry_error(file, key, "more than 1e308", expected) from None
    if not (isfinite(number) and rule.holds(number)):
        raise entry_error(file, key, value, expected)
    return number


def _text(file: Traversable, key: str, value: object, choices: tuple[str, ...] | None) -> str:
    if choices and value not in choices:
        raise entry_error(file, key, value, "one of " + ", ".join(repr(x) for x in choices))
    # "error" alone may be empty: a stack's error is unknown until it is measured.
    if not isinstance(value, str) or not (value.strip() or key == "error"):
        raise entry_error(file, key, value, "a text")
    return value


def entry_error(file: Traversable, key: str, value: object, expected: str) -> InputError:
    """Create the error about an entry with an invalid value.

    Parameters
    ----------
    file
        The TOML file.
    key
        Key of the entry.
    value
        The invalid value.
    expected
        Description of valid values.

    Returns
    -------
    InputError
        The error, to be raised.
    """
    return InputError(f"{display(file)}: {key} is {repr(value)[:80]}; expected {expected}")


def _example(key: str, schema: Schema) -> str:
    if key in schema.numbers:
        return f" as a number {schema.numbers[key].expected}, with its source"
    choices = (schema.choices or {}).get(key)
    return f" as one of {', '.join(choices)}" if choices else " as a string"


LINK_NAMES = ("hbm", "dram", "h2d", "d2h", "link")
"""What bytes move through: GPU and host memory, the host link's two directions, GPU to GPU."""

DRIVE = ("disk.capacity_B", "disk.read_Bps", "disk.write_Bps")
"""A drive behind the host, which most machines' files leave to ``--disk``."""

TENSOR_PEAK = ("compute.sm", "compute.clock_Hz", "compute.tensor_FLOP_per_clock_sm")
"""What the fp16 rate is checked against."""

HARDWARE_FILE = Schema(
    numbers={f"compute.{dtype}_FLOPps": RATE for dtype in ARITHMETIC_DTYPES}
    | {"compute.cpu_fp32_FLOPps": RATE}
    | dict.fromkeys(TENSOR_PEAK, POSITIVE)
    | {
        "memory.gpu_capacity_B": BYTE_SIZE,
        "memory.host_capacity_B": BYTE_SIZE,
        "memory.l2_B": POSITIVE,
    }
    | {f"{link}.bandwidth_Bps": RATE for link in LINK_NAMES}
    | {f"{link}.latency_s": NON_NEGATIVE for link in LINK_NAMES}
    | {"h2d.line_rate_Bps": RATE, "d2h.line_rate_Bps": RATE}
    | dict(zip(DRIVE, (BYTE_SIZE, RATE, RATE), strict=True))
    | {
        "compute.half_accumulation_gain": AT_LEAST_ONE,
        "compute.sustained": EFFICIENCY,
        "compute.boost_s": NON_NEGATIVE,
        "link.gpus": COUNT,
        "price.usd_per_hour": POSITIVE,
        "power.rated_W": POSITIVE,
    },
    required=frozenset(
        {"title", "basis", "compute.fp32_FLOPps", "compute.fp16_FLOPps", "compute.cpu_fp32_FLOPps"}
        | {"memory.gpu_capacity_B", "memory.host_capacity_B"}
        | {f"{link}.{key}" for link in LINK_NAMES for key in ("bandwidth_Bps", "latency_s")}
    ),
    texts=frozenset({"title", "basis", "extends", "device", "date", "price.date"}),
    lists=frozenset({"aliases", "notes"}),
    choices={"basis": ("datasheet", "measured")},
    together=(
        frozenset(TENSOR_PEAK),
        frozenset(DRIVE),
        frozenset({"price.usd_per_hour", "price.date"}),
        frozenset({"device", "date"}),
    ),
)

HOST_FILE = Schema(
    numbers={
        "cpu.cores": COUNT,
        "cpu.clock_Hz": POSITIVE,
        "cpu.FLOP_per_clock": POSITIVE,
        "memory.channels": COUNT,
        "memory.rate_Tps": RATE,
        "memory.share": EFFICIENCY,
        "memory.capacity_B": BYTE_SIZE,
        "sockets.count": COUNT,
    },
    required=frozenset(
        {"title", "cpu.cores", "cpu.clock_Hz", "cpu.FLOP_per_clock", "memory.channels"}
        | {"memory.rate_Tps", "memory.share", "memory.capacity_B"}
    ),
    texts=frozenset({"title"}),
    lists=frozenset({"aliases"}),
)
"""What a host's profile says: cores, channels and capacity are of each socket."""


def _list_fields(mechanism: type) -> Iterator[tuple[str, str, Condition | None]]:
    """Yield key, name and condition of each field of a mechanism; flags have no condition."""
    for each in fields(mechanism):
        unit, condition = getattr(each.type, "__metadata__", ("", None))
        yield KERNEL_KEYS.get(each.name, each.name + unit), each.name, condition


KERNEL_KEYS = {"unit_rate": "unit_Bps"}  # keys that are not the field's name with its unit
STACK_FIELDS = {
    f"{mechanism.name}.{key}": (mechanism.name, name, condition)
    for mechanism in fields(Stack)
    if is_dataclass(mechanism.default)
    for key, name, condition in _list_fields(type(mechanism.default))
}
"""The mechanism, the field and the condition of each key of a stack's file."""

STACK_NUMBERS = {key: rule for key, (*_, rule) in STACK_FIELDS.items() if rule is not None}
KERNEL_NUMBERS = {key: (name, rule) for key, name, rule in _list_fields(Kernel) if rule}

CHECKED_KINDS = ("ttft", "tpot", "latency")
CHECKED_FIGURES = ("median", "p90", "low", "high")
CHECKED_NUMBERS = {"checked.rows": COUNT} | {
    f"checked.{kind}_{figure}": NON_NEGATIVE if figure in ("median", "p90") else POSITIVE
    for kind in CHECKED_KINDS
    for figure in CHECKED_FIGURES
}
"""What a run of its card said of a stack: errors, and factors that hold 80 % of measured times."""

STACK_FILE = Schema(
    numbers=dict(STACK_NUMBERS)
    | CHECKED_NUMBERS
    | {
        f"kernel.{kernel}.{key}": rule
        for kernel in (*KERNEL_CLASSES, *STANDS_FOR)
        for key, (_, rule) in KERNEL_NUMBERS.items()
    },
    required=frozenset({"title", "basis", "error"}),
    texts=frozenset({"title", "basis", "error", "extends", "fit", "device", "date", "version"})
    | {"checked.device", "checked.model", "checked.technique"},
    flags=frozenset(STACK_FIELDS.keys() - STACK_NUMBERS.keys()),
    lists=frozenset({"near", "releases", "measured"}),
    choices={"basis": ("datasheet", "carried over", "calibrated")},
    together=(
        frozenset({"device", "date"}),
        frozenset({"checked.rows", "checked.device", "checked.model", "checked.technique"}),
    ),
)
