"""The page of ``make.py gpu``: what was measured while a GPU was there, and what is left."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.report.answer import Answer, verdict
from kvsim.report.result import Result
from kvsim.report.table import Table, cells_table
from kvsim.report.units import DASH, rounded
from kvsim.validate.session.report import shares
from kvsim.validate.session.run import SessionState, Unit

COMPILED = re.compile(r"(sm_\d+) (.+): (\d+) B shared, (\d+) registers, (\d+) B spilt, (\d+) ")
RATES = {"flops_per_s": ("products in 16 bits", 1e12, "TFLOP/s")}
RATE_TITLES = {"hbm": "memory", "h2d": "copies to the device", "d2h": "copies to the host"}
TIME_KEYS = ("ttft_s", "tpot_s")

Found = Mapping[str, Mapping[str, Any]]
"""Results of the units that are done, by name."""


def make_result(
    state: SessionState, units: Sequence[Unit], command: str = ""
) -> Result[SessionState]:
    """Make the page of what there is so far."""
    found = {u.name: result for u in units if (result := state.read(u.name)) is not None}
    facts = found.get("facts", {})
    device = str(facts.get("device", state.folder.name))
    tables = [_units(units, found, state), _ceilings(found), _shares(shares(state)), _times(found)]
    details = [_rates(found), _cases(found), _compiled(found)]
    return Result(
        command,
        f"{device}: what a session measured",
        _answer(device, units, found),
        {},
        state,
        tables=[table for table in tables if table.rows],
        details=[table for table in details if table.rows],
        remarks=[*facts.get("suspicions", ()), *_software(facts)],
    )


def _answer(device: str, units: Sequence[Unit], found: Found) -> Answer:
    left = [_called(unit.name) for unit in units if unit.name not in found]
    failed = [_called(name) for name, result in found.items() if _passed(name, result) is False]
    missed = f"Not passed: {_listed(failed)}." if failed else "Nothing that was checked failed."
    points = sum(name.startswith("point") for name in found)
    many = f"{len(left)} units are left" if len(left) > 1 else "one unit is left"
    changes = [f"Run the command again to go on: {many} ({_listed(left)})."] if left else []
    return Answer(
        verdict(
            [f"{len(found)} of {len(units)} units are done on {device}.", missed if found else ""],
            [f"Timed points beside their predictions: {points}." if points else ""],
        ),
        figures={"units": len(units), "done": len(found), "failed": len(failed)},
        changes=changes,
    )


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _passed(name: str, result: Mapping[str, Any]) -> bool | None:
    """Whether a unit's checks hold; none where it has none."""
    if name.startswith("counts"):
        return all(bool(one["passed"]) for one in result.get("techniques", ()))
    passed = result.get("passed")
    return None if passed is None else bool(passed)


def _units(units: Sequence[Unit], found: Found, state: SessionState) -> Table:
    """Every unit: whether it is done, and how its checks went."""
    notes = state.notes()
    rows = []
    for unit in units:
        result = found.get(unit.name)
        if result is None:
            said = str(notes.get(unit.name, {}).get("error", ""))
            tried = "failed" if said else "left"
            told = said or f"takes about {rounded(unit.seconds, 2)} s"
            rows.append([_called(unit.name), tried, told])
            continue
        passed = _passed(unit.name, result)
        state_of = {None: "done", True: "passed", False: "failed"}[passed]
        rows.append([_called(unit.name), state_of, _summarize_step(unit.name, result)])
    return cells_table(("unit", "state", "what it found"), rows, 3, "", "Units")


def _called(name: str) -> str:
    """A unit as people call it."""
    kind, *more = name.split()
    if kind == "counts":
        return f"tokens and counts, {_model(*more)}"
    if kind == "point":
        _, model, layers, batch, prompt = more
        return f"times, {_model(model, layers)}, {batch} x {int(prompt):,}"
    if kind == "kernels":
        return "copies that are late" if more[0] == "lanes" else f"kernel {more[0]} and its twin"
    return name


def _model(name: str, layers: str) -> str:
    return f"{name} cut to {layers} layers" if layers != "0" else name


def _summarize_step(name: str, result: Mapping[str, Any]) -> str:
    kind = name.split()[0]
    if kind == "counts":
        passed = [bool(one["passed"]) for one in result.get("techniques", ())]
        return f"{sum(passed)} of {len(passed)} techniques as stated"
    if kind == "kernels":
        cases = result["cases"]
        return f"{sum(bool(case['passed']) for case in cases)} of {len(cases)} cases agree"
    if kind == "rates":
        return f"{len(result.get('kernels', ()))} cases"
    if kind == "compile":
        return f"{len(result['lines'])} programs"
    if kind == "point":
        left = f", {len(result['left'])} could not run" if result["left"] else ""
        return f"{len(result['found'])} techniques timed{left}"
    return str(result.get("said", ""))


def _ceilings(found: Found) -> Table:
    rows = []
    for key, value in found.get("ceilings", {}).items():
        name, scale, unit = RATES.get(key) or (RATE_TITLES[key.partition("_")[0]], 1e9, "GB/s")
        rows.append([name, f"{rounded(value / scale, 3)} {unit}"])
    return cells_table(("best rate of", "measured"), rows, 1, "", "Ceilings")


def _shares(kernels: Mapping[str, Mapping[str, float]]) -> Table:
    """What every kernel reached of the machine's peaks at its best."""
    rows = [
        [name, f"{one['samples']:,.0f}", *(_percent(one.get(key, 0.0)) for key in CEILING_KEYS)]
        for name, one in kernels.items()
    ]
    heads = ("benchmark and kernel", "samples", "of bandwidth", "of arithmetic")
    return cells_table(heads, rows, 1, "", "Best shares of the measured peaks")


CEILING_KEYS = ("bandwidth", "arithmetic")


def _rates(found: Found) -> Table:
    """Of every kernel's largest case the time, and shares of memory's rate and of issue."""
    rows = []
    for one in found.get("rates", {}).get("kernels", ()):
        each = one["instructions_per_byte"]
        shares = (one["share_of_bandwidth"], one["share_of_issue"])
        rows.append(
            [
                one["kernel"],
                _case({k: v for k, v in one["case"].items() if k not in ("way", "bits")}),
                rounded(1e6 * one["seconds"], 3),
                *(DASH if share is None else _percent(share) for share in shares),
                DASH if each is None else rounded(each, 3),
            ]
        )
    heads = ("kernel", "case", "us", "of bandwidth", "of issue", "instructions per byte")
    return cells_table(heads, rows, 2, "", "What kernels reach at their largest")


def _times(found: Found) -> Table:
    """Times to the first token and per token, measured beside predicted."""
    rows = []
    for name, point in found.items():
        if not name.startswith("point"):
            continue
        where = f"{point['model']}, {point['batch']:,} x {point['prompt']:,}"
        for one in point["found"]:
            by_name = {m["name"]: m for m in one["measured"]}
            if not set(TIME_KEYS) <= set(by_name):
                continue
            graphs = str(one.get("rounds", "")) == "replayed"
            cells = [one["technique"], where, "graph" if graphs else "eager"]
            for key in TIME_KEYS:
                m = by_name[key]
                error = m["predicted"] / m["measured"] - 1
                cells += [rounded(1e3 * m["measured"], 3), f"{100 * error:+.1f}"]
            rows.append(cells)
    heads = (
        "technique", "model, batch x prompt", "rounds", "TTFT ms", "predicted %", "TPOT ms",
        "predicted %",
    )  # fmt: skip
    return cells_table(heads, rows, 3, "", "Times, and how far predictions are off")


def _cases(found: Found) -> Table:
    """Kernels against their plain twins, the worst case of each."""
    rows = []
    for name, result in found.items():
        for case in result.get("cases", ()) if name.startswith("kernels") else ():
            what = {k: v for k, v in case.items() if k not in ("off", "passed")}
            kept = "yes" if case["passed"] else "no"
            rows.append([name.partition(" ")[2], _case(what), kept, f"{case['off']:.1e}"])
    return cells_table(
        ("kernel", "case", "agrees", "off by"), rows, 3, "", "Kernels and their twins"
    )


def _case(sizes: Mapping[str, Any]) -> str:
    """Sizes of a kernel's case in words."""
    return ", ".join(f"{k.replace('kv_', 'KV ').replace('_', ' ')} {v}" for k, v in sizes.items())


def _compiled(found: Found) -> Table:
    """Programs as they were compiled for this card."""
    rows = []
    for line in found.get("compile", {}).get("lines", ()):
        if match := COMPILED.match(line):
            card, what, shared, registers, spilt, instructions = match.groups()
            rows.append([what, card, shared, registers, spilt, instructions])
    heads = ("program", "card", "shared B", "registers", "spilt B", "instructions")
    return cells_table(heads, rows, 2, "", "Programs as they are launched")


def _software(facts: Mapping[str, Any]) -> list[str]:
    if not facts:
        return []
    known = {**facts.get("facts", {})}
    said = [f"{key} {value}" for key, value in known.items()]
    versions = [
        f"{key} {facts[key]}" for key in ("torch", "cuda", "triton", "host") if key in facts
    ]
    return [", ".join([*said, *versions])]


def _percent(share: float) -> str:
    return f"{rounded(100 * share, 2)} %" if share else DASH
