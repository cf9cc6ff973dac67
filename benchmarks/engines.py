"""Errors of the shipped engines' stacks on measured operators: what was asked beside what is.

    KVSIM_SHARED=... python -m benchmarks.engines           # the table, fits included
    KVSIM_SHARED=... python -m benchmarks.engines --write   # and the stacks and ledger that ship
    KVSIM_SHARED=... python -m benchmarks.engines --kernels # and their kernel classes alone
    KVSIM_SHARED=... python -m benchmarks.engines --host    # host times and stacks of 2024 alone

Rows: ``ops/*.csv`` of the folder named by KVSIM_SHARED. Each row is predicted by a fit that did not
see its shape; "unseen device" by the numbers of the other cards alone.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks import engines_intervals, published_errors
from benchmarks.engines_2024 import OLD, spread, write_old
from benchmarks.engines_intervals import WITHIN_SHAPES, interval, line, requests
from benchmarks.engines_own import (
    HOST,
    OWN,
    RESERVED,
    TUNED,
    WALK,
    WALKS,
    WHOLE_RUNS,
    before,
    held_down,
    load_tests,
    quickest,
)
from benchmarks.entries import entry_of
from kvsim.evidence import ledger, loadtests, published
from kvsim.evidence.ops.fit import (
    ClassFit,
    card_text,
    class_name,
    errors_of,
    fit_table,
    predict_rows,
    stack_text,
)
from kvsim.evidence.ops.rows import OpTable, pairs, read_ops
from kvsim.evidence.predicted import predict
from kvsim.machines.hardware import Stack
from kvsim.machines.profiles import load_hardware, load_stack, with_numbers

FILES = ("gemm", "gemm_other", "decode_attention", "prefill_attention", "all_reduce", "moe",
         "mla_decode", "attention_extend", "gemm_more", "moe_more")  # fmt: skip
STATES = "linear_attention"  # rows that do not say which of them stayed in L2
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
NEAR = {
    "a100-80g": ("a100-40g", "a100-40g-pcie", "a100-80g-pcie", "a30"),
    "b200": ("gb200",),
    "h100": ("h100-pcie", "h100-nvl"),
    "h200": ("gh200",),
    "rtx-pro-6000": ("l40s", "l40", "l4", "rtx5090", "rtx6000-ada"),
}
"""Cards with rows, and those without that run the same kernels (architecture, kind of memory)."""

TWINS = {"h100": "h200", "h200": "h100"}  # near cards that both have rows
ASKED = {
    "GEMM 16-bit": (("gemm",), (5.5, 16), (12, 28)),
    "GEMM fp8": (("gemm-fp8",), (7, 21), (12, 32)),
    "decode attention, bf16 cache": (("attention",), (6, 17), (9, 30)),
    "decode attention, fp8 cache": (("attention-fp8",), (5.5, 23), (12, 37)),
    "prompt attention": (("prompt",), (7, 22), (18, 45)),
    "all-reduce, NVLink": (("sums",), (10, 35), None),
    "experts": (("experts", "experts-fp8", "experts-fp8-block"), (9, 28), (16, 45)),
    "GEMM nvfp4": (("gemm-nvfp4",), (12, 30), None),
    "experts in 4 bits": (
        ("experts-nvfp4", "experts-mxfp4", "experts-mxfp8", "experts-int4"),
        (12, 30),
        None,
    ),
    "fp8 inputs quantised (not asked)": (("quantise-input",), None, None),
    "new tokens over a cache": (("extend",), (10, 30), None),
    "states, decoding": (("recurrence",), (12, 30), None),
    "states, prompts": (("scan",), (12, 30), None),
    "MLA decode (not asked)": (("latent", "latent-fp8"), None, None),
}
Fits = dict[tuple[str, str], tuple[OpTable, list[ClassFit]]]
Numbers = dict[str, float]


EXCLUSIVE_CARDS = {"attention-fp8": frozenset({"h100", "h200"})}
"""Cards whose kernel of a class runs on no other: FlashAttention 3 over fp8 caches is Hopper's."""


def typical_numbers(cards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Compute typical numbers of a stack from those of single cards.

    Parameters
    ----------
    cards
        Numbers by key, by card.

    Returns
    -------
    dict
        For each key the median over the cards that ``collect_stated`` selects.
    """
    keys = dict.fromkeys(key for numbers in cards.values() for key in numbers)
    return {key: float(np.median(list(collect_stated(cards, key).values()))) for key in keys}


def collect_stated(cards: Mapping[str, Mapping[str, float]], key: str) -> dict[str, float]:
    """Collect what cards state of a number.

    Cards whose kernel runs on no other card count only if no other card states the number.

    Parameters
    ----------
    cards
        Numbers by key, by card.
    key
        The number.

    Returns
    -------
    dict
        Values by card.
    """
    found = {card: numbers[key] for card, numbers in cards.items() if key in numbers}
    alone = EXCLUSIVE_CARDS.get(key.split(".")[1], frozenset())
    return {card: x for card, x in found.items() if card not in alone} or found


def main() -> None:
    folder = Path(os.environ["KVSIM_SHARED"])
    if "--host" in sys.argv:
        _write_host(folder)
        return
    base = load_stack("fused")
    fits: Fits = {}
    for engine in ENGINES:
        widens = {"weights.unpack_ops": load_stack(engine).weights.unpack_ops}
        for device in NEAR:
            hardware = load_hardware(device)
            table = _read(folder, engine, device)
            fits[engine, device] = (table, fit_table(table, hardware, with_numbers(base, widens)))
            print(
                f"  {engine} on {device}: {len(fits[engine, device][1])} classes", file=sys.stderr
            )
    unseen = _unseen(fits, base)
    _print_table(fits, unseen, base)
    if "--kernels" in sys.argv:
        _write(folder, fits, unseen)
    if "--write" in sys.argv:
        _write(folder, fits, unseen)
        _write_host(folder)
        _write_intervals(folder, fits, unseen, base)


def _read(folder: Path, engine: str, device: str) -> OpTable:
    """An engine's rows on a card; where it tunes itself, the quickest kernel of each shape."""
    files = [folder / "ops" / f"{name}.csv" for name in FILES]
    table = read_ops(files, engine, load_hardware(device))
    l2 = tomllib.loads(Path(f"kvsim/hwprofiles/{device}.toml").read_text())["memory"]["l2_B"]
    states = [folder / "ops" / f"{STATES}.csv"]
    if (device, engine) in pairs(states):
        found = read_ops(states, engine, load_hardware(device), l2=l2)
        table = replace(table, rows=(*table.rows, *found.rows))
    if engine not in TUNED:
        return table
    others = [read_ops(files, e, load_hardware(device)) for e in ENGINES if e != engine]
    rows = tuple(
        quickest(r, [o for t in others for o in t.rows]) if class_name(r) in TUNED[engine] else r
        for r in table.rows
    )
    return replace(table, rows=rows)


def _unseen(fits: Fits, base: Stack) -> dict[tuple[str, str, str], np.ndarray]:
    """Predictions of each group by the stacks of the same engine on other cards. [s]"""
    found = {}
    for (engine, device), (_, classes) in fits.items():
        stack = _carried(fits, base, engine, device)
        for c in classes:
            found[engine, device, c.name] = predict_rows(c.rows, load_hardware(device), stack)
    return found


def _carried(fits: Fits, base: Stack, engine: str, device: str) -> Stack:
    """An engine's stack for a card by the numbers of the other cards."""
    others = {
        other: {k: v for c in fits[engine, other][1] for k, v in c.numbers.items()}
        for other in NEAR
        if other != device
    }
    twin = TWINS.get(device)
    numbers = others[twin] if twin else typical_numbers(others)
    widens = {"weights.unpack_ops": load_stack(engine).weights.unpack_ops}
    return with_numbers(base, widens | _sums(numbers) | numbers)


def _sums(numbers: Numbers) -> Numbers:
    told = any(key.startswith("sums.") for key in numbers)
    return {"kernel.allreduce.memory": 1.0, "kernel.allreduce.floor_s": 0.0} if told else {}


def _print_table(fits: Fits, unseen: dict[tuple[str, str, str], np.ndarray], base: Stack) -> None:
    head = ("fused", "asked", "is", "asked, unseen", "is, unseen")
    print(f"{'class':30s} {'groups':>6s} " + " ".join(f"{h:>14s}" for h in head))
    for title, (names, seen_limit, unseen_limit) in ASKED.items():
        groups: list[tuple[float, ...]] = []
        for (engine, device), (_, classes) in fits.items():
            if title.startswith("all-reduce") and device == "rtx-pro-6000":
                continue
            for c in (c for c in classes if c.name in names):
                today = predict_rows(c.rows, load_hardware(device), base)
                other = unseen[engine, device, c.name]
                off = [errors_of(c), *(np.abs(p / c.rows.took - 1) for p in (other, today))]
                groups.append(tuple(100 * np.quantile(x, q) for x in off for q in (0.5, 0.9)))
        if groups:
            m = np.median(np.array(groups), axis=0)
            cells = (
                _pair(m[4:]),
                _pair(seen_limit),
                _pair(m[:2]),
                _pair(unseen_limit),
                _pair(m[2:4]),
            )
            print(f"{title:30s} {len(groups):6d} " + " ".join(f"{c:>14s}" for c in cells))


def _pair(values: object) -> str:
    if values is None:
        return "-"
    low, high, *_ = values  # type: ignore[misc]
    return f"{low:.3g} / {high:.3g} %"


def _write(folder: Path, fits: Fits, unseen: dict[tuple[str, str, str], np.ndarray]) -> None:
    """The shipped stacks by card, their typical numbers, and the ledger's lines of operators."""
    stacks = Path("kvsim/hwprofiles/stacks")
    today = str(date.today())
    entries = []
    for engine, title in ENGINES.items():
        (stacks / engine).mkdir(exist_ok=True)
        cards: dict[str, Numbers] = {}
        versions = []
        for device in NEAR:
            table, classes = fits[engine, device]
            place = stacks / engine / f"{device}.toml"
            place.write_text(card_text(table, classes, engine, today, NEAR[device]))
            numbers = {k: v for c in classes for k, v in c.numbers.items()}
            own = WALKS.get((engine, device), {}) | WHOLE_RUNS.get((engine, device), {})
            _add(place, own | held_down(device, numbers))
            cards[device] = {k: v for c in classes for k, v in c.numbers.items() if k != WALK}
            versions.append(f"{table.version} on {device}")
            for c in classes:
                common = {"engine": engine, "version": c.rows.version, "kind": c.name,
                          "technique": "fp8" if c.name.endswith("-fp8") else "full",
                          "source": ", ".join(table.sources)}  # fmt: skip
                other = unseen[engine, device, c.name]
                seen = entry_of(
                    c.held_out, c.rows.took, tail=WITHIN_SHAPES, device=device, held_out="shape",
                    **common,
                )  # fmt: skip
                apart = entry_of(
                    other, c.rows.took, device=ledger.ANY, held_out=f"device {device}", **common
                )
                entries += [seen, apart]
        head = {
            "title": f"{title}, typical numbers of its kernels on any card",
            "basis": "carried over",
            "error": "predicted for each card from the others' numbers: see kvsim's ledger",
            "extends": "fused",
            "version": "; ".join(versions),
        }
        place = stacks / f"{engine}.toml"
        stated = {
            k: v for k, v in tomllib.loads(place.read_text()).items() if not isinstance(v, dict)
        }
        fitted = {key.split(".")[1] for key in OWN.keys() | set().union(*cards.values())}
        kept = _told_elsewhere(place, fitted)
        place.write_text(typical_text(stated | head, cards, OWN, today))
        _add(place, kept)
    for card, engine, near, also in PRODUCTS_ALONE:
        _write_products(folder, stacks / "vllm" / f"{card}.toml", engine, near, also, today)
    ledger.update(LEDGER, entries)


def _write_intervals(
    folder: Path, fits: Fits, unseen: dict[tuple[str, str, str], np.ndarray], base: Stack
) -> None:
    """Lines of the ledger for cards without rows, and how many rows their intervals hold."""
    groups: dict[str, dict[tuple[str, ...], np.ndarray]] = {}
    for (engine, device), (_, classes) in fits.items():
        for c in classes:
            others = [d for d in NEAR if d != device and c.name in _names(fits, engine, d)]
            if others:
                ratio = c.rows.took / unseen[engine, device, c.name]
                groups.setdefault(c.name, {})[engine, device] = ratio
    entries, found = requests(
        folder, ENGINES, lambda engine, device: _carried(fits, base, engine, device), before
    )
    for name, several in groups.items():
        if len({device for _, device in several}) < 3:
            continue
        found[name] = interval(several, lambda key: key[1])
        for engine in sorted({engine for engine, _ in several}):
            mine = np.concatenate([r for key, r in several.items() if key[0] == engine])
            technique = "fp8" if name.endswith("-fp8") else "full"
            entries.append(line(
                mine, found[name], engine=engine, version="", kind=name, device=ledger.ANY,
                technique=technique, held_out="device", source="aic-core-0.12.0",
            ))  # fmt: skip
    ledger.update(LEDGER, entries)
    engines_intervals.write_page(Path("docs/errors.md"), found)


def _names(fits: Fits, engine: str, device: str) -> set[str]:
    return {c.name for c in fits[engine, device][1]}


def _write_host(folder: Path) -> None:
    """What load tests tell beside the kernels: the engines' host times, and the stacks of 2024."""
    stacks = Path("kvsim/hwprofiles/stacks")
    today = str(date.today())
    entries = []
    for engine in ENGINES:
        _add(stacks / f"{engine}.toml", RESERVED.get(engine, {}))
        _add(stacks / f"{engine}.toml", _host_times(folder, engine, today))
    pairs = [(row, predict(row)) for p in published.papers() for row in published.read(p)]
    entries += published_errors.entries(pairs)
    engines_intervals.write_refitted(
        Path("docs/errors.md"), published_errors.refitted(row for row, _ in pairs)
    )
    held, plain = published_errors.coverage(pairs)
    print(
        f"papers' tables: intervals hold {100 * held:.0f} % of rows left out, "
        f"tenth and ninetieth percentiles {100 * plain:.0f} %"
    )
    for name, engine in OLD.items():
        entries.append(write_old(folder, name, engine, stacks / f"{name}.toml", today))
    ledger.update(LEDGER, entries)


def _told_elsewhere(place: Path, fitted: Collection[str]) -> dict[str, tuple[float | bool, str]]:
    """What a stack's file says besides sums and classes that are fitted to rows of operators."""
    document = tomllib.loads(place.read_text())
    tables = {
        **{k: v for k, v in document.items() if isinstance(v, dict)},
        **{f"kernel.{k}": v for k, v in document["kernel"].items() if k not in fitted},
    }
    return {
        f"{table}.{key}": (value, document["source"].get(f"{table}.{key}", ""))
        for table, entries in tables.items()
        if table not in ("kernel", "sums", "source")
        for key, value in entries.items()
    }


def _add(place: Path, own: Mapping[str, tuple[float | bool, str]]) -> None:
    """Put numbers into a stack's file."""
    document = tomllib.loads(place.read_text())
    sources = document.pop("source")
    head = {k: v for k, v in document.items() if not isinstance(v, dict)}
    numbers = {}
    for folder, entries in document.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            numbers |= {".".join(filter(None, (folder, key, last))): x for last, x in inner}
    numbers |= {key: value for key, (value, _) in own.items()}
    sources |= {key: text for key, (_, text) in own.items() if text}
    flags = {key: value for key, value in numbers.items() if isinstance(value, bool)}
    numbers = {key: value for key, value in numbers.items() if key not in flags}
    place.write_text(stack_text(head, numbers, sources, flags))


LEDGER = Path("kvsim/evidence/ledger.csv")


def _host_times(folder: Path, engine: str, today: str) -> dict[str, tuple[float, str]]:
    """Host times of an engine by its load tests; their error held out by model is printed."""
    rows = load_tests(folder, engine)
    stack = before(engine)
    fit = loadtests.fit_host(rows, stack)
    measured = np.array([r.latency for r in rows])
    unseen = loadtests.predict_held_out(rows, stack)
    devices = ", ".join(sorted({r.device for r in rows}))
    said = f"fitted on {today} to {len(rows)} load tests on {devices} (aic-core-0.12.0)"
    by_gpus = {
        t: round(float(np.median((unseen / measured)[[r.tp == t for r in rows]])), 3)
        for t in sorted({r.tp for r in rows})
    }
    held_out = "model" if len({r.model for r in rows}) > 1 else "lengths"
    off = np.abs(unseen / measured - 1)
    seen = np.abs(loadtests.predict_latencies(rows, loadtests.replace_numbers(
        stack, fit.values, {r.device for r in rows})) / measured - 1)  # fmt: skip
    print(
        f"request latency, {engine}: {len(rows)} load tests, fitted {spread(seen)}, "
        f"held out by {held_out} {spread(off)}, "
        f"predicted over measured by GPUs {by_gpus}; {fit.values}"
    )
    own = {k: said for k, (_, said) in HOST.get(engine, {}).items()}
    return {
        k: (v, f"{said}: {v:.3g} +- {fit.errors[k]:.2g}" if np.isfinite(fit.errors[k])
            else own.get(k, f"not told by {len(rows)} load tests on {devices}, and left out"))
        for k, v in fit.values.items()
    }  # fmt: skip


PRODUCTS_ALONE = (
    ("rtx4090", "vllm", "vllm@rtx-pro-6000", ()),
    ("a40", "vllm-vidur", "vllm", ("a10", "a10g", "a6000", "rtx3090")),
)
"""Cards of which products alone were measured: rows of which engine, the stack that has everything
else, and cards that run the same kernels."""


def _write_products(
    folder: Path, place: Path, engine: str, base: str, near: tuple[str, ...], today: str
) -> None:
    """A card's own products; everything else from the stack below."""
    hardware, below = load_hardware(place.stem), load_stack(base)
    table = read_ops([folder / "ops" / "gemm_other.csv"], engine, hardware)
    place.write_text(card_text(table, fit_table(table, hardware, below), base, today, near))
    _add(place, WALKS.get((place.parent.name, place.stem), {}))


def typical_text(
    head: Mapping[str, object],
    cards: Mapping[str, Mapping[str, float]],
    own: Mapping[str, tuple[float, str]],
    today: str,
) -> str:
    """TOML of an engine's typical numbers: the medians over the cards that state them.

    Parameters
    ----------
    cards : fitted numbers by card.
    own : further numbers with their sources.
    """
    numbers: dict[str, float] = {key: value for key, (value, _) in own.items()}
    sources = {key: text for key, (_, text) in own.items()}
    for key, value in typical_numbers(cards).items():
        seen = ", ".join(f"{c} {x:.3g}" for c, x in collect_stated(cards, key).items())
        numbers[key] = value
        sources[key] = f"median of cards fitted on {today}: {seen}"
    return stack_text(head, numbers, sources)


if __name__ == "__main__":
    main()
