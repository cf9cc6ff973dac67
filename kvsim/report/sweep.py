"""A grid of batch and prompt in memory: columns, a frame and a map."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction
from kvsim.report import evidence, units
from kvsim.report.answer import Answer, verdict
from kvsim.report.charts import LOG, finished
from kvsim.report.colours import mark
from kvsim.report.json import Row
from kvsim.report.result import Result
from kvsim.report.table import Table, of, words
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN = 6  # rows of the table: the fastest points
KEYS = ("ttft_s", "tpot_s", "decode_tok_s", "output_tok_s", "gpu_bytes", "host_bytes")


@frozen
class Sweep(Result):
    """Times, throughput and memory of techniques over batch and prompt."""

    @property
    def tables(self) -> list[Table]:
        """The fastest points that fit."""
        able = [row for row in self.rows if row["fits"]]
        best = sorted(able, key=lambda row: -row["output_tok_s"])[:SHOWN]
        columns = [words("technique", lambda row: row["technique"])]
        columns += [of(key) for key in ("batch", "prompt", *KEYS[:2], *KEYS[3:5])]
        return [Table(columns, best)]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The fastest technique at every point, larger where it is faster."""
        from plotly.graph_objects import Figure

        points: dict[tuple[Any, Any], Row] = {}
        for row in self.rows:
            best = points.get((row["batch"], row["prompt"]))
            if row["fits"] and (best is None or row["output_tok_s"] > best["output_tok_s"]):
                points[row["batch"], row["prompt"]] = row
        figure = Figure()
        most = max((row["output_tok_s"] for row in points.values()), default=1.0)
        for name in dict.fromkeys(row["technique"] for row in points.values()):
            here = [row for row in points.values() if row["technique"] == name]
            look = mark(name)
            figure.add_scatter(
                x=[r["batch"] for r in here], y=[r["prompt"] for r in here], name=name,
                mode="markers",
                marker={"color": look.colour, "symbol": look.symbol,
                        "size": [8 + 18 * (r["output_tok_s"] / most) ** 0.5 for r in here]},
                text=[f"{units.rate(r['output_tok_s'])} output tok/s, TPOT "
                      f"{units.seconds(r['tpot_s'])}" for r in here],
                hovertemplate="batch %{x}, prompt %{y}<br>%{text}",
            )  # fmt: skip
        drawn = finished(figure, 440, "batch", "prompt [tokens]", xaxis=LOG, yaxis=LOG)
        return [("Fastest technique by batch and prompt; larger marks are faster", drawn)]


def swept(
    deployment: Deployment,
    techniques: Sequence[Technique],
    batches: np.ndarray,
    prompts: Sequence[int],
    generate: int,
    command: str,
) -> Sweep:
    """Every technique over the grid, a whole column of batches at once.

    Raises
    ------
    InputError
        If no technique can run there, or for sizes no system could mean.
    """
    rows: list[Row] = []
    left_out = []
    for t in techniques:
        reason = t.refuses(deployment)
        if reason:
            left_out.append(f"{t.name} cannot run here: {reason}")
            continue
        for prompt in prompts:
            p = Prediction(t, deployment, batches, prompt, generate)
            columns = {key: np.broadcast_to(getattr(p, key), batches.shape) for key in KEYS}
            for i, (batch, fits) in enumerate(zip(batches, p.fits, strict=True)):
                values = {key: float(column[i]) for key, column in columns.items()}
                rows.append(
                    {"technique": str(t), "batch": int(batch), "prompt": prompt,
                     "generate": generate, **values, "fits": bool(fits)}
                )  # fmt: skip
    if not rows:
        raise InputError(f"technique: none can run there; {left_out[0]}")
    return Sweep(command, _answered(rows, deployment, left_out), rows)


def _answered(rows: Sequence[Row], deployment: Deployment, left_out: Sequence[str]) -> Answer:
    able = [row for row in rows if row["fits"]]
    if not able:
        return Answer(verdict([f"None of {len(rows)} points fits on {deployment.hardware.name}."]))
    best = max(able, key=lambda row: row["output_tok_s"])
    name = best["technique"].partition(":")[0]
    times = f"TTFT {units.seconds(best['ttft_s'])}"
    if best["generate"] > 1:
        times += f", TPOT {units.seconds(best['tpot_s'])}"
    return Answer(
        verdict(
            [
                f"Of {len(rows)} points {len(able)} fit on {deployment.hardware.name}.",
                f"Most throughput: {name} at batch {best['batch']:,} with prompts of "
                f"{best['prompt']:,}: {units.rate(best['output_tok_s'])} output tok/s, {times}.",
            ]
        ),
        figures=best,
        evidence=evidence.on_card(deployment, name),
        assumed=evidence.assumed(deployment.hardware, best["host_bytes"], ""),
        left_out=left_out,
    )
