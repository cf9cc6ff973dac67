"""Measured operators from CSV files, and the reasons why rows are unusable.

Columns: device, engine, version, op, ms and those of its kind of op (``KINDS``). A row that cannot
be used is counted under the reason, never fitted.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np

from kvsim.errors import InputError
from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.hardware import Hardware
from kvsim.models.kinds import STATE_NUMBER

STATES = ("k_heads", "k_dim", "v_heads", "v_dim")  # heads and widths of a layer with a state
EXTENDED = ("batch", "new", "context", "heads", "kv_heads", "head_dim")
KINDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "quantise_input": ("m", "k"),
    "decode_attention": ("batch", "context", "heads", "kv_heads", "head_dim"),
    "prefill_attention": ("batch", "new", "context", "heads", "kv_heads", "head_dim"),
    "all_reduce": ("gpus", "elements"),
    "moe": ("tokens", "hidden", "expert_ffn", "active", "experts", "tp"),
    "mla_decode": ("batch", "context", "heads"),
    "extend_attention": EXTENDED,
    "mixed_attention": (*EXTENDED, "decodes", "decode_context"),
    "recurrence": ("batch", "new", *STATES),
    "scan": ("batch", "new", *STATES),
}
"""Whole numbers that tell the shape of each kind of op."""

ROUTING = "power law 1.01"  # of tokens to experts, in most rows and all that do not say it
ABSENT: Mapping[str, Mapping[str, float]] = {
    "extend_attention": {"decodes": 0.0, "decode_context": 0.0},
    "moe": {"ep": 1.0},
}
"""Further numbers of a kind that its rows may leave out, and what they are then."""

SAME_KIND = {"mixed_attention": "extend_attention"}
"""Ops whose kernel is that of another op: a prompt's later part, alone or beside decodes."""

FORMAT_ALIASES = dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), "fp16")
FORMAT_ALIASES |= {"fp8": "fp8", "fp8_block": "fp8-block", "int8_wo": "int8", "int4_wo": "int4"}
FORMAT_ALIASES |= {"nvfp4": "nvfp4", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp8"}
"""Number formats of the files by kvsim's names."""

BYTES_PER_NUMBER = {"fp16": 2.0} | dict.fromkeys(("fp8", "fp8-block", "int8"), 1.0)
BYTES_PER_NUMBER |= dict.fromkeys(("int4", "nvfp4", "mxfp4", "mxfp8"), 0.5)
TINY = 2.0**20  # keys and values below this say what a kernel takes at least [B]
L2_MARGIN = 1.2  # keys and values of a call that cannot stay in L2, over its size
SIZES_FROM_ZERO = {"context", "decodes", "decode_context"}  # may be 0


Group = dict[tuple[float, ...], tuple[float, str, str]]
"""Rows of one kind by shape: what each took [s], where it stands, and its version."""


@frozen
class OpRows:
    """Measured operators of one kind in one number format.

    Attributes
    ----------
    kind
        Kind of operator, a key of ``KINDS``.
    dtype
        Number format of the weights, or of the cache for attention.
    shape
        Sizes that describe the operator, by name. (n,) each
    took
        Measured times. (n,) [s]
    lines
        File and line of each measurement.
    version
        Newest version of the engine among the measurements.
    """

    kind: str
    dtype: str
    shape: Mapping[str, Array]
    took: Array
    lines: tuple[str, ...]
    version: str = ""

    def __len__(self) -> int:
        return self.took.size

    def select(self, chosen: Array) -> "OpRows":
        """Select some of the rows.

        Parameters
        ----------
        chosen
            Boolean mask or indices of the rows.

        Returns
        -------
        OpRows
            The selected rows, in the same order.
        """
        shape = {name: values[chosen] for name, values in self.shape.items()}
        lines = tuple(np.array(self.lines, dtype=object)[chosen])
        return replace(self, shape=shape, took=self.took[chosen], lines=lines)


@frozen
class OpTable:
    """Measured operators of one engine on one device.

    Attributes
    ----------
    device
        Name of the GPU's profile.
    engine
        Name of the engine.
    version
        Newest version of the engine among the measurements.
    rows
        The measurements, by kind of operator and number format.
    rejected
        Number of rows that were left out, by reason.
    sources
        Where the measurements come from, as the tables say.
    """

    device: str
    engine: str
    version: str
    rows: tuple[OpRows, ...]
    rejected: Mapping[str, int]
    sources: tuple[str, ...]


def read_ops(
    files: Iterable[Path],
    engine: str,
    hardware: Hardware,
    version: str | None = None,
    l2: float = 0.0,
) -> OpTable:
    """Read the measured operators of one engine on one GPU from CSV files.

    Rows that cannot be used, such as those that are faster than the memory allows, are counted by
    reason and left out.

    Parameters
    ----------
    files
        The CSV files.
    engine
        Name of the engine, as the tables have it.
    hardware
        The GPU.
    version
        Version of the engine; None for the newest one that each kind of operator has.
    l2
        Size of the GPU's L2 cache, by which rows that stay in the cache are recognised if the table
        has no column ``l2``; 0 if it is not known. [B]

    Returns
    -------
    OpTable
        The measurements that can be used.

    Raises
    ------
    InputError
        If a file cannot be read, lacks a column, or no row is left.
    """
    rejected: Counter[str] = Counter()
    found: dict[tuple[str, str], Group] = {}
    sources: dict[str, None] = {}
    newest = (
        {} if version is not None else _newest_versions(files := list(files), engine, hardware.name)
    )
    for path in files:
        for line, row in read_records(path, TABLE):
            _check_columns(path, row)
            if row["engine"] != engine or row["device"] != hardware.name:
                rejected["of another engine or device"] += 1
                continue
            op = _op(row)
            wanted = version if version is not None else newest.get(op)
            if row.get("version", "") != wanted and op in KINDS:
                rejected["of another version"] += 1
                continue
            reason = _no_evidence(row, hardware, l2)
            if reason:
                rejected[reason] += 1
                continue
            if not _add_quantising(row, hardware, found, f"{path.name}, line {line}"):
                rejected["whose quantising is faster than memory allows"] += 1
            kind = SAME_KIND.get(op, op)
            shape = _shape(kind, row)
            took = _seconds(row)
            key = (kind, FORMAT_ALIASES[_format(row)])
            group = found.setdefault(key, {})
            if shape in group:
                rejected["a duplicate"] += 1
                continue
            group[shape] = (took, f"{path.name}, line {line}", row.get("version", ""))
            sources[row.get("source") or path.name] = None
    if not found:
        why = ", ".join(f"{count} {reason}" for reason, count in rejected.items()) or "no rows"
        raise InputError(
            f"--from-ops: no usable row for {engine} on {hardware.name} ({why}); expected columns "
            f"device,engine,version,op,ms and those of the op, such as m,n,k of gemm"
        )
    versions = sorted({v for g in found.values() for _, _, v in g.values()}, key=_order)
    rows = tuple(_rows(kind, dtype, group) for (kind, dtype), group in sorted(found.items()))
    return OpTable(hardware.name, engine, versions[-1], rows, dict(rejected), tuple(sources))


def pairs(files: Iterable[Path]) -> list[tuple[str, str]]:
    """List the devices and engines that files hold.

    Parameters
    ----------
    files
        Tables of measured operators.

    Returns
    -------
    list of (str, str)
        Pairs of device and engine, in the order of the rows.

    Raises
    ------
    InputError
        If a file has no rows.
    """
    seen: dict[tuple[str, str], None] = {}
    for path in files:
        count = 0
        for _, row in read_records(path, TABLE):
            _check_columns(path, row)
            count += 1
            seen[row["device"], row["engine"]] = None
        if not count:
            raise InputError(f"{path}: no rows; expected the columns device, engine, op and ms")
    return list(seen)


def _newest_versions(files: list[Path], engine: str, device: str) -> dict[str, str]:
    """The newest version of an engine by kind of op."""
    found: dict[str, str] = {}
    for path in files:
        for _, row in read_records(path, TABLE):
            if row.get("engine") == engine and row.get("device") == device:
                version, op = row.get("version", ""), _op(row)
                if op not in found or _order(version) > _order(found[op]):
                    found[op] = version
    return found


def _order(version: str) -> list[tuple[int, str]]:
    parts = version.replace("rc", ".").replace("post", ".").split(".")
    plain = re.compile("[0-9]{1,9}")
    return [(int(part), "") if plain.fullmatch(part) else (-1, part) for part in parts]


def _check_columns(path: Path, row: Mapping[str, str]) -> None:
    for column in ("device", "engine", "op", "ms"):
        if column not in row:
            raise InputError(f"{path}: column {column} is missing; add it to the header")


def _op(row: Mapping[str, str]) -> str:
    """An op's name; those of a layer with a state are told by their kernel.

    Of the layers with a state, gated delta nets have rows enough.
    """
    op = row.get("op", "")
    if row.get("family") != "gated delta net" or "conv" in row.get("kernel", ""):
        return op
    return "scan" if op == "context" else "recurrence"


def _format(row: Mapping[str, str]) -> str:
    return row.get("dtype") or row.get("kv_dtype") or ("fp16" if "family" in row else "")


def _no_evidence(row: Mapping[str, str], hardware: Hardware, l2: float) -> str:
    """Why a row cannot be used; empty if it can."""
    kind = _op(row)
    if kind not in KINDS:
        return f"of an unknown op {kind[:20]!r}"
    dtype = _format(row)
    if dtype not in FORMAT_ALIASES:
        return f"of an unknown number format {dtype[:20]!r}"
    for name in KINDS[kind]:
        if name not in row:
            return f"without a column {name}"
        value = _number(row[name])
        if value is None or value != int(value) or value < (0 if name in SIZES_FROM_ZERO else 1):
            return f"whose {name} is no whole number"
        if value > 1e12:
            return f"whose {name} is absurdly large"
    if row.get("routing", ROUTING) not in ("", ROUTING):
        return "of another routing"
    took = _seconds(row)
    if not (isfinite(took) and 0 < took < 3600):
        return "whose time is not a positive number"
    least, cache = _least_bytes(
        kind, {n: float(row[n]) for n in KINDS[kind]}, FORMAT_ALIASES[dtype]
    )
    if (row.get("l2") == "warm" and kind != "gemm") or (
        not row.get("l2") and TINY <= cache < L2_MARGIN * l2
    ):
        return "warm in the L2 cache"
    if least / hardware.links["hbm"].bandwidth > took:
        return "faster than memory allows"
    return ""


def _least_bytes(kind: str, s: Mapping[str, float], dtype: str) -> tuple[float, float]:
    """Bytes that an op reads at least, and those of keys and values alone. [B]"""
    size = BYTES_PER_NUMBER[dtype]
    if kind == "gemm":
        return size * s["n"] * s["k"] + 2 * s["m"] * (s["n"] + s["k"]), 0.0
    if kind == "decode_attention":
        cache = 2 * size * s["batch"] * s["context"] * s["kv_heads"] * s["head_dim"]
        return cache, cache
    if kind == "mla_decode":
        cache = size * s["batch"] * s["context"] * LATENT_WIDTH
        return cache, cache
    if kind == "recurrence":  # states in fp32, those of every batch
        return 0.0, 2 * STATE_NUMBER * s["batch"] * s["v_heads"] * s["v_dim"] * s["k_dim"]
    if kind == "moe":  # one token's experts
        return 3 * size * s["active"] * s["hidden"] * s["expert_ffn"] / s["tp"], 0.0
    return 0.0, 0.0


LATENT_WIDTH = 576.0  # numbers cached per token by absorbed MLA: 512 latent, 64 with positions


def _add_quantising(
    row: Mapping[str, str], hardware: Hardware, found: dict[tuple[str, str], Group], where: str
) -> bool:
    """What quantising a product's input took, once for all products of one input.

    Whether memory allows it; the product itself remains.
    """
    took = 1e-3 * (_number(row.get("quantise_ms") or "0") or 0.0)
    if row["op"] != "gemm" or took <= 0:
        return True
    m, k = float(row["m"]), float(row["k"])
    if 3 * m * k / hardware.links["hbm"].bandwidth > took:
        return False
    group = found.setdefault(("quantise_input", "fp8"), {})
    group.setdefault((m, k), (took, where, row.get("version", "")))
    return True


def _seconds(row: Mapping[str, str]) -> float:
    """What an op took, without quantising its input: checkpoints have static scales. [s]"""
    took = _number(row["ms"])
    quantising = _number(row.get("quantise_ms") or "0")
    if took is None or quantising is None:
        return float("nan")
    return 1e-3 * (took - quantising)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


def _names(kind: str) -> tuple[str, ...]:
    return (*KINDS[kind], *ABSENT.get(kind, {}))


def _shape(kind: str, row: Mapping[str, str]) -> tuple[float, ...]:
    absent = ABSENT.get(kind, {})
    return tuple(float(row.get(name) or str(absent[name])) for name in _names(kind))


def _rows(kind: str, dtype: str, group: Group) -> OpRows:
    columns = np.array(list(group), dtype=float).T
    shape = dict(zip(_names(kind), columns, strict=True))
    took = np.array([t for t, _, _ in group.values()])
    lines = tuple(line for _, line, _ in group.values())
    newest = max((version for *_, version in group.values()), key=_order)
    return OpRows(kind, dtype, shape, took, lines, newest)
