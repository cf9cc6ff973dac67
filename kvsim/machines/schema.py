"""Schemas, keys and units of TOML files, and strict reading of them.

Nothing is guessed: an unknown, missing, mistyped or impossible entry is an error that names the
file and the key, and so is a number that does not say where it comes from.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from importlib.resources.abc import Traversable
from math import isfinite
from typing import Any, TypeVar

from kvsim.errors import InputError, unknown
from kvsim.files import TOML_PROFILE, display, read_toml
from kvsim.frozen import frozen
from kvsim.machines.hardware import ARITHMETIC_DTYPES, KERNEL_CLASSES, STANDS_FOR

T = TypeVar("T")


@frozen
class Number:
    """A condition on a number in a file.

    Attributes
    ----------
    expected
        Description of valid values, for messages.
    holds
        Tells whether a value is valid.
    """

    expected: str
    holds: Callable[[float], bool]


LOWEST, HIGHEST = (
    1e-18,
    1e18,
)  # no number that is not 0 is beyond them, so that none overflows later
POSITIVE = Number("above 0 and at most 1e18", lambda x: LOWEST <= x <= HIGHEST)
NON_NEGATIVE = Number("of 0 or more and at most 1e18", lambda x: x == 0 or LOWEST <= x <= HIGHEST)
AT_LEAST_ONE = Number("of 1 or more and at most 1e18", lambda x: 1 <= x <= HIGHEST)
EFFICIENCY = Number("above 0 and at most 1", lambda x: LOWEST <= x <= 1)
SHARE_NUMBER = Number("from 0 to 1", lambda x: 0 <= x <= 1)
WHOLE_NUMBER = Number("that is whole and from 0 to 1e6", lambda x: 0 <= x <= 1e6 and x % 1 == 0)
# The bounds of the next two catch figures left in GB/s, TFLOP/s, GB or MiB.
RATE = Number("of at least 1e6 in B/s or FLOP/s, at most 1e21", lambda x: 1e6 <= x <= 1e21)
COUNT = Number("that is whole and from 1 to 1e6", lambda x: 1 <= x <= 1e6 and x % 1 == 0)
BYTE_SIZE = Number("of at least 1e6 in bytes, at most 1e18", lambda x: 1e6 <= x <= 1e18)


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
    moved
        Present names of keys by their former ones.
    """

    numbers: Mapping[str, Number]
    required: frozenset[str]
    texts: frozenset[str]
    flags: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    choices: Mapping[str, tuple[str, ...]] | None = None
    together: tuple[frozenset[str], ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)

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
        Keys it may have, and what their values must be.

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
        Keys it may have, and what their values must be.

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
        faults.append(_unknown_key(file, key, schema))
    own = schema.required - (schema.numbers.keys() if "extends" in leaves else set())
    groups = [own, *(group for group in schema.together if group & leaves.keys())]
    for key in sorted(frozenset().union(*groups) - leaves.keys()):
        faults.append(
            InputError(f"{display(file)}: {key} is missing; add it{_example(key, schema)}")
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
    """Sources by key; entries without one inherit the source of their table."""
    found = {key: text for key, text in sources.items() if not isinstance(document.get(key), dict)}
    for table in [name for name in sources if name not in found]:
        for key in document[table]:
            found.setdefault(f"{table}.{key}", sources[table])
    return found


def _unknown_key(file: Traversable, key: str, schema: Schema) -> InputError:
    """Create the error for a key that is unknown or has been renamed."""
    if key in schema.moved:
        new = schema.moved[key]
        return InputError(f"{display(file)}: {key} is now called {new}; rename it")
    return unknown(f"key in {display(file)}:", key, schema.keys, "correct or remove it")


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
    """Parse a profile's tables and entries.

    Parameters
    ----------
    file
        The TOML file.

    Raises
    ------
    InputError
        If it cannot be read, or is no TOML.
    """
    return read_toml(str(file), TOML_PROFILE)


def keys_of(file: Traversable) -> list[str]:
    """List the keys of a profile as ``table.key``, sound or not.

    Parameters
    ----------
    file
        The TOML file.

    Raises
    ------
    InputError
        If it cannot be read, or is no TOML.
    """
    return [key for key, _ in _leaves(parse(file))]


def _leaves(document: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Entries as ``table.key``; tables nested deeper than ``[a.b]`` are not divided."""
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
    """Bounds of the numbers that a fit may change."""
    if not isinstance(free, dict):
        raise entry_error(file, "free", free, "a table of [lowest, highest] by key")
    for key, bounds in free.items():
        if key in schema.moved:
            raise _unknown_key(file, key, schema)
        if key not in schema.numbers:
            raise unknown(f"key under [free] of {display(file)}:", key, schema.numbers)
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise entry_error(file, f"free {key}", bounds, "[lowest, highest]")
        low, high = (_number(file, f"free {key}", b, schema.numbers[key]) for b in bounds)
        if not low < high:
            raise entry_error(file, f"free {key}", bounds, "[lowest, highest]")
    return {key: (float(low), float(high)) for key, (low, high) in free.items()}


def _number(file: Traversable, key: str, value: object, rule: Number) -> float:
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
    """Create the error for an entry with an unexpected value.

    Parameters
    ----------
    file
        The TOML file.
    key
        Key of the entry.
    value
        What it says.
    expected
        What it should say, in words.
    """
    return InputError(f"{display(file)}: {key} is {repr(value)[:80]}; expected {expected}")


def _example(key: str, schema: Schema) -> str:
    if key in schema.numbers:
        return f" as a number {schema.numbers[key].expected}, with its source"
    choices = (schema.choices or {}).get(key)
    return f" as one of {', '.join(choices)}" if choices else " as a text"


LINK_NAMES = ("hbm", "dram", "h2d", "d2h", "link")
"""What bytes move through: GPU and host memory, the host link's two directions, GPU to GPU."""

DRIVE = ("disk.capacity_B", "disk.read_Bps", "disk.write_Bps")
"""A drive behind the host, which most machines' files leave to ``--disk``."""

TENSOR_PEAK = ("compute.sm", "compute.clock_Hz", "compute.tensor_FLOP_per_clock_sm")
"""What the fp16 rate is checked against."""

UNIT_SUFFIX = re.compile("_(s|B|Bps|tokens)$")
"""Units that the keys of a stack carry and its fields do not."""

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

STACK_NUMBERS: Mapping[str, Number] = {
    "time.launch_s": NON_NEGATIVE,
    "time.issue_s": NON_NEGATIVE,
    "time.graph_tokens": NON_NEGATIVE,
    "time.gap_s": NON_NEGATIVE,
    "time.layer_s": NON_NEGATIVE,
    "time.routing_s": NON_NEGATIVE,
    "time.latent_s": NON_NEGATIVE,
    "time.step_s": NON_NEGATIVE,
    "time.sampling_s": NON_NEGATIVE,
    "time.sequence_s": NON_NEGATIVE,
    "time.beside_step_s": NON_NEGATIVE,
    "time.beside_sequence_s": NON_NEGATIVE,
    "time.quantise_s": NON_NEGATIVE,
    "time.sync_s": NON_NEGATIVE,
    "time.prompt_pass_tokens": NON_NEGATIVE,
    "time.stage_s": NON_NEGATIVE,
    "time.stage_overlap": SHARE_NUMBER,
    "time.pointwise_launches": NON_NEGATIVE,
    "time.wide_norm_launches": NON_NEGATIVE,
    "time.pointwise_passes": NON_NEGATIVE,
    "server.token_s": NON_NEGATIVE,
    "server.prompt_s": NON_NEGATIVE,
    "server.first_s": NON_NEGATIVE,
    "server.tokenise_s": NON_NEGATIVE,
    "cache.append_passes": NON_NEGATIVE,
    "attention.score_bytes": NON_NEGATIVE,
    "attention.score_memory_B": POSITIVE,
    "packed_cache.layer_s": NON_NEGATIVE,
    "packed_cache.unpack_ops": NON_NEGATIVE,
    "packed_cache.unpack_bytes": NON_NEGATIVE,
    "packed_cache.passes": AT_LEAST_ONE,
    "packed_cache.plain_passes": NON_NEGATIVE,
    "packed_cache.merge_token_s": NON_NEGATIVE,
    "packed_cache.chunk_tokens": NON_NEGATIVE,
    "packed_cache.qr_s": NON_NEGATIVE,
    "selection.gather_row_s": NON_NEGATIVE,
    "selection.index_bytes": POSITIVE,
    "selection.id_list_s": NON_NEGATIVE,
    "offload.layer_s": NON_NEGATIVE,
    "offload.host_s": NON_NEGATIVE,
    "offload.overlap": SHARE_NUMBER,
    "offload.stream_tokens": NON_NEGATIVE,
    "offload.pageable_Bps": NON_NEGATIVE,
    "offload.second_socket": SHARE_NUMBER,
    "offload.weight_buffers": AT_LEAST_ONE,
    "offload.resident_layers": WHOLE_NUMBER,
    "offload.tile_s": NON_NEGATIVE,
    "offload.merge_passes": NON_NEGATIVE,
    "offload.split_prompt": SHARE_NUMBER,
    "sums.direct_share": SHARE_NUMBER,
    "sums.direct_s": NON_NEGATIVE,
    "sums.direct_hop_s": NON_NEGATIVE,
    "sums.direct_second_s": NON_NEGATIVE,
    "sums.ring_s": NON_NEGATIVE,
    "sums.ring_hop_s": NON_NEGATIVE,
    "sums.ring_share": EFFICIENCY,
    "drafts.draft_s": NON_NEGATIVE,
    "drafts.round_s": NON_NEGATIVE,
    "drafts.tree_s": NON_NEGATIVE,
    "drafts.sequence_s": NON_NEGATIVE,
    "drafts.shared_experts": SHARE_NUMBER,
    "drafts.widest": NON_NEGATIVE,
    "sums.exchange_s": NON_NEGATIVE,
    "sums.sorted_out": SHARE_NUMBER,
    "sums.popularity": AT_LEAST_ONE,
    "sums.skew": NON_NEGATIVE,
    "weights.unpack_ops": NON_NEGATIVE,
    "weights.unpack_bytes": NON_NEGATIVE,
    "weights.unpack_rows": NON_NEGATIVE,
    "weights.copies": AT_LEAST_ONE,
    "memory.context_memory_B": NON_NEGATIVE,
    "memory.prefill_chunk_tokens": AT_LEAST_ONE,
    "memory.activation_passes": NON_NEGATIVE,
    "memory.logit_bytes": POSITIVE,
    "memory.reserved_sequences": NON_NEGATIVE,
    "memory.sampling_bytes": NON_NEGATIVE,
}
STACK_FLAGS = (
    "time.counted_launches",
    "time.asynchronous",
    "cache.keeps_old",
    "cache.static",
    "attention.flash_prompt",
    "attention.repeat_kv",
    "packed_cache.repeat_kv",
    "packed_cache.unpack_each",
    "packed_cache.scored_prompt",
    "selection.gather_sync",
    "offload.across_steps",
    "offload.blocking_store",
    "offload.tile_sync",
    "sums.one_shot",
    "weights.gguf",
    "weights.half_accumulation",
    "weights.int8_products",
    "memory.prompt_logits",
    "memory.share_of_free",
    "memory.share_is_static",
)
MOVED_KEYS = {
    "time.overlapped_sequence_s": "server.token_s",
    "time.overlapped_prompt_s": "server.prompt_s",
    "time.packed_layer_s": "packed_cache.layer_s",
    "time.offloaded_layer_s": "offload.layer_s",
    "time.id_list_s": "selection.id_list_s",
    "time.qr_s": "packed_cache.qr_s",
    "time.tile_s": "offload.tile_s",
    "cache.static_cache": "cache.static",
    "cache.score_bytes": "attention.score_bytes",
    "cache.flash_prompt": "attention.flash_prompt",
    "cache.repeat_kv": "attention.repeat_kv",
    "cache.unpack_ops": "packed_cache.unpack_ops",
    "cache.unpack_bytes": "packed_cache.unpack_bytes",
    "cache.plain_passes": "packed_cache.plain_passes",
    "cache.merge_token_s": "packed_cache.merge_token_s",
    "cache.packed_passes": "packed_cache.passes",
    "cache.repeat_packed": "packed_cache.repeat_kv",
    "cache.merge_passes": "offload.merge_passes",
    "cache.resident_layers": "offload.resident_layers",
    "copies.overlap": "offload.overlap",
    "copies.across_steps": "offload.across_steps",
    "copies.blocking_store": "offload.blocking_store",
    "copies.tile_sync": "offload.tile_sync",
    "copies.split_prompt": "offload.split_prompt",
    "copies.gather_row_s": "selection.gather_row_s",
    "copies.gather_sync": "selection.gather_sync",
    "copies.index_bytes": "selection.index_bytes",
    "copies.one_shot_sum": "sums.one_shot",
    "memory.old_cache": "cache.keeps_old",
    "memory.weight_copies": "weights.copies",
    "memory.packed_chunk_tokens": "packed_cache.chunk_tokens",
}
"""Former names of a stack's keys, and today's."""

KERNEL_NUMBERS = {
    "memory": ("memory", EFFICIENCY),
    "compute": ("compute", EFFICIENCY),
    "floor_s": ("floor", NON_NEGATIVE),
    "host_s": ("host", NON_NEGATIVE),
    "launch_s": ("launch", NON_NEGATIVE),
    "half_size": ("half_size", NON_NEGATIVE),
    "tile_rows": ("tile", NON_NEGATIVE),
    "tile_columns": ("tile_columns", NON_NEGATIVE),
    "unit_Bps": ("unit_rate", NON_NEGATIVE),
    "half_columns": ("half_columns", NON_NEGATIVE),
    "expert_s": ("expert", NON_NEGATIVE),
    "added": ("added", SHARE_NUMBER),
    "input_passes": ("input_passes", NON_NEGATIVE),
    "traffic": ("traffic", NON_NEGATIVE),
    "narrow": ("narrow", POSITIVE),
    "wide": ("wide", POSITIVE),
    "ungrouped": ("ungrouped", POSITIVE),
    "padding": ("padding", NON_NEGATIVE),
    "split_s": ("split", NON_NEGATIVE),
    "unpack_ops": ("unpacking", NON_NEGATIVE),
    "walk_s": ("walk", NON_NEGATIVE),
    "unit_blocks": ("blocks", NON_NEGATIVE),
}

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
    flags=frozenset(STACK_FLAGS),
    lists=frozenset({"near", "releases", "measured"}),
    choices={"basis": ("datasheet", "carried over", "calibrated")},
    together=(
        frozenset({"device", "date"}),
        frozenset({"checked.rows", "checked.device", "checked.model", "checked.technique"}),
    ),
    moved=MOVED_KEYS,
)


def mechanism_of(key: str) -> tuple[str, str]:
    """Split a key into the group of ``Stack`` and its field.

    Parameters
    ----------
    key
        Key of a stack's file, as ``time.launch_s``.

    Returns
    -------
    tuple[str, str]
        Group and field without its unit, as "time" and "launch".
    """
    group, _, name = key.partition(".")
    return group, UNIT_SUFFIX.sub("", name)
