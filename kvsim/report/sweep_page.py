"""The page of ``kvsim sweep``: the best points, why others have no result, each axis alone."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.machines.profiles import load_hardware
from kvsim.report import evidence, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import PALETTE, mark
from kvsim.report.json import Row
from kvsim.report.page import Page, write
from kvsim.report.quantities import QUANTITIES
from kvsim.report.table import Column, Table, words
from kvsim.sweeps.cases import SEPARATOR
from kvsim.sweeps.spec import Spec
from kvsim.sweeps.store import ResultStore, place_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from pyarrow import Table as Chunk

SHOWN, REASONS = 20, 3  # rows of the table, and reasons that are told
BEST = {
    "predict": "decode_tok_s", "plan": "output_tok_s", "simulate": "goodput_per_s",
    "capacity": "usd_per_hour",
}  # fmt: skip
LEAST = ("usd_per_hour",)  # less is better
NAMED = {
    "usd_per_hour": "USD per hour", "goodput_per_s": "goodput req/s", "context": "context",
    "hosts_used": "hosts used",
}  # fmt: skip


class SweepSummary:
    """What is kept of a sweep while its chunks are read one after another.

    Attributes
    ----------
    best
        The best rows, best first.
    along
        The best value at each value of each axis that has several.
    reasons
        Why points have no result, and how many.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec, self.key = spec, BEST[spec.kind]
        self.sign = 1.0 if self.key in LEAST else -1.0
        self.best: list[Row] = []
        self.varied = [name for name, values in spec.axes.items() if len(values) > 1]
        self.along: dict[str, dict[Any, float]] = {name: {} for name in self.varied}
        self.reasons: Counter[str] = Counter()
        self.points = self.able = 0

    def add(self, chunk: "Chunk") -> None:
        """Take a chunk's rows in."""
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
        first = pc.select_k_unstable(able, min(SHOWN, able.num_rows), [(self.key, order)])
        rows = [*self.best, *able.take(first).to_pylist()]
        self.best = sorted(rows, key=lambda row: self.sign * row[self.key])[:SHOWN]
        how = "min" if self.sign > 0 else "max"
        for name, known in self.along.items():
            for row in able.group_by(name).aggregate([(self.key, how)]).to_pylist():
                value, here = row[name], row[f"{self.key}_{how}"]
                known[value] = min(known.get(value, here), here, key=lambda x: self.sign * x)


def summarised(store: ResultStore, spec: Spec) -> SweepSummary:
    """Read a sweep's chunks, one at a time."""
    from pyarrow.parquet import read_table

    found = SweepSummary(spec)
    for index in sorted(store.done):
        found.add(read_table(place_of(store.folder, index)))
    return found


def write_page(path: Path, store: ResultStore, spec: Spec, command: str) -> None:
    """The page of a sweep that is done."""
    found = summarised(store, spec)
    title = f"Sweep of {spec.points:,} points: {spec.kind}"
    tables = [_table(found)] if found.best else []
    where = f"All rows: {store.folder.name}, which pandas.read_parquet reads."
    write(path, Page(title, _answer(found), tables, _pictures(found), notes=[where],
                     command=command))  # fmt: skip


def _answer(found: SweepSummary) -> Answer:
    told = f"Of {found.points:,} points {found.able:,} have a result."
    lacking = [f"{n:,} points: {why}" for why, n in found.reasons.most_common(REASONS)]
    if not found.best:
        return Answer(verdict([told]), left_out=lacking)
    best = found.best[0]
    place = ", ".join(f"{name} {_shown(name, best[name])}" for name in found.varied)
    extreme = "Least" if found.sign > 0 else "Most"
    times = [
        f"{QUANTITIES[key].heading} {units.seconds(best[key])}"
        for key in ("ttft_s", "tpot_s")
        if best.get(key) is not None
    ]
    figures = ", ".join([_shown(found.key, best[found.key]), *times])
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
    return [line for card in cards for line in evidence.assumed(card, 1.0, "")]


def _heading(key: str) -> str:
    return NAMED.get(key) or (QUANTITIES[key].heading if key in QUANTITIES else key)


def _shown(key: str, value: Any) -> str:
    """A value as its kind is written."""
    if isinstance(value, str) or value is None:
        return value or units.DASH
    if key in QUANTITIES:
        return QUANTITIES[key].show(value)
    if key.endswith("_s"):
        return units.seconds(value)
    return units.whole(value) if float(value).is_integer() else units.short(value)


def _table(found: SweepSummary) -> Table:
    """The best points: what varies, then what was found."""
    fixed = set(found.spec.axes) - set(found.varied)
    keys = [k for k in found.best[0] if k not in fixed and k not in ("fits", "reason")]

    def column(key: str) -> Column:
        texts = any(isinstance(row[key], str) for row in found.best)
        if texts:
            return words(_heading(key), lambda row: _shown(key, row[key]))
        return Column(_heading(key), lambda row: _shown(key, row[key]), lambda row: row[key])

    ordered = [*found.varied, *(k for k in keys if k not in found.varied)]
    return Table([column(key) for key in ordered], found.best, marked=lambda r: r is found.best[0])


def _pictures(found: SweepSummary) -> Sequence[tuple[str, "Figure"]]:
    from plotly.graph_objects import Figure

    drawn = []
    for name, known in found.along.items():
        if not known:
            continue
        figure, values = Figure(), sorted(known, key=lambda v: (isinstance(v, str), v))
        if isinstance(values[0], str):
            values.sort(key=lambda v: -found.sign * known[v])
            colours = [mark(v).colour if name == "technique" else PALETTE[0] for v in values]
            figure.add_bar(y=values, x=[known[v] for v in values], orientation="h",
                           marker={"color": colours})  # fmt: skip
            shape = finished(figure, 120 + 26 * len(values), _heading(found.key), "")
        else:
            figure.add_scatter(x=values, y=[known[v] for v in values], mode="lines+markers",
                               line={"color": PALETTE[0]})  # fmt: skip
            shape = finished(figure, 340, _heading(name), _heading(found.key), xaxis=LOG)
        drawn.append((f"Best {_heading(found.key)} by {name}, all else free", shape))
    return drawn
