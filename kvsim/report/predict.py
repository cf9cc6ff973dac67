"""``kvsim predict``: rows, their table, and CSV."""

from collections.abc import Iterator, Mapping, Sequence
from csv import DictWriter
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.basis import basis
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import Parallelism
from kvsim.prediction.explain import binding, breakdown
from kvsim.prediction.generate import Prediction, at_batch
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.report import evidence, hostlink, units
from kvsim.report.answer import show_rest, show_verdict
from kvsim.report.grounds import grounds, noted
from kvsim.report.json import Row, number
from kvsim.report.names import label, params, settings, short_names, spec
from kvsim.report.quantities import legend
from kvsim.report.result import Result, flat
from kvsim.report.screen import Screen
from kvsim.report.table import Column, Table, of, words
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


BATCH_TTFT = "TTFT: until all prompts of the batch are read, on an idle GPU"


@frozen
class Predictions(Result):
    """What techniques do at given points.

    Attributes
    ----------
    found
        The prediction of each row, at its one batch.
    """

    found: Sequence[Prediction]

    @property
    def title(self) -> str:
        """What all rows have in common."""
        return title(self.rows)

    @property
    def notes(self) -> list[str]:
        """What a reader should know before using the rows."""
        return list(dict.fromkeys(note for row in self.rows for note in row["notes"]))

    @property
    def data(self) -> str | None:
        """Date of the newest measurement that the rows stand on."""
        return evidence.newest_measurement(p.deployment for p in self.found)

    @property
    def tables(self) -> list[Table]:
        """The one that the terminal shows."""
        return [table(self.rows)]

    def figures(self) -> list[tuple[str, "Figure"]]:
        """The pictures of the page with their titles."""
        from kvsim.report import breakeven, charts

        drawn = charts.of_predictions(self.rows, self.found)
        full = next((p.technique for p in self.found if p.technique.name == "full"), None)
        if full is not None:
            first = {str(p.technique): p for p in reversed(self.found)}
            drawn += breakeven.pictures(list(first.values())[::-1], full)
        return drawn


def predicted(
    deployment: Deployment,
    techniques: Sequence[Technique],
    batches: Sequence[int],
    prompts: Sequence[int],
    generates: Sequence[int],
    command: str = "",
) -> Predictions:
    """Every technique at every point; of several those that cannot run are left out and named.

    Raises
    ------
    InputError
        If none can run there, or for sizes no system could mean.
    """
    left_out = []
    found: list[Prediction] = []
    column = np.array(batches, dtype=float)
    for t in techniques:
        reason = t.refuses(deployment) if len(techniques) > 1 else ""
        if reason:
            left_out.append(f"{t.name} cannot run here: {reason}")
            continue
        for prompt in prompts:
            for generate in generates:
                p = Prediction(t, deployment, column, prompt, generate)
                found += [at_batch(p, i) for i in range(column.size)]
    if not found:
        raise InputError(f"--technique: none can run there; {left_out[0]}")
    from kvsim.report.predict_answer import answered

    rows = [prediction(p) for p in found]
    return Predictions(command, answered(rows, found, left_out), rows, found)


def prediction(prediction: Prediction) -> Row:
    """The row of a prediction at one batch."""
    t, d, batch = prediction.technique, prediction.deployment, float(prediction.batch[0])
    read = prefill_point(batch, prediction.prompt, prediction.generate)
    prefill, rounds, bound = (t.prefill(d, read),), prediction.middle_round, binding(prediction)
    return {
        "model": d.model.name,
        "gpu": d.hardware.name,
        "stack": d.stack.name,
        **{name: n for name, n in asdict(d.parallelism).items() if n > 1 or name == "tp"},
        "weights": d.weights,
        "technique": label(t),
        "params": params(t),
        "notation": str(t),
        "batch": number(prediction.batch),
        "prompt": prediction.prompt,
        "generate": prediction.generate,
        "ttft_s": number(prediction.ttft_s),
        "tpot_s": number(prediction.tpot_s),
        "prefill_s": number(prediction.prefill_s),
        "decode_s": number(prediction.decode_s),
        "decode_tok_s": number(prediction.decode_tok_s),
        "output_tok_s": number(prediction.output_tok_s),
        "usd_per_million_tokens": number(prediction.usd_per_million()),
        "gpu_bytes": number(prediction.gpu_bytes),
        "host_bytes": number(prediction.host_bytes),
        "fits": bool(prediction.fits[0]),
        "max_batch": number(prediction.max_batch),
        "bound_by": bound,
        "ranges": hostlink.widened(
            evidence.ranges(d, t.name, number(prediction.ttft_s), number(prediction.tpot_s)),
            prediction,
        ),
        "basis": basis(d),
        "breakdown": {
            "prefill_s": _numbers(breakdown(prefill, d)),
            "round_s": _numbers(breakdown(rounds, d)),
            **{f"{tier}_bytes": _numbers(buffers) for tier, buffers in prediction.buffers.items()},
        },
        "notes": list(notes(prediction)),
        "assumed": assumed(prediction, bound),
    }


def assumed(prediction: Prediction, bound: str) -> list[str]:
    """What a prediction, bound by something, takes for granted of the host."""
    hardware, kept = prediction.deployment.hardware, float(np.ravel(prediction.host_bytes)[0])
    return [*evidence.assumed(hardware, kept, bound), *hostlink.said(prediction)]


def _numbers(values: Mapping[str, Any]) -> Row:
    return {k: n for k, v in values.items() if (n := number(v))}


def notes(prediction: Prediction) -> Iterator[str]:
    """What a reader should know about this prediction."""
    d = prediction.deployment
    yield from d.model.notes
    yield from d.parallelism.notes(d.domain)
    if prediction.prompt + prediction.generate > d.model.max_context:
        yield (
            f"{prediction.prompt + prediction.generate} tokens are beyond the "
            f"{d.model.max_context} that {d.model.name} was made for"
        )
    last = decode_point(
        float(prediction.batch[0]), prediction.prompt, prediction.generate, prediction.generate - 1
    )
    yield from prediction.technique.notes(d, last)
    if prediction.technique.assumes:
        yield f"the speed of {prediction.technique.name} assumes {prediction.technique.assumes}"


def csv(rows: Sequence[Row]) -> str:
    """Rows as CSV: plain cells only; settings become ``key=value``, the basis its kind."""
    out = StringIO()
    plain = [flat(row) | {"fits": str(row["fits"]).lower()} for row in rows]
    writer = DictWriter(out, list(plain[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue()


def table(rows: Sequence[Row]) -> Table:
    """What differs between the rows, and their figures."""
    labels = short_names([spec(row) for row in rows])
    varying = [key for key in ("prompt", "generate") if len({row[key] for row in rows}) > 1]
    seen: set[str] = set()

    def below(row: Row) -> str:
        """Settings, under the first row that has them."""
        text = spec(row)
        if text in seen:
            return ""
        seen.add(text)
        return settings(row)

    columns = [
        words("technique", lambda row: labels[spec(row)]),
        *(of(key) for key in ("batch", *varying)),
        of("ttft_s"),
        of("tpot_s"),
        of("decode_tok_s"),
        of("output_tok_s", 5),
        Column(
            "GPU GiB", lambda row: units.gib(row["gpu_bytes"]) + ("" if row["fits"] else " !"),
            lambda row: row["gpu_bytes"], rank=1,
        ),
        of("host_bytes", 2),
        of("max_batch", 3),
        of("bound_by", 4),
    ]  # fmt: skip
    note = f"{BATCH_TTFT}; {legend(['decode_tok_s', 'output_tok_s'])}"
    note += "" if all(row["fits"] for row in rows) else "; !: more than there is"
    return Table(columns, rows, below=below, note=note)


def title(rows: Sequence[Row]) -> str:
    """What all rows have in common."""
    first = rows[0]
    parts = [f"{first['model']} on {first['gpu']}", f"stack {first['stack']}"]
    spread = Parallelism(**{name: first.get(name, 1) for name in ("tp", "pp", "dp", "ep")})
    parts += [f"{spread.gpus} GPUs{spread.brackets()}"] if spread.gpus > 1 else []
    parts += [f"{first['weights']} weights"]
    for key in ("prompt", "generate"):
        if len({row[key] for row in rows}) == 1:
            parts.append(f"{key} {first[key]:,}")
    return ", ".join(parts)


def show(result: Predictions) -> None:
    """The verdict, the table, and what follows it."""
    out, rows = Screen(), result.rows
    out.title(title(rows))
    show_verdict(out, result.answer)
    out.table(table(rows))
    if not all(row["fits"] for row in rows):
        out.say("! does not fit in GPU or host memory")
    out.blank()
    show_rest(out, result.answer)
    labels = short_names([spec(row) for row in rows])
    about = [(f"{labels[spec(r)]}, batch {r['batch']}, prompt {r['prompt']}", r) for r in rows]
    for line in noted(about):
        out.say(line)
    out.say(grounds(rows[0]["basis"]))
