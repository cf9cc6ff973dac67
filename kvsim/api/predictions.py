"""Predictions at given points, grids of them, and published rows beside them."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.api.deployments import build_deployment
from kvsim.console import tell
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.options import MAX_ROWS, Inputs, check_work, takes_options

if TYPE_CHECKING:
    from kvsim.evidence.published import PublishedRow
    from kvsim.evidence.scores import Score
    from kvsim.report.json import Row
    from kvsim.report.predict import Predictions
    from kvsim.report.sweep import Sweep


@takes_options("predict", "model", "gpu", "technique", "batch", "prompt", "generate")
def predict(inputs: Inputs) -> "Predictions":
    """Latency, throughput and memory of techniques at every combination of sizes."""
    from kvsim.report.predict import predicted
    from kvsim.techniques import parse, parse_several

    techniques = parse_several(inputs.technique) or [parse("")]
    sizes = inputs.batch, inputs.prompt, inputs.generate
    rows = len(techniques) * len(sizes[0]) * len(sizes[1]) * len(sizes[2])
    check_work(
        f"--technique, --batch, --prompt, --generate: ask for {rows:,} rows together",
        rows,
        MAX_ROWS,
        "ask for fewer, or run kvsim sweep",
    )
    found = predicted(build_deployment(inputs), techniques, *sizes, inputs.line())
    for reason in found.answer.left_out:
        tell(f"left out: {reason}")
    return found


@takes_options("grid", "model", "gpu", "technique", "batch", "prompt", "generate")
def sweep(inputs: Inputs) -> "Sweep":
    """A grid of batch and prompt in memory: times, throughput and memory of every point.

    Nothing is explained point by point, so that a thousand points take a second or two.
    ``kvsim sweep`` has grids over everything, on disk.
    """
    import numpy as np

    from kvsim.report.sweep import swept
    from kvsim.techniques import parse_several

    return swept(
        build_deployment(inputs),
        parse_several(inputs.technique),
        np.array(inputs.batch, dtype=float),
        inputs.prompt,
        inputs.generate,
        inputs.line(),
    )


@takes_options("explore", "model", "gpu", "out")
def explore(inputs: Inputs) -> None:
    """Write a page with sliders: batch, prompt, bits, drafts, link."""
    from kvsim.console import tell_written
    from kvsim.files import check_target
    from kvsim.machines.basis import basis
    from kvsim.report import explore as pages
    from kvsim.report import names
    from kvsim.techniques import TECHNIQUES, parse, parse_several

    check_target(inputs.out, "--out")
    if inputs.generate < 2:
        raise InputError("--generate: got 1; the page compares times per token after the first")
    where = build_deployment(inputs)
    some = parse_several(inputs.technique) or [parse(name) for name in TECHNIQUES]
    title, line = f"{names.deployment(where)}: explore", inputs.line(without="out")
    pages.write_page(inputs.out, where, some, inputs.generate, title, line, basis(where))
    tell_written(inputs.out)


@frozen
class Reproduction:
    """Published or measured rows beside predictions.

    Attributes
    ----------
    command, source
        The command line that does the same, and what was reproduced.
    rows, predicted, scores
        The rows, their predictions, and the errors by table.
    """

    command: str
    source: str
    rows: "list[PublishedRow]"
    predicted: list[float]
    scores: "list[Score]"

    def envelope(self) -> "Row":
        """All of it as ``--json`` prints it."""
        from kvsim.report import reproduce as report
        from kvsim.report.evidence import newest_measurement
        from kvsim.report.json import envelope

        fields = report.answer(self.rows, self.predicted, self.scores)
        data = newest_measurement(row.deployment() for row in self.rows)
        return envelope(self.command, fields, verdict=fields["answer"]["verdict"], data=data)

    def write(self, path: str | Path) -> None:
        """Write the page that ``--report`` writes, or with .md the table of errors."""
        from kvsim.report import reproduce_page

        place = Path(path)
        reproduce_page.write_page(place, self.source, self.rows, self.predicted, self.command)


@takes_options("reproduce", "source")
def reproduce(inputs: Inputs) -> Reproduction:
    """Published or your own measured rows beside predictions; with ``fit`` a stack is fitted."""
    from kvsim.evidence import published
    from kvsim.evidence.scores import score
    from kvsim.files import check_target, replace_text

    source, fit = inputs.source, inputs.fit
    if fit is not None:
        check_target(fit, "--fit")
    names = list(published.papers()) if source == "all" else [source]
    found = [row for name in names for row in published.read(name)]
    if fit is not None:
        from kvsim.report.reproduce import fitted

        replace_text(fit, fitted(found, inputs.stack, source))
        return Reproduction(inputs.line(), source, found, [], [])
    predicted = [published.predict(row) for row in found]
    return Reproduction(inputs.line(), source, found, predicted, score(found, predicted))
