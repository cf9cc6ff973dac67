"""Results of sweeps: a grid in memory, or the chunks of ``kvsim sweep``."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.colours import PALETTE, mark
from kvsim.report.json import Row
from kvsim.report.pictures import Chart, draw_bars
from kvsim.report.result import Result
from kvsim.report.table import Column, Table, quantity_columns, text_column
from kvsim.report.units import QUANTITIES
from kvsim.sweeps.chunks import SEPARATOR
from kvsim.sweeps.spec import Spec
from kvsim.sweeps.store import ResultStore, chunk_path
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from pyarrow import Table as Chunk

FASTEST = 6  # rows of a grid's table
KEYS = ("ttft_s", "tpot_s", "decode_tok_s", "output_tok_s", "gpu_bytes", "host_bytes")
SHOWN, REASONS = 20, 3  # rows of the table, and reasons that are told
BEST = {
    "predict": "decode_tok_s",
    "plan": "output_tok_s",
    "simulate": "goodput_per_s",
    "capacity": "usd_per_hour",
}
MINIMIZED = ("usd_per_hour",)  # less is better
COLUMN_HEADINGS = {
    "usd_per_hour": "USD per hour",
    "goodput_per_s": "goodput req/s",
    "context": "context",
    "hosts_used": "hosts used",
}


def sweep_grid(
    deployment: Deployment,
    techniques: Sequence[Technique],
    batches: np.ndarray,
    prompts: Sequence[int],
    generate: int,
    command: str,
) -> Result[None]:
    """Predict techniques over a grid of batch sizes and prompt lengths.

    Parameters
    ----------
    deployment
        The deployment.
    techniques
        Techniques to compare; those that cannot run are left out.
    batches
        Batch sizes in ascending order. (batches,) [sequences]
    prompts
        Prompt lengths. [tokens]
    generate
        Generated tokens per request. [tokens]
    command
        The equivalent command line.

    Returns
    -------
    Result
        A row for each technique, batch and prompt.

    Raises
    ------
    InputError
        If no technique can run, or a size is impossible.
    """
    rows: list[Row] = []
    left_out = []
    idealised = {str(t) for t in techniques if t.needs_kernel(deployment.stack.name)}

    def order(row: Row) -> tuple[bool, float]:
        """The best first; what needs a kernel that the engine has not, after what it runs."""
        return row["technique"] in idealised, -row["output_tok_s"]

    for t in techniques:
        reason = t.refuses_released(deployment)
        if reason:
            left_out.append(f"{t.name} cannot run here: {reason}")
            continue
        for prompt in prompts:
            p = Prediction(t, deployment, batches, prompt, generate)
            values_of = {key: np.broadcast_to(getattr(p, key), batches.shape) for key in KEYS}
            for i, (batch, fits) in enumerate(zip(batches, p.fits, strict=True)):
                values = {key: float(column[i]) for key, column in values_of.items()}
                place = {"technique": str(t), "batch": int(batch), "prompt": prompt}
                rows.append({**place, "generate": generate, **values, "fits": bool(fits)})
    if not rows:
        raise InputError(
            f"technique: none of these techniques can run on this deployment; {left_out[0]}"
        )
    able = sorted((row for row in rows if row["fits"]), key=order)
    answer = _grid_answer(len(rows), able, deployment, left_out)
    columns = [
        text_column("technique", "technique"),
        *quantity_columns(batch=0, prompt=0, ttft_s=0, tpot_s=0, output_tok_s=0, gpu_bytes=0),
    ]
    return Result(
        command,
        answer,
        {"rows": rows, "answer": answer.row()},
        None,
        rows,
        tables=[Table(columns, able[:FASTEST])],
        draw=lambda: [_draw_map(able)],
        data=evidence.newest_measurement([deployment]),
    )


def _draw_map(rows: Sequence[Row]) -> Chart:
    """The first of the rows at every point, larger where it is faster."""
    points: dict[tuple[int, int], Row] = {}
    for row in rows:
        points.setdefault((row["batch"], row["prompt"]), row)
    title = "Fastest technique by batch and prompt; larger marks are faster"
    chart = Chart(title, "batch", "prompt [tokens]", 440, log="xy")
    most = max((row["output_tok_s"] for row in points.values()), default=1.0)
    for name in dict.fromkeys(row["technique"] for row in points.values()):
        here = [row for row in points.values() if row["technique"] == name]
        look, sizes = mark(name), [8 + 18 * (r["output_tok_s"] / most) ** 0.5 for r in here]
        chart.dots(
            name,
            [r["batch"] for r in here],
            [r["prompt"] for r in here],
            {"color": look.colour, "symbol": look.symbol, "size": sizes},
            text=[
                f"{units.rate(r['output_tok_s'])} output tok/s, TPOT {units.seconds(r['tpot_s'])}"
                for r in here
            ],
            hovertemplate="batch %{x}, prompt %{y}<br>%{text}",
        )
    return chart


def _grid_answer(
    points: int, able: Sequence[Row], deployment: Deployment, left_out: Sequence[str]
) -> Answer:
    if not able:
        return Answer(verdict([f"No point fits in memory on {deployment.hardware.name}."]))
    best = able[0]
    name = best["technique"].partition(":")[0]
    times = f"TTFT {units.seconds(best['ttft_s'])}"
    if best["generate"] > 1:
        times += f", TPOT {units.seconds(best['tpot_s'])}"
    said = f"{len(able)} of {points} points fit in memory on {deployment.hardware.name}."
    fastest = f"Highest throughput: {name} at batch {best['batch']:,} with prompts of "
    fastest += f"{best['prompt']:,}: {units.rate(best['output_tok_s'])} output tok/s, {times}."
    return Answer(
        verdict([said, fastest]),
        figures=best,
        evidence=evidence.list_measurements(deployment, name),
        assumed=evidence.list_assumptions(deployment.hardware, best["host_bytes"], ""),
        left_out=left_out,
    )


class SweepSummary:
    """Summary of a sweep, accumulated chunk by chunk.

    Attributes
    ----------
    best
        The best points, best first.
    along
        The best result at each value of each axis.
    reasons
        Reasons why points have no result, with their counts.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.key = spec, BEST[spec.kind]
        self.sign = 1.0 if self.key in MINIMIZED else -1.0
        self.best: list[Row] = []
        self.varied = [name for name, values in spec.axes.items() if len(values) > 1]
        self.along: dict[str, dict[Any, float]] = {name: {} for name in self.varied}
        self.reasons: Counter[str] = Counter()
        self.points = self.able = 0

    def add(self, chunk: "Chunk") -> None:
        """Add the points of a chunk to the summary.

        Parameters
        ----------
        chunk
            Columns of the chunk.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        self.points += chunk.num_rows
        mask = pc.is_valid(chunk[self.key])
        if "fits" in chunk.column_names:
            fits = pc.fill_null(chunk["fits"], False)
            full = pc.sum(pc.and_(mask, pc.invert(fits))).as_py() or 0
            self.reasons += Counter({"they do not fit in memory": full})
            mask = pc.and_(mask, fits)
        found = pc.value_counts(chunk["reason"].cast("string")).to_pylist()
        self.reasons += Counter({f["values"]: f["counts"] for f in found if f["values"]})
        able = chunk.filter(mask)
        self.able += able.num_rows
        order = "ascending" if self.sign > 0 else "descending"
        rows = self.best
        lacking = pa.array([self._lacks_kernel(row) for row in able.to_pylist()], pa.bool_())
        for mask in (pc.invert(lacking), lacking):
            some = able.filter(mask)
            first = pc.select_k_unstable(some, min(SHOWN, some.num_rows), [(self.key, order)])
            rows = [*rows, *some.take(first).to_pylist()]
        self.best = sorted(rows, key=self._place)[:SHOWN]
        how = "min" if self.sign > 0 else "max"
        for name, known in self.along.items():
            for row in able.group_by(name).aggregate([(self.key, how)]).to_pylist():
                value, here = row[name], row[f"{self.key}_{how}"]
                known[value] = min(known.get(value, here), here, key=lambda x: self.sign * x)

    def _place(self, row: Row) -> tuple[bool, float]:
        """The best first; what needs a kernel that its engine has not, after what engines run."""
        return self._lacks_kernel(row), self.sign * row[self.key]

    def _lacks_kernel(self, row: Row) -> bool:
        alike = {"technique": "", **{k: v[0] for k, v in self.spec.axes.items() if v}, **row}
        return _lacks_kernel(str(alike["technique"]), str(alike.get("stack", "")))


@cache
def _lacks_kernel(technique: str, stack: str) -> bool:
    return bool(technique and parse(technique).needs_kernel(stack))


def make_result(store: ResultStore, spec: Spec, command: str) -> Result[SweepSummary]:
    """Make the report of a finished sweep.

    Parameters
    ----------
    store
        The folder of the sweep.
    spec
        The specification.
    command
        The command line of the sweep.
    """
    from pyarrow.parquet import read_table

    found = SweepSummary(spec)
    for index in sorted(store.done):  # one at a time
        found.add(read_table(chunk_path(store.folder, index)))
    return Result(
        f"Sweep of {spec.points:,} points: {spec.kind}",
        _answer(found),
        {},
        found,
        found.best,
        tables=[_table(found)] if found.best else [],
        draw=lambda: _draw_axes(found),
        remarks=[f"All rows: {store.folder.name}, which pandas.read_parquet reads."],
        command=command,
    )


def _answer(found: SweepSummary) -> Answer:
    told = f"Of {found.points:,} points {found.able:,} have a result."
    lacking = [f"{n:,} points: {why}" for why, n in found.reasons.most_common(REASONS)]
    if not found.best:
        return Answer(verdict([told]), left_out=lacking)
    best = found.best[0]
    place = ", ".join(f"{name} {_format_value(name, best[name])}" for name in found.varied)
    extreme = "Least" if found.sign > 0 else "Most"
    times = [
        f"{QUANTITIES[key].heading} {units.seconds(best[key])}"
        for key in ("ttft_s", "tpot_s")
        if best.get(key) is not None
    ]
    figures = ", ".join([_format_value(found.key, best[found.key]), *times])
    said = f"{extreme} {_heading(found.key)}: {figures}" + (f", with {place}." if place else ".")
    return Answer(
        verdict([told, said[:400]]), figures=best, assumed=_assumed(found), left_out=lacking
    )


def _assumed(found: SweepSummary) -> list[str]:
    """What the best point takes for granted of the hosts whose memory it uses."""
    best = found.best[0]
    gpus = str(best.get("gpu", found.spec.axes["gpu"][0])).split(SEPARATOR)
    cards = [load_hardware(gpu) for gpu in gpus]
    if "hosts_used" in best:
        hosts = str(best["hosts_used"]).split(SEPARATOR)
        cards = [card for card in cards if card.name in hosts]
    elif not best.get("host_bytes"):
        return []
    return [line for card in cards for line in evidence.list_assumptions(card, 1.0, "")]


def _heading(key: str) -> str:
    return COLUMN_HEADINGS.get(key) or (QUANTITIES[key].heading if key in QUANTITIES else key)


def _format_value(key: str, value: Any) -> str:
    """A value as its kind is written."""
    if isinstance(value, str) or value is None:
        return value or units.DASH
    if key in QUANTITIES:
        return QUANTITIES[key].show(value)
    if key.endswith("_s"):
        return units.seconds(value)
    return units.integer(value) if float(value).is_integer() else units.format_number(value)


def _table(found: SweepSummary) -> Table:
    """The best points: what varies, then what was found."""
    fixed = set(found.spec.axes) - set(found.varied)
    keys = [k for k in found.best[0] if k not in fixed and k not in ("fits", "reason")]

    def column(key: str) -> Column:
        if any(isinstance(row[key], str) for row in found.best):
            return text_column(_heading(key), lambda row: _format_value(key, row[key]))
        return Column(_heading(key), itemgetter(key), lambda x: _format_value(key, x))

    ordered = [*found.varied, *(k for k in keys if k not in found.varied)]
    return Table([column(key) for key in ordered], found.best, marked=lambda r: r is found.best[0])


def _draw_axes(found: SweepSummary) -> list[Chart]:
    """The best value along each axis, the other axes free."""
    drawn = []
    heading = _heading(found.key)
    for name, known in found.along.items():
        title = f"Best {heading} by {name}, all else free"
        values = sorted(known, key=lambda v: (isinstance(v, str), v))
        if values and isinstance(values[0], str):
            values.sort(key=lambda v: -found.sign * known[v])
            colours = [mark(v).colour if name == "technique" else PALETTE[0] for v in values]
            drawn.append(draw_bars(title, {v: known[v] for v in values}, heading, colours))
        elif values:
            chart, best = Chart(title, _heading(name), heading, log="x"), [known[v] for v in values]
            drawn.append(chart.line(None, values, best, PALETTE[0], mode="lines+markers"))
    return drawn
