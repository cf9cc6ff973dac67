"""Results as plain dictionaries with the field names of the command-line contract."""

from collections.abc import Iterator, Mapping
from csv import DictWriter
from dataclasses import fields
from io import StringIO
from json import dumps
from typing import Any

import numpy as np

from kvsim.machines.basis import basis
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import hardware_names, load_hardware, load_stack, stack_names
from kvsim.models.configs import catalogue_entry, load_model, model_names
from kvsim.planner.options import GIB
from kvsim.planner.plan import LABELS, Limits, Plan
from kvsim.prediction.explain import bound_by, breakdown
from kvsim.prediction.generate import Prediction, one
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.base import Technique
from kvsim.techniques.settings import plain

Row = dict[str, Any]

NOT_MODELLED = (
    "requests that arrive one by one, and unequal lengths within a batch",
    "the quality of lossy techniques",
    "power caps, clocks that fall under load, and other jobs on the GPU or its host",
    "memory fragmentation, NUMA placement, pipeline and expert parallelism",
)


def number(value: Any) -> float | int | None:
    """A JSON number: None for what does not exist, whole where it is whole."""
    scalar = float(np.ravel(value)[0])
    if not np.isfinite(scalar):
        return None
    return int(scalar) if scalar.is_integer() else scalar


def params(t: Technique) -> Row:
    """Settings of a technique."""
    return {k: v if isinstance(v, bool) else plain(v) for k, v in t.settings.items()}


def predictions(p: Prediction) -> Iterator[Row]:
    """One row per batch of a prediction."""
    for i in range(p.batch.size):
        yield prediction(one(p, i))


def prediction(p: Prediction) -> Row:
    """The row of a prediction at one batch."""
    t, d, batch = p.technique, p.deployment, float(p.batch[0])
    middle = decode_point(batch, p.prompt, p.generate, p.generate // 2)
    read = prefill_point(batch, p.prompt, p.generate)
    return {
        "model": d.model.name,
        "gpu": d.hardware.name,
        "stack": d.stack.name,
        "tp": d.tp,
        "weights": d.weights,
        "technique": t.name,
        "params": params(t),
        "batch": number(p.batch),
        "prompt": p.prompt,
        "generate": p.generate,
        "ttft_s": number(p.ttft_s),
        "tpot_s": number(p.tpot_s),
        "prefill_s": number(p.prefill_s),
        "decode_s": number(p.decode_s),
        "decode_tok_s": number(p.decode_tok_s),
        "output_tok_s": number(p.output_tok_s),
        "usd_per_million_tokens": number(p.usd_per_million()),
        "gpu_bytes": number(p.gpu_bytes),
        "host_bytes": number(p.host_bytes),
        "fits": bool(p.fits[0]),
        "max_batch": number(p.max_batch),
        "bound_by": bound_by(t, d, middle),
        "basis": basis(d),
        "breakdown": {
            "prefill_s": _numbers(breakdown((t.prefill(d, read),), d)),
            "round_s": _numbers(breakdown(t.cycle(d, middle).steps, d)),
            **{f"{tier}_bytes": _numbers(buffers) for tier, buffers in p.buffers.items()},
        },
        "notes": list(notes(p)),
    }


def _numbers(values: Mapping[str, Any]) -> Row:
    return {k: n for k, v in values.items() if (n := number(v))}


def notes(p: Prediction) -> Iterator[str]:
    """What a reader should know about this prediction."""
    d = p.deployment
    yield from d.model.notes
    if p.prompt + p.generate > d.model.max_context:
        yield (
            f"{p.prompt + p.generate} tokens are beyond the {d.model.max_context} that "
            f"{d.model.name} was made for"
        )
    last = decode_point(float(p.batch[0]), p.prompt, p.generate, p.generate - 1)
    yield from p.technique.notes(d, last)
    if p.technique.assumes:
        yield f"the speed of {p.technique.name} assumes {p.technique.assumes}"


def plan(result: Plan) -> Row:
    """The answer of ``kvsim plan``."""
    chosen = prediction(result.choice)
    spec = {"technique": chosen["technique"], "params": chosen["params"]}
    layers = [{**spec, "first": 0, "count": result.choice.deployment.model.layers}]
    limits = result.limits
    return {
        "choice": {**spec, "batch": chosen["batch"], "layers": layers},
        "objective": result.objective,
        "predicted": chosen,
        "baseline": prediction(result.baseline) if result.baseline else None,
        "alternatives": [
            {
                **prediction(p),
                "lossless": p.technique.exact,
                "allowed": bool(allowed),
                "needs": list(needs(p.technique, limits)),
            }
            for p, allowed in result.alternatives
        ],
        "limits": {k: number(v) for k, v in vars(limits).items()},
        "binding": [
            {"limit": name, "means": LABELS[name], "gain_without": gain}
            for name, gain in result.binding.items()
        ],
        "prices": result.prices,
        "solver": {
            "status": result.solver.status,
            "gap": result.solver.gap,
            "seconds": result.solver.seconds,
            "options": len(result.table.technique),
        },
        "basis": basis(result.choice.deployment),
        "not_modelled": list(NOT_MODELLED),
    }


def needs(t: Technique, limits: Limits) -> Iterator[str]:
    """Options of the command line that would admit a technique."""
    if not t.exact and limits.loss < 1:
        yield "--lossy"
    if t.assumes and limits.assumed < 1:
        yield "--acceptance"


def entries(answer: Row) -> list[tuple[str, Row]]:
    """What ``kvsim plan`` shows side by side, each with its standing; none of it twice."""
    chosen, base = answer["predicted"], answer["baseline"]
    shown = [("choice", chosen)]
    if base and base["technique"] != chosen["technique"]:
        shown.append(("full KV", base))
    for row in answer["alternatives"]:
        if base is None or spec(row) != spec(base) or row["batch"] != base["batch"]:
            shown.append((f"needs {' '.join(row['needs'])}" if row["needs"] else "or", row))
    return shown


def spec(row: Row) -> str:
    """Technique with its settings, with spaces where a line may end."""
    given = ", ".join(f"{k}={plain(v)}" for k, v in row["params"].items())
    return f"{row['technique']} {given}".strip()


def csv(rows: list[Row]) -> str:
    """Rows as CSV; what is neither text nor a number is written as JSON, None as nothing."""
    out = StringIO()
    writer = DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        nested = (bool, dict, list)
        writer.writerow({k: dumps(v) if isinstance(v, nested) else v for k, v in row.items()})
    return out.getvalue()


def error(grounds: Row) -> str:
    """The error known for a basis, in words where none is."""
    return str(grounds["error"]) or "not measured yet"


def models() -> list[Row]:
    """The model catalogue."""
    rows = []
    for name in model_names():
        m, entry = load_model(name), catalogue_entry(name)
        rows.append(
            {
                "name": name,
                "hf_id": entry["hf_id"],
                "family": m.family,
                "parameters": m.parameters,
                "active_parameters": m.active_parameters,
                "layers": m.layers,
                "hidden": m.hidden,
                "heads": m.heads,
                "kv_heads": m.cached_heads,
                "max_context": m.max_context,
                "kv_bytes_per_token": 2 * m.kv_width * m.layers,
                "source": entry["source"],
            }
        )
    return rows


def gpus() -> list[Row]:
    """The hardware profiles."""
    return [gpu(load_hardware(name)) for name in hardware_names()]


def gpu(h: Hardware) -> Row:
    """One hardware profile."""
    return {
        "name": h.name,
        "title": h.title,
        "basis": h.basis,
        "gpu_memory_bytes": h.gpu_memory,
        "hbm_bytes_per_s": h.links["hbm"].bandwidth,
        "fp16_flop_per_s": h.flops["fp16"],
        "h2d_bytes_per_s": h.links["h2d"].bandwidth,
        "d2h_bytes_per_s": h.links["d2h"].bandwidth,
        "usd_per_hour": h.price,
        "notes": list(h.notes),
        "sources": dict(h.sources),
    }


def techniques() -> list[Row]:
    """The techniques with their parameters."""
    rows = []
    for name, kind in TECHNIQUES.items():
        default = kind()
        about, _, references = (kind.__doc__ or "").partition("References\n    ----------\n")
        rows.append(
            {
                "name": name,
                "summary": " ".join(about.replace("``", "").split()),
                "lossless": default.exact,
                "assumes": default.assumes,
                "parameters": [
                    {
                        "name": f.name,
                        "default": params(default)[f.name],
                        "meaning": f.metadata["text"],
                    }
                    for f in fields(kind)
                ],
                "source": " ".join(references.split()),
            }
        )
    return rows


def stacks() -> list[Row]:
    """The software stacks."""
    rows = []
    for name in stack_names():
        s = load_stack(name)
        rows.append({"name": name, "title": s.title, "basis": s.basis, "error": s.error})
    return rows


def deployment(d: Deployment) -> str:
    """A deployment in one line."""
    gpus = f"{d.tp} x " if d.tp > 1 else ""
    return f"{d.model.name} on {gpus}{d.hardware.title}, stack {d.stack.name}, {d.weights} weights"


def gib(size: Any, digits: int = 1) -> str:
    """Bytes for people."""
    return f"{float(np.ravel(size)[0]) / GIB:,.{digits}f}"
