"""Numbers of a stack fitted to measured operators, kernel class by kernel class."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast
from zlib import crc32

import numpy as np

from kvsim.engine import attention, ops, recurrence
from kvsim.engine.formats import Format
from kvsim.engine.ops import all_reduce
from kvsim.engine.roofline import seconds
from kvsim.evidence.leastsquares import Fit, Parameter, fit_ratio, robust_loss
from kvsim.evidence.ops.rows import STATES, OpRows, OpTable
from kvsim.evidence.stackfile import numbers_text
from kvsim.frozen import frozen
from kvsim.graph import Array, Op, Point
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.machines.parallel import busiest
from kvsim.machines.profiles import with_numbers
from kvsim.models.kinds import Recurrence
from kvsim.models.model import LayerShape, Model

ROUTED_SKEW = 0.2
"""Tokens of the GPU with most over the average, more per doubling of the GPUs, in measured kernels:
experts of four engines' versions on five cards, whose routing follows a power law with exponent
1.01, are off by 16 % at the median with it and by 19 % with 1.2 whatever the GPUs (aic-core-0.12.0,
1,060 rows)."""

ROUTED_POPULARITY = 30.0
"""How much oftener the most popular expert is chosen than the least in those rows: 5,047 of them on
an H100 and a B200 are off by 8.9 % at the median with 1, 8.2 with 10, 8.0 with 30 and with 100, 8.2
with 300."""

SORTED_OUT = 0.5
"""Share of a copy's traffic where it is for another GPU's expert: 0.3 to 0.7 fit rows of experts
spread over GPUs alike (aic-core-0.12.0)."""

STORED_FORMATS = {"mxfp8": "mxfp4"}  # formats of rows that say more than how weights are stored
CACHE_FORMATS = {"fp16": Format(), "fp8": Format(8)}


@frozen
class RowModel(Model):
    """A model whose sizes are arrays over the rows of a table, and those of one GPU already."""

    def shard(self, tp: int) -> Model:
        """Return the model itself.

        Parameters
        ----------
        tp
            GPUs that share a layer. [GPUs]
        """
        return self


ONE_LAYER = RowModel("", "", 1, 1, 1, 128, 0, 0, 0, ())
LATENT: dict[str, Any] = {"kv_rank": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}
"""Latent attention of DeepSeek-V2 and V3; queries are up-projected without positions."""


def _deployment(
    hardware: Hardware, stack: Stack, weights: str = "fp16", tp: int = 1, **sizes: Any
) -> Deployment:
    """Where rows of some sizes were measured; formulas take arrays in place of numbers."""
    return Deployment(replace(ONE_LAYER, **sizes), hardware, stack, weights, tp)


def _gemm(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    d, s = _deployment(hardware, stack, rows.dtype), rows.shape
    matrix = cast(tuple[int, int], (s["k"], s["n"]))
    return _seconds(ops.gemm(d, "product", s["m"], matrix, d.weight_format), d)


def _decode(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    s = rows.shape
    sizes = LATENT if rows.kind == "mla_decode" else {n: s[n] for n in ("kv_heads", "head_dim")}
    d = _deployment(hardware, stack, heads=s["heads"], **sizes)
    p = Point(s["batch"], s["context"], 1.0, s["context"], s["context"] + 1)
    found = attention.ops(d, p, LayerShape(), stored=CACHE_FORMATS[rows.dtype])
    return _seconds(next(op for op in found if op.name == "attn"), d)


def _prompt(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    """A part of a prompt, and sequences that decode in the same call."""
    s = rows.shape
    sizes: dict[str, Any] = {name: s[name] for name in ("heads", "kv_heads", "head_dim")}
    d = _deployment(hardware, stack, **sizes)
    length = s["context"] + s["new"]
    p = Point(s["batch"], s["context"], s["new"], length, length, prefill=True)
    took = _seconds(attention.ops(d, p, LayerShape())[-1], d)
    if "decodes" not in s:
        return took
    after = s["decode_context"]
    decoding = Point(s["decodes"], after, 1.0, after, after + 1.0, beside=True)
    found = attention.ops(d, decoding, LayerShape())[-1]
    return took + np.where(s["decodes"] > 0, _seconds(found, d), 0.0)


def _experts(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    """Experts of the GPU with most tokens of a group over which they are spread."""
    s = rows.shape
    spread = s["ep"] / busiest(s["ep"], ROUTED_SKEW)
    stack = with_numbers(
        stack, {"sums.popularity": ROUTED_POPULARITY, "sums.sorted_out": SORTED_OUT}
    )
    d = _deployment(
        hardware,
        stack,
        STORED_FORMATS.get(rows.dtype, rows.dtype),
        hidden=s["hidden"],
        expert_ffn=s["expert_ffn"] / s["tp"],
        experts=s["experts"] / s["ep"],
        experts_active=s["active"] / spread,
    )
    p = Point(s["tokens"], 0.0, 1.0, 1.0, 1.0)
    total: Array = np.zeros(len(rows))
    for op in ops.routed_experts(d, p, foreign=s["tokens"] * s["active"] * (1 - 1 / s["ep"])):
        total = total + _seconds(op, d)
    return total


def _sums(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    out = np.empty(len(rows))
    for gpus in np.unique(rows.shape["gpus"]):
        here = rows.shape["gpus"] == gpus
        d = _deployment(hardware, stack, tp=int(gpus), hidden=rows.shape["elements"][here])
        out[here] = _seconds(all_reduce(d, "sum", ops.FP16_BYTES * d.shard.hidden)[0], d)
    return out


def _quantising(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    d, s = _deployment(hardware, stack, "fp8-dynamic"), rows.shape
    return np.asarray(
        ops.quantising(d, WEIGHT_FORMATS["fp8-dynamic"], s["m"] * s["k"]), dtype=float
    )


def _states(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    """One kernel of a gated delta net's layer."""
    s = rows.shape
    # Recurrence is of one model; its formulas take arrays as well
    widths = cast("tuple[int, int, int, int]", tuple(s[n] for n in HEADS_AND_WIDTHS))
    d = _deployment(hardware, stack, recurrence=Recurrence("delta", *widths, 0))
    p = Point(s["batch"], 0.0, s["new"], s["new"], s["new"], prefill=rows.kind == "scan")
    return _seconds(next(op for op in recurrence.ops(d, p) if op.kernel == rows.kind), d)


HEADS_AND_WIDTHS = ("v_heads", "v_dim", "k_dim", "k_heads")
PREDICTED: Mapping[str, Callable[[OpRows, Hardware, Stack], Array]] = {
    "gemm": _gemm,
    "quantise_input": _quantising,
    "decode_attention": _decode,
    "mla_decode": _decode,
    "prefill_attention": _prompt,
    "extend_attention": _prompt,
    "moe": _experts,
    "all_reduce": _sums,
    "recurrence": _states,
    "scan": _states,
}
"""What each kind of op takes, element by element. [s]"""


def predict_rows(rows: OpRows, hardware: Hardware, stack: Stack) -> Array:
    """Predict the time of measured operators.

    Parameters
    ----------
    rows
        Rows of one kind of op.
    hardware
        The card.
    stack
        The engine's stack.

    Returns
    -------
    array
        One time per row. [s]
    """
    return PREDICTED[rows.kind](rows, hardware, stack)


def _seconds(op: Op, deployment: Deployment) -> Array:
    return np.asarray(seconds(op, deployment), dtype=float)


MIN_CLASS_ROWS = 25  # rows of a class; fewer cannot be fitted and held out
FOLDS = 4  # parts that are held out one after another to learn a class's error
START_SCALES = (
    1.0,
    0.3,
    3.0,
)  # times the first guess, for sums between GPUs: three ways, three minima

# lowest, highest and first guess of the numbers that a class frees
SHARE_PARAMETERS = {"memory": (0.05, 1.0, 0.8), "compute": (0.02, 1.0, 0.6)}
FLOOR = {"floor_s": (0.0, 60e-6, 5e-6)}
PRODUCT_PARAMETERS = SHARE_PARAMETERS | FLOOR
PRODUCT_PARAMETERS |= {"half_size": (0.0, 1000.0, 30.0), "half_columns": (0.0, 20_000.0, 200.0)}
PRODUCT_PARAMETERS |= {"added": (0.0, 1.0, 0.1), "input_passes": (1.0, 60.0, 3.0)}
BLOCKS_WALK = {"walk_s": (0.0, 20e-9, 1e-9)}
HEAD_PARAMETERS = {"narrow": (0.5, 4.0, 1.05), "wide": (0.5, 4.0, 1.05)}
DECODE_PARAMETERS = {"memory": SHARE_PARAMETERS["memory"]} | FLOOR | HEAD_PARAMETERS
DECODE_PARAMETERS |= {"padding": (0.0, 1000.0, 30.0), "split_s": (0.0, 60e-6, 5e-6)}
DECODE_PARAMETERS |= {"ungrouped": (0.5, 4.0, 1.05)}
WIDENING = {"unpack_ops": (0.0, 40.0, 8.0)}
PROMPT_PARAMETERS = SHARE_PARAMETERS | FLOOR | HEAD_PARAMETERS
PROMPT_PARAMETERS |= {"half_size": (0.0, 5000.0, 100.0), "half_columns": (0.0, 200_000.0, 10_000.0)}
EXTEND_PARAMETERS = PROMPT_PARAMETERS | {
    "walk_s": (0.0, 1e-6, 25e-9),
    "half_columns": (0.0, 200_000.0, 300.0),
}
EXPERT_PARAMETERS = SHARE_PARAMETERS | {
    "floor_s": (0.0, 300e-6, 10e-6),
    "half_size": (0.0, 2000.0, 30.0),
    "traffic": (0.0, 100.0, 5.0),
    "half_columns": (0.0, 5000.0, 50.0),
    "expert_s": (0.0, 2e-6, 50e-9),
}
LATENT_PARAMETERS = SHARE_PARAMETERS | FLOOR | {"half_columns": (0.0, 1000.0, 30.0)}
LATENT_PARAMETERS |= {"split_s": (0.0, 60e-6, 5e-6), "padding": (0.0, 1000.0, 30.0)}
LATENT_PARAMETERS |= {"added": (0.0, 1.0, 0.1)}
SUM_PARAMETERS = {
    "direct_share": (0.003, 1.0, 0.3),
    "direct_s": (0.0, 60e-6, 4e-6),
    "direct_hop_s": (0.0, 20e-6, 0.5e-6),
    "direct_second_s": (0.0, 60e-6, 2e-6),
    "ring_s": (0.0, 200e-6, 15e-6),
    "ring_hop_s": (0.0, 50e-6, 1e-6),
    "ring_share": (0.01, 1.0, 0.75),
}
STATE_PARAMETERS = {"memory": SHARE_PARAMETERS["memory"]} | FLOOR
SCAN_PARAMETERS = SHARE_PARAMETERS | {
    "floor_s": (0.0, 300e-6, 20e-6),
    "half_columns": (0.0, 200_000.0, 1000.0),
    "input_passes": (0.0, 3.0, 1.0),
    "walk_s": (0.0, 1e-6, 20e-9),
}
FIXED = {"prompt": {"added": 1.0}, "attention-fp8": {"added": 0.3}}
"""Numbers that a class sets without fitting: the memory time of a prompt adds to its arithmetic; a
third of the time to load an fp8 cache adds to that of widening it, as H100 and H200 tell, which
differ in memory alone."""
LOADS_LIKE = {"attention-fp8": "attention"}
"""Classes that load as another one does: what they take beside is time to widen their numbers."""
AFTER = {"extend_attention": "prompt"}
"""Kinds whose rows tell one more number of another class, and follow it."""
TILES = (0.0, 64.0, 128.0, 256.0)
"""Tiles of fp8 products that are tried. 16-bit products gain nothing from one."""
WHY = {
    "added": "set, not fitted",
    "memory": "that of the same kernel over a 16-bit cache",
    "tile_rows": "the best of 0, 64, 128 and 256",
}


@frozen
class ClassFit:
    """The numbers of one kernel class, fitted to measured operators.

    Attributes
    ----------
    name
        Kernel class; "sums" for all-reduces between GPUs.
    rows
        The measured operators.
    fit
        The fitted numbers with their errors.
    fixed
        Numbers that were set without fitting, by key of the stack file.
    held_out
        Predicted time of each operator by a fit without operators of its shape; NaN if nothing was
        held out. (n,) [s]
    """

    name: str  # kernel class, or "sums"
    rows: OpRows
    fit: Fit
    fixed: Mapping[str, float]
    held_out: Array

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers of the class by their keys in a stack file."""
        return dict(self.fixed) | self.fit.values


def class_name(rows: OpRows) -> str:
    """Name the kernel class that rows belong to.

    Parameters
    ----------
    rows
        Rows of one kind of op in one number format.

    Returns
    -------
    str
        The class; formats other than 16 bits are part of its name.
    """
    if rows.kind == "quantise_input":
        return "quantise-input"
    apart = "" if rows.dtype == "fp16" else f"-{rows.dtype}"
    names = {"moe": "experts", "decode_attention": "attention", "mla_decode": "latent"}
    names |= {"prefill_attention": "prompt", "extend_attention": "extend", "all_reduce": "sums"}
    return names.get(rows.kind, rows.kind) + apart


def fit_table(
    table: OpTable, hardware: Hardware, base: Stack, count: int = FOLDS
) -> list[ClassFit]:
    """Fit every kernel class of a table that has rows enough.

    Parameters
    ----------
    table
        Measured operators of one engine on one card.
    hardware
        The card.
    base
        The stack to start from.
    count
        Parts of the shapes that are held out in turn; 0 to hold out nothing.

    Returns
    -------
    list of ClassFit
        One fit per class.
    """
    base = replace(base, cards={})  # a card's own stack would stand in for what is fitted
    found: dict[str, ClassFit] = {}
    for rows in sorted(table.rows, key=lambda r: r.kind in AFTER):  # 16-bit formats come first
        if len(rows) < MIN_CLASS_ROWS or (
            rows.kind == "prefill_attention" and rows.dtype != "fp16"
        ):
            continue
        name = class_name(rows)
        wide = found.get(LOADS_LIKE.get(name, ""))
        given = {} if wide is None else {"memory": wide.numbers[f"kernel.{wide.name}.memory"]}
        below = found.get(AFTER.get(rows.kind, ""))
        found[name] = fit_class(rows, hardware, base, count, given, below)
    return list(found.values())


def fit_class(
    rows: OpRows,
    hardware: Hardware,
    base: Stack,
    count: int = FOLDS,
    given: Mapping[str, float] | None = None,
    below: ClassFit | None = None,
) -> ClassFit:
    """Fit one kernel class, and predict each row by a fit without its shape.

    Parameters
    ----------
    rows
        Rows of the class.
    hardware
        The card.
    base
        The stack to start from.
    count
        Parts of the shapes that are held out in turn; 0 to hold out nothing.
    given
        Numbers of the class that are known from elsewhere.
    below
        The fit of other rows of the same kernel, which keeps its numbers.

    Returns
    -------
    ClassFit
        The numbers, and the held-out predictions.
    """
    name = class_name(rows)
    own = AFTER.get(rows.kind, name)
    prefix = "sums." if name == "sums" else f"kernel.{own}."
    fixed = {prefix + key: value for key, value in (FIXED.get(own, {}) | dict(given or {})).items()}
    if name.startswith(("gemm-fp8", "gemm-nvfp4")):
        fixed[prefix + "tile_rows"] = _tile(rows, hardware, base, prefix)
    known = below.numbers if below else _neutral(own)
    stack = with_numbers(base, known | fixed)
    kept = {*fixed, *(below.numbers if below else ())}
    whole = _fitted(rows, hardware, stack, prefix, kept)
    parts = assign_folds(rows, count)
    unseen = np.full(len(rows), np.nan)
    for part in np.unique(parts) if count else ():
        out = parts == part
        apart = _fitted(rows.select(~out), hardware, stack, prefix, kept, whole.values)
        unseen[out] = predict_rows(rows.select(out), hardware, with_numbers(stack, apart.values))
    return ClassFit(name, rows, whole, fixed, unseen)


def _tile(rows: OpRows, hardware: Hardware, base: Stack, prefix: str) -> float:
    """The tile with which a product's rows fit best. [rows]"""

    def loss(tile: float) -> float:
        neutral = _neutral(prefix.split(".")[1]) | {f"{prefix}tile_rows": tile}
        return robust_loss(_fitted(rows, hardware, with_numbers(base, neutral), prefix))

    return min(TILES, key=loss)


def _neutral(name: str) -> dict[str, float]:
    """What a class starts from: nothing that the stack below learnt from elsewhere."""
    if name == "sums":
        return {"kernel.allreduce.memory": 1.0, "kernel.allreduce.floor_s": 0.0}
    start = {"half_size": 0.0, "floor_s": 0.0, "memory": 1.0, "compute": 1.0}
    return {f"kernel.{name}.{key}": value for key, value in start.items()}


def assign_folds(rows: OpRows, count: int = FOLDS) -> Array:
    """Assign each row to the part in which it is held out.

    Rows of one weight matrix are held out together.

    Parameters
    ----------
    rows
        Rows of one kind of op.
    count
        Number of parts.

    Returns
    -------
    array
        Part of each row, from 0.
    """
    kept = {"gemm": ("n", "k"), "moe": ("hidden", "expert_ffn", "tp", "active", "experts")}
    names = STATES if "v_heads" in rows.shape else kept.get(rows.kind, tuple(rows.shape))
    parts = _hashed([rows.shape[name] for name in names], count)
    one = np.ptp(parts) == 0  # a single matrix: by its tokens
    return _hashed(list(rows.shape.values()), count) if one else parts


def _hashed(columns: Sequence[Array], count: int) -> Array:
    keys = zip(*columns, strict=True)
    return np.array([crc32(repr(tuple(map(float, k))).encode()) % max(count, 1) for k in keys])


def _fitted(
    rows: OpRows,
    hardware: Hardware,
    stack: Stack,
    prefix: str,
    fixed: Collection[str] = (),
    near: Mapping[str, float] | None = None,
) -> Fit:
    """The numbers of a class that bring its rows closest.

    Parameters
    ----------
    near : where to begin: numbers of a fit to these rows and others.
    """

    def predict(numbers: dict[str, float]) -> Array:
        return predict_rows(rows, hardware, with_numbers(stack, numbers))

    best: Fit | None = None
    for times in START_SCALES if prefix == "sums." and near is None else START_SCALES[:1]:
        parameters = _parameters(rows, prefix, times, fixed, near or {})
        found = fit_ratio(predict, rows.took, parameters, robust=True)
        if best is None or robust_loss(found) < robust_loss(best):
            best = found
    assert best is not None
    return best


def _parameters(
    rows: OpRows, prefix: str, times: float, fixed: Collection[str], near: Mapping[str, float]
) -> Sequence[Parameter]:
    """Numbers to fit: those that the rows can tell and that are not set."""
    ranges = {
        "gemm": PRODUCT_PARAMETERS,
        "decode_attention": DECODE_PARAMETERS,
        "prefill_attention": PROMPT_PARAMETERS,
        "extend_attention": EXTEND_PARAMETERS,
        "moe": EXPERT_PARAMETERS,
        "mla_decode": LATENT_PARAMETERS,
        "all_reduce": SUM_PARAMETERS,
        "quantise_input": STATE_PARAMETERS,
        "recurrence": STATE_PARAMETERS,
        "scan": SCAN_PARAMETERS,
    }[rows.kind]
    if rows.kind == "gemm" and rows.dtype == "nvfp4":
        ranges = ranges | BLOCKS_WALK
    dims = rows.shape.get("head_dim", np.zeros(1))
    left_out = {"narrow"} - ({"narrow"} if (dims < 128).any() else set())
    left_out |= {"wide"} - ({"wide"} if (dims > 128).any() else set())
    if rows.kind == "decode_attention" and f"{prefix}memory" in fixed:
        ranges = ranges | WIDENING
    if "kv_heads" in rows.shape and not (rows.shape["heads"] == rows.shape["kv_heads"]).any():
        left_out.add("ungrouped")
    return [
        Parameter(
            prefix + key, near.get(prefix + key, min(high, max(low, start * times))), low, high
        )
        for key, (low, high, start) in ranges.items()
        if key not in left_out and prefix + key not in fixed
    ]


def errors_of(found: ClassFit) -> Array:
    """Compute the errors of a class's rows, each by a fit that did not see its shape.

    Parameters
    ----------
    found
        A fitted class.

    Returns
    -------
    array
        Absolute relative error of each row.
    """
    return np.abs(found.held_out / found.rows.took - 1)


def card_text(
    table: OpTable, fits: Sequence[ClassFit], base: str, today: str, near: Sequence[str] = ()
) -> str:
    """Format the stack of one card as a TOML file.

    Parameters
    ----------
    table
        The measured operators.
    fits
        The kernel classes fitted to them.
    base
        Name of the stack that the file extends.
    today
        Date of the fit.
    near
        Cards without measurements for which these numbers are used.

    Returns
    -------
    str
        Text of the file.
    """
    numbers: dict[str, float] = {}
    sources: dict[str, str] = {}
    name = f"{table.engine} {table.version}".strip()
    for found in fits:
        version = found.rows.version or table.version
        rows = f"{len(found.rows)} rows of {table.engine} {version} on {table.device}"
        where = f"{rows} ({', '.join(table.sources)}), {today}"
        for key, value in found.fit.values.items():
            numbers[key] = value
            known = found.fit.errors[key]
            unknown = "; not determined by these rows" if key in found.fit.unknown else ""
            sources[key] = f"fitted to {where}: {value:.4g} +- {known:.2g}{unknown}"
        for key, value in found.fixed.items():
            numbers[key] = value
            sources[key] = f"{WHY[key.rpartition('.')[2]]}, with {where}"
    worst = ", ".join(
        f"{f.name} {100 * np.median(errors_of(f)):.2g} / {100 * np.quantile(errors_of(f), 0.9):.2g}"
        for f in fits
    )
    left = ", ".join(f"{count} {reason}" for reason, count in table.rejected.items())
    head: dict[str, object] = {
        "title": f"{name} on {table.device}, fitted to measured operators",
        "basis": "calibrated",
        "error": f"held-out kernel error, median / 90th percentile in %: {worst}",
        "extends": base,
        **({"version": table.version} if table.version else {}),
        "device": table.device,
        "date": today,
        "fit": f"{sum(len(f.rows) for f in fits)} measured operators; left out: {left or 'none'}",
    }
    if near:
        head["near"] = list(near)
    return stack_text(head, numbers, sources)


ZERO_BELOW = 1e-12  # a fitted number below this stands at its bound of 0


def stack_text(
    head: Mapping[str, object],
    numbers: Mapping[str, float],
    sources: Mapping[str, str],
    flags: Mapping[str, bool] = MappingProxyType({}),
) -> str:
    """Format a stack of fitted operators as a TOML file.

    Parameters
    ----------
    head
        Entries of the file before its first table.
    numbers
        Values by dotted key; those at their bound of 0 are written as 0.
    sources
        Where each number comes from, by the same keys.
    flags
        Switches by dotted key.

    Returns
    -------
    str
        Text of the file.
    """
    grounded = {key: value if value > ZERO_BELOW else 0.0 for key, value in numbers.items()}
    return numbers_text(head, grounded, sources, 5, flags)
