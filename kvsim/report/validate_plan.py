"""A plan beside what running it showed: loss and times, as an answer, rows and a table."""

from collections.abc import Callable, Sequence
from dataclasses import field
from math import isfinite

from kvsim.frozen import frozen
from kvsim.quality.measured import PERPLEXITY
from kvsim.quality.planfile import PlanFile
from kvsim.report.answer import Answer
from kvsim.report.answer import verdict as paragraph
from kvsim.report.json import number, pick
from kvsim.report.result import Result
from kvsim.report.table import cells_table
from kvsim.report.terminal import BLANK, Heading
from kvsim.report.units import gib, percent, seconds, times
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.planned import MeasuredLoss
from kvsim.validate.times.compared import Measured

MAX_ROUNDING_LOSS = 1e-3  # nat per token: rounding of sums in another order is below
QUANTITY_TITLES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "speedup": "speed over full KV",
    "resident_B": "resident [GiB]",
}


@frozen
class PlanRun:
    """A plan that was run.

    Attributes
    ----------
    title
        Model, weights, device and sizes in words.
    left_out
        What was not compared, one reason each.
    """

    plan: PlanFile
    title: str
    work: RandomPrompts
    loss: MeasuredLoss | None
    times: Sequence[Measured]
    left_out: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool | None:
        """Whether the measured loss is inside what the plan expects; None if units differ."""
        if self.loss is None:
            return None
        if self.plan.technique.exact:
            return self.loss.divergence <= MAX_ROUNDING_LOSS
        if self.plan.unit != PERPLEXITY or self.plan.high is None:
            return None
        return self.loss.relative <= self.plan.high


def make_result(found: PlanRun) -> Result[PlanRun]:
    """Make the answer of ``kvsim validate --plan``.

    Parameters
    ----------
    found
        The plan and what running it showed.
    """
    plan, loss, answer = found.plan, found.loss, write_answer(found)
    fields = {
        "answer": answer.row(),
        "technique": str(plan.technique),
        "model": plan.model,
        "title": found.title,
        **pick(found.work, "batch", "prompt", "generate"),
        "loss": {
            "evidence": plan.evidence,
            "unit": plan.unit,
            "expected": plan.loss,
            "low": plan.low,
            "high": plan.high,
            "measured_relative_perplexity": None if loss is None else number(loss.relative),
            "measured_kl_nat": None if loss is None else number(loss.divergence),
            "holds": found.holds,
        },
        "times": [pick(m, "name", "predicted", "measured", "noise") for m in found.times],
        "left_out": found.left_out,
    }
    rows = [_row(m) for m in found.times]
    if loss is not None:
        inside = plan.unit == PERPLEXITY and plan.loss is not None
        expected = "0 %" if plan.technique.exact else percent(plan.loss) if inside else "-"
        rows.append(["loss of perplexity", expected, percent(loss.relative), "-"])
        rows.append(["KL [nat/token]", "-", f"{loss.divergence:.2g}", "-"])
    table = cells_table(("", "predicted", "measured", "error"), rows)
    blocks = [Heading(found.title), *answer.head(), BLANK, table, *answer.body()]
    held = found.holds is not False
    shown = [table]
    return Result(found.title, answer, fields, found, tables=shown, blocks=blocks, passed=held)


def write_answer(found: PlanRun) -> Answer:
    """What running the plan showed, in words.

    Parameters
    ----------
    found
        The plan and what running it showed.
    """
    told = {m.name: m for m in found.times}
    faster = told.get("speedup")
    sentences = [_loss_told(found)]
    if faster is not None:
        beside = (
            f"; the plan expects {times(faster.predicted)}" if isfinite(faster.predicted) else ""
        )
        sentences.append(f"It decodes {times(faster.measured)} as fast as full KV here{beside}.")
    return Answer(
        verdict=paragraph(sentences),
        figures={name: number(m.measured) for name, m in told.items()},
        left_out=found.left_out,
    )


def _loss_told(found: PlanRun) -> str:
    name, loss = str(found.plan.technique), found.loss
    if loss is None:
        return f"{name} was run for its times; its loss was not measured."
    measured = f"{percent(loss.relative)} of perplexity"
    if found.plan.technique.exact:
        kept = "keeps" if found.holds else "does NOT keep"
        return f"{name} {kept} full KV's tokens: {loss.divergence:.2g} nat per token apart."
    if found.holds is None:
        return (
            f"{name} loses {measured}; the plan's evidence is another quantity "
            f"({found.plan.unit or 'none'}) and is not compared."
        )
    held = "within" if found.holds else "ABOVE"
    return (
        f"{name} loses {measured}, {held} the {percent(found.plan.high)} that the plan allows for."
    )


def _row(measured: Measured) -> list[str]:
    shown = _select_format(measured.name)
    known = isfinite(measured.predicted)
    return [
        QUANTITY_TITLES[measured.name],
        shown(measured.predicted) if known else "-",
        shown(measured.measured),
        f"{100 * measured.error:+.1f} %" if known else "-",
    ]


def _select_format(name: str) -> Callable[[float], str]:
    """How a quantity is written."""
    if name == "resident_B":
        return gib
    return times if name == "speedup" else seconds
