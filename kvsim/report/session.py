"""The page of ``make.py gpu``: what was measured on a GPU so far, and what remains."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import numpy as np

from kvsim.report.answer import Answer, verdict
from kvsim.report.json import Row
from kvsim.report.result import Result
from kvsim.report.table import Table, cells_table
from kvsim.report.terminal import Heading
from kvsim.report.units import DASH, format_number, rounded
from kvsim.validate.runner import Unit
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import profile_of

COMPILED_LINE = re.compile(r"(sm_\d+) (.+): (\d+) B shared, (\d+) registers, (\d+) B spilt, (\d+) ")
RATE_UNITS = {"flops_per_s": ("products in 16 bits", 1e12, "TFLOP/s")}
RATE_TITLES = {"hbm": "memory", "h2d": "copies to the device", "d2h": "copies to the host"}
LARGEST_GAP = "largest difference of a decode op"
TIME_KEYS = ("ttft_s", "tpot_s")
NEAR = 0.05
"""Difference of two techniques' times below which their order says nothing."""


Found = Mapping[str, Row]
"""Results of the units that are done, by name."""


def make_result(
    state: SessionState, units: Sequence[Unit], command: str = ""
) -> Result[SessionState]:
    """Make the result of a measuring session from the units of work finished so far.

    Parameters
    ----------
    state
        The session's folder.
    units
        All units of work of the session.
    command
        Command line that continues the session.
    """
    results = {u.name: result for u in units if (result := state.read(u.name)) is not None}
    found = {name: _predicted_again(result, state) for name, result in results.items()}
    facts = found.get("facts", {})
    device = str(facts.get("device", state.folder.name))
    tables = [_units(units, found, state), _ceilings(found), _shares(best_shares(state))]
    tables += [_techniques(found), _times(found)]
    details = [_cases(found), _compiled(found)]
    answer, title = _answer(device, units, found), f"{device}: what a session measured"
    tables = [table for table in tables if table.rows]
    return Result(
        title,
        answer,
        {"device": device, "units": found},
        state,
        tables=tables,
        blocks=[Heading(title), *answer.head(), *tables],
        details=[table for table in details if table.rows],
        remarks=[*facts.get("suspicions", ()), *_software(facts)],
        command=command,
    )


def _predicted_again(result: Row, state: SessionState) -> Row:
    """A timed point as the best profile predicts it by now, whatever was said when it was timed."""
    best = profile_of(state)
    if best is None or "model" not in result:
        return result
    from kvsim.machines.deployment import Deployment  # a session starts without these
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.models.configs import compress, load_model
    from kvsim.techniques import parse
    from kvsim.validate.counts.expected import (
        TIMED_GENERATED,
        RandomPrompts,
        Replay,
        predictions,
    )

    model = load_model(result["model"])
    if result["layers"]:
        model = replace(model, layout=compress(list(model.shapes())[: result["layers"]]))
    d = Deployment(model, load_hardware(best), load_stack(best.with_suffix(".stack.toml")))
    points = []
    for one in result["found"]:
        replays = [Replay(**replay) for replay in one.get("replays", ())]
        if one["rounds"] == "replayed" and not replays:
            replays = [Replay(TIMED_GENERATED - 1)]
        on_gpu = not state.folder.name.startswith("cpu")
        work = RandomPrompts(one["batch"], one["prompt"], TIMED_GENERATED)
        said = predictions(d, parse(one["technique"]), work, on_gpu, replays)
        measured = [
            {**m, "predicted": said.get(m["name"], m["predicted"])} for m in one["measured"]
        ]
        points.append({**one, "measured": measured})
    return {**result, "found": points, "profile": best.name}


def describe_errors(state: SessionState, units: Sequence[Unit]) -> str:
    """Describe the errors of predictions with the session's best profile.

    Parameters
    ----------
    state
        The session's folder.
    units
        All units of work of the session.

    Returns
    -------
    str
        One line; empty if no times were measured.
    """
    points = {u.name: r for u in units if u.kind == "point" and (r := state.read(u.name))}
    found = {name: _predicted_again(result, state) for name, result in points.items()}
    timed = list(_timed(found))
    if not timed:
        return ""
    said = []
    for key in TIME_KEYS:
        off = [abs(_error(m)) for _, one, _ in timed for m in one["measured"] if m["name"] == key]
        middle, most = (format_number(float(100 * np.quantile(off, q)), 2) for q in (0.5, 0.9))
        said.append(f"{key[:4].upper()} {middle} % (median) and {most} % (90th percentile)")
    techniques = {name.partition(":")[0] for name, _, _ in timed}
    models = {_model(point["model"], point["layers"]) for point in found.values()}
    return (
        f"{', '.join(said)} at {len(timed)} points of {len(techniques)} techniques with "
        f"{', '.join(sorted(models))}, none of them used in the fit"
    )


def _answer(device: str, units: Sequence[Unit], found: Found) -> Answer:
    left = [_called(unit.name) for unit in units if unit.name not in found]
    failed = [_called(name) for name, result in found.items() if _passed(name, result) is False]
    missed = f"Not passed: {_listed(failed)}." if failed else "Nothing that was checked failed."
    many = f"{len(left)} units are left" if len(left) > 1 else "one unit is left"
    changes = [f"Run the command again to continue: {many} ({_listed(left)})."] if left else []
    return Answer(
        verdict(
            [f"{len(found)} of {len(units)} units are done on {device}.", missed if found else ""],
            [_order(found)],
        ),
        figures={"units": len(units), "done": len(found), "failed": len(failed)},
        changes=changes,
    )


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _passed(name: str, result: Row) -> bool | None:
    """Whether a unit's checks hold; none where it has none."""
    if name.startswith("counts"):
        return all(bool(one["passed"]) for one in result.get("techniques", ()))
    passed = result.get("passed")
    return None if passed is None else bool(passed)


def _units(units: Sequence[Unit], found: Found, state: SessionState) -> Table:
    """Every unit: whether it is done, and how its checks went."""
    notes, past = state.notes(), state.past(units)
    rows = []
    for unit in units:
        result = found.get(unit.name)
        if result is None:
            said = str(notes.get(unit.name, {}).get("error", ""))
            tried = "failed" if said else "left"
            told = said or f"takes about {rounded(unit.short or unit.seconds, 2)} s"
            rows.append([_called(unit.name), tried, told])
            continue
        passed = _passed(unit.name, result)
        state_of = {None: "done", True: "passed", False: "failed"}[passed]
        state_of += ", short form" if not unit.is_complete(past[unit.name]) else ""
        rows.append([_called(unit.name), state_of, _summarize_step(unit.name, result)])
    return cells_table(("unit", "state", "what it found"), rows, 3, "", "Units")


def _called(name: str) -> str:
    """A unit as people call it."""
    kind, *more = name.split()
    if kind == "counts":
        return f"tokens and counts, {_model(*more)}"
    if kind == "point":
        return f"times of {more[0]}"
    if kind == "kernels":
        return "copies that are late" if more[0] == "lanes" else f"kernel {more[0]} and its twin"
    return name


def _model(name: str, layers: object) -> str:
    return f"{name} cut to {layers} layers" if str(layers) != "0" else name


def _summarize_step(name: str, result: Row) -> str:
    kind = name.split()[0]
    if kind == "counts":
        passed = [bool(one["passed"]) for one in result.get("techniques", ())]
        return f"{sum(passed)} of {len(passed)} techniques as stated"
    if kind == "kernels" and result["cases"]:
        cases = result["cases"]
        return f"{sum(bool(case['passed']) for case in cases)} of {len(cases)} cases agree"
    if kind == "compile":
        return f"{len(result['lines'])} programs"
    if kind == "point":
        left = f", {len(result['left'])} could not run" if result["left"] else ""
        return f"{len(result['found'])} points timed{left}"
    return str(result.get("said", ""))


def _ceilings(found: Found) -> Table:
    rows = []
    for key, value in found.get("ceilings", {}).items():
        if key.endswith("_per_s"):
            usual = RATE_TITLES.get(key.partition("_")[0], ""), 1e9, "GB/s"
            name, scale, unit = RATE_UNITS.get(key, usual)
            rows.append([name, f"{rounded(value / scale, 3)} {unit}"])
    return cells_table(("best rate of", "measured"), rows, 1, "", "Ceilings")


def best_shares(state: SessionState) -> dict[str, dict[str, float]]:
    """Return the largest share of the peak bandwidth and arithmetic rate that each kernel reached.

    Empty if the session has no calibration samples.
    """
    profile = profile_of(state)
    if profile is None or not profile.with_suffix(".samples.jsonl").is_file():
        return {}
    from kvsim.evidence.machine.samples import read_samples
    from kvsim.machines.profiles import load_hardware

    hardware = load_hardware(profile)
    _, samples = read_samples(profile.with_suffix(".samples.jsonl"))
    found: dict[str, dict[str, float]] = {}
    for s in samples:
        bytes_ = float(s.op.bytes.get("hbm", 0.0))
        rates = {
            "bandwidth": bytes_ / s.seconds / hardware.links["hbm"].bandwidth,
            "arithmetic": float(s.op.flops) / s.seconds / hardware.flops["fp16"],
        }
        best = found.setdefault(f"{s.benchmark} {s.op.kernel}", {"samples": 0.0})
        best["samples"] += 1
        for name, rate in rates.items():
            best[name] = max(best.get(name, 0.0), rate)
    return found


def _shares(kernels: Mapping[str, Mapping[str, float]]) -> Table:
    """What every kernel reached of the machine's peaks at its best."""
    rows = [
        [name, f"{one['samples']:,.0f}", *(_percent(one.get(key, 0.0)) for key in CEILING_KEYS)]
        for name, one in kernels.items()
    ]
    heads = ("benchmark and kernel", "samples", "of bandwidth", "of arithmetic")
    return cells_table(heads, rows, 1, "", "Best shares of the measured peaks")


CEILING_KEYS = ("bandwidth", "arithmetic")


def _times(found: Found) -> Table:
    """Times to the first token and per token, measured beside predicted, and why they differ."""
    rows = []
    for name, one, where in _timed(found):
        by_name = {m["name"]: m for m in one["measured"]}
        cells = [name, where, "graph" if one["rounds"] == "replayed" else "eager"]
        for key in TIME_KEYS:
            m = by_name[key]
            cells += [rounded(1e3 * m["measured"], 3), f"{100 * _error(m):+.1f}"]
        rows.append([*cells, _largest_difference(one["measured"])])
    heads = ["technique", "model, batch x prompt", "rounds"]
    heads += ["TTFT ms", "predicted %", "TPOT ms", "predicted %", LARGEST_GAP]
    return cells_table(heads, rows, 3, "", "Times, and how far predictions are off")


def _techniques(found: Found) -> Table:
    """A line per technique at its longest prompts: time per token, and what it changes for a plan.

    Its speed is compared with full KV's at the same point, as predicted and as measured.
    """
    points = {(name, where): one for name, one, where in _timed(found)}
    rows = []
    for name, where in dict(points.keys()).items():
        one, full = points[name, where], points.get(("full", where))
        mine = _tpot(one)
        cells = [one["technique"], *(rounded(1e3 * mine[key], 3) for key in SIDES)]
        cells += [f"{100 * _error(mine):+.0f}", _largest_difference(one["measured"])]
        if full is None or full is one:
            rows.append([*cells, DASH, DASH])
            continue
        predicted, measured = (_tpot(full)[key] / mine[key] for key in SIDES)
        rows.append([*cells, f"{predicted:.2f} / {measured:.2f}", _change(predicted, measured)])
    heads = ["technique", "predicted ms", "measured ms", "off %", LARGEST_GAP]
    heads += ["times full's speed, both", "what it changes"]
    return cells_table(heads, rows, 1, "", "Techniques per token, at their longest prompts")


SIDES = ("predicted", "measured")


def _tpot(one: Row) -> Row:
    (found,) = (m for m in one["measured"] if m["name"] == "tpot_s")
    return dict(found)


def _change(predicted: float, measured: float) -> str:
    """What a plan for this card should do otherwise, given speeds over full KV's."""
    if abs(measured - 1) < NEAR:
        return "no faster than full: use it to save memory only"
    if (predicted > 1) == (measured > 1):
        return "nothing"
    if predicted > 1:
        return "a plan would choose it, and full is faster"
    return "a plan would omit it, and it is faster than full"


def _timed(found: Found) -> Iterator[tuple[str, Row, str]]:
    """Techniques that were timed, with what was measured and where."""
    for name, point in found.items():
        for one in point["found"] if name.startswith("point") else ():
            if set(TIME_KEYS) <= {m["name"] for m in one["measured"]}:
                model = _model(point["model"], point["layers"])
                yield one["technique"], one, f"{model}, {one['batch']} x {one['prompt']:,}"


def _error(m: Row) -> float:
    return float(m["predicted"]) / float(m["measured"]) - 1


def _largest_difference(measured: Sequence[Row]) -> str:
    """Name the op of a decoding round whose prediction is off by most time."""
    ops = [m for m in measured if m["name"].startswith("decode ")]
    if not ops:
        return DASH
    worst = max(ops, key=lambda m: abs(m["predicted"] - m["measured"]))
    gap = 1e3 * (worst["predicted"] - worst["measured"])
    op = worst["name"].removeprefix("decode ").removesuffix("_s")
    return f"{op}: {gap:+.2g} ms ({100 * _error(worst):+.0f} %)"


def _order(found: Found) -> str:
    """Tell how far predictions of TPOT are off, and whether they order techniques rightly."""
    points: dict[str, list[tuple[float, float]]] = {}
    for _, one, where in _timed(found):
        m = _tpot(one)
        points.setdefault(where, []).append((m["measured"], m["predicted"]))
    every = [one for some in points.values() for one in some]
    if not every:
        return ""
    off = median(abs(predicted / measured - 1) for measured, predicted in every)
    pairs = [
        (a[0] < b[0]) == (a[1] < b[1])
        for some in points.values()
        for a, b in combinations(some, 2)
        if abs(a[0] - b[0]) > NEAR * min(a[0], b[0])
    ]
    within = f"within {format_number(100 * off, 2)} %"
    said = f"TPOT is predicted {within} at the median of {len(every)} points"
    if pairs:
        said += f", and the order is right in {sum(pairs)} of {len(pairs)} pairs that differ by "
        said += f"more than {100 * NEAR:.0f} %"
    return f"{said}."


def _cases(found: Found) -> Table:
    """Kernels against their plain twins, the worst case of each."""
    rows = []
    for name, result in found.items():
        for case in result.get("cases", ()) if name.startswith("kernels") else ():
            sizes = ", ".join(
                f"{k.replace('kv_', 'KV ').replace('_', ' ')} {v}"
                for k, v in case.items()
                if k not in ("off", "passed")
            )
            kept = "yes" if case["passed"] else "no"
            rows.append([name.partition(" ")[2], sizes, kept, f"{case['off']:.1e}"])
    heads = "kernel", "case", "agrees", "off by"
    return cells_table(heads, rows, 3, "", "Kernels and their twins")


def _compiled(found: Found) -> Table:
    """Programs as they were compiled for this card."""
    rows = []
    for line in found.get("compile", {}).get("lines", ()):
        if match := COMPILED_LINE.match(line):
            card, what, shared, registers, spilt, instructions = match.groups()
            rows.append([what, card, shared, registers, spilt, instructions])
    heads = ("program", "card", "shared B", "registers", "spilt B", "instructions")
    return cells_table(heads, rows, 2, "", "Programs as they are launched")


def _software(facts: Row) -> list[str]:
    versions = {key: facts[key] for key in ("torch", "cuda", "triton", "host") if key in facts}
    said = [f"{key} {value}" for key, value in (facts.get("facts", {}) | versions).items()]
    return [", ".join(said)] if facts else []


def _percent(share: float) -> str:
    return f"{rounded(100 * share, 2)} %" if share else DASH
