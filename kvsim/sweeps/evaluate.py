"""What is computed for each chunk of a sweep, as the bytes of a Parquet file with one row group.

The planner and the simulator are imported where a case needs them: a worker that predicts starts
without either.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np

from kvsim.engine.timeline import makespan
from kvsim.errors import InfeasibleError, InputError
from kvsim.graph import Array, Number, Point
from kvsim.machines.deployment import Deployment
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.generate import round_seconds
from kvsim.prediction.memory import phases, prefill_point, tier_bytes
from kvsim.sweeps.chunks import COLUMNS, SEPARATOR, Case, Columns, SweepChunk, no_answer
from kvsim.sweeps.plugins import install
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.version import __version__

POINTS_PER_CALL = 2**13  # points evaluated together: intermediate arrays stay in the CPU's cache


def predict_case(case: Case) -> Columns:
    """Predict times and memory at every batch and context of a case.

    TTFT is of a prompt of the context's length, TPOT of a token decoded at that context.

    Parameters
    ----------
    case
        The model, card, technique and points.

    Returns
    -------
    dict
        Arrays by the columns of ``predict``; the reason says why a case has no predictions.
    """
    assert case.points is not None
    batch, context = case.points.spread
    try:
        d, t = case.deployment(), parse(str(case.values["technique"]))
        reason = t.refuses_released(d)
    except InputError as problem:
        reason = str(problem)
    if reason:
        none = no_answer("predict", reason)
        return none | {"batch": batch, "context": context}
    parts = [
        _predicted(t, d, batch[i : i + POINTS_PER_CALL], context[i : i + POINTS_PER_CALL])
        for i in range(0, batch.size, POINTS_PER_CALL)
    ]
    found: Columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    whole = batch % t.tiles() == 0
    for name in ("ttft_s", "tpot_s", "decode_tok_s", "gpu_bytes", "host_bytes", "fits"):
        found[name] = np.where(whole, found[name], np.nan)
    return found | {"batch": batch, "context": context, "reason": ""}


def _predicted(
    technique: Technique, deployment: Deployment, batch: Array, context: Array
) -> dict[str, Array]:
    def spread(values: Number) -> Array:
        return np.broadcast_to(np.asarray(values, float), batch.shape)

    tpot = spread(
        round_seconds(technique, deployment, Point(batch, context, 1.0, context, context + 1.0))
    )
    ttft = spread(
        makespan(technique.prefill(deployment, prefill_point(batch, context, 1.0)), deployment)
    )
    both = phases(technique, deployment, batch, context, 2.0)
    gpu, host = (
        np.maximum(*(spread(tier_bytes(phase, tier)) for phase in both)) for tier in ("gpu", "host")
    )
    host = host * deployment.gpus
    fits = (gpu <= deployment.hardware.gpu_memory) & (host <= deployment.hardware.host_memory)
    return {
        "ttft_s": ttft,
        "tpot_s": tpot,
        "decode_tok_s": batch / tpot,
        "gpu_bytes": gpu,
        "host_bytes": host,
        "fits": fits,
    }


def plan_case(case: Case) -> Columns:
    """Plan one case: the best lossless technique, settings and batch for equal requests.

    Parameters
    ----------
    case
        The model, card and sizes.

    Returns
    -------
    dict
        One row by the columns of ``plan``; it says why where there is no plan.
    """
    from kvsim.planner.plan import make_plan
    from kvsim.planner.question import PlanLimits, Workload

    try:
        d = case.deployment()
        limits = PlanLimits(
            gpu_memory=ENGINE_SHARE * d.hardware.gpu_memory,
            host_memory=d.hardware.host_memory,
            ttft=case.number("ttft_target_s"),
            tpot=case.number("tpot_target_s"),
        )
        work = Workload(int(case.number("prompt")), int(case.number("generate")))
        choice = make_plan(d, work, "throughput", limits).choice
    except (InputError, InfeasibleError) as problem:
        return no_answer("plan", str(problem))
    return {
        "technique": str(choice.technique),
        "batch": choice.batch,
        "ttft_s": choice.ttft_s,
        "tpot_s": choice.tpot_s,
        "output_tok_s": choice.output_tok_s,
        "gpu_bytes": choice.gpu_bytes,
        "host_bytes": choice.host_bytes,
        "usd_per_million_tokens": choice.usd_per_million(),
        "reason": "",
    }


def simulate_case(case: Case) -> Columns:
    """Simulate one case: a trace on equal replicas.

    Parameters
    ----------
    case
        The model, card, technique and trace.

    Returns
    -------
    dict
        One row by the columns of ``simulate``; it says why where nothing can run.
    """
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Outcome, Targets
    from kvsim.serving.rules import Rules
    from kvsim.serving.simulate import simulate

    assert case.requests is not None
    requests = case.requests.scaled(case.number("rate"))
    try:
        d = case.deployment()
        technique, rules = parse(str(case.values["technique"])), Rules().scale_to(d)
        costs = StepCosts.for_requests(technique, d, rules, requests)
        run = simulate(requests, costs, int(case.values["replicas"]), str(case.values["route"]))
    except (InputError, InfeasibleError) as problem:
        return no_answer("simulate", str(problem))
    targets = Targets(case.number("ttft_target_s"), case.number("tpot_target_s"))
    row: dict[str, Any] = Outcome(run, targets).summary()
    spreads = {
        f"{name}_{part}_s": row[f"{name}_s"][part]
        for name in ("ttft", "tpot", "latency")
        for part in ("p50", "p90", "p99")
    }
    moved = max(row["utilisation"][way] for way in ("h2d", "d2h"))
    hosts = d.hardware.name if moved > 0 else ""
    known = {**row, **spreads, "hosts_used": hosts, "reason": ""}
    return {name: np.nan if known[name] is None else known[name] for name in COLUMNS["simulate"]}


def find_fleet(case: Case) -> Columns:
    """Find the cheapest fleet of one case.

    Parameters
    ----------
    case
        The model, the cards that may be rented, and the trace.

    Returns
    -------
    dict
        One row by the columns of ``capacity``; it says why where there is no fleet.
    """
    from kvsim.planner.alternatives import GPUS_PER_REPLICA
    from kvsim.planner.fleet.answer import make_capacity
    from kvsim.planner.fleet.demand import FleetTargets, traffic_of
    from kvsim.planner.fleet.offers import CapacityQuestion, FleetLimits, Rentable
    from kvsim.planner.question import Admission
    from kvsim.serving.rules import Rules
    from kvsim.serving.servable import within_context

    assert case.requests is not None
    requests = case.requests.scaled(case.number("rate"))
    rentable, problem = [], ""
    for i, hardware in enumerate(case.hardware):
        for tp in GPUS_PER_REPLICA:
            if hardware.price is None:
                return no_answer("capacity", f"{hardware.name} has no price in its profile")
            try:
                d = case.deployment(i, tp)
            except InputError as error:
                problem = str(error)
                continue
            rentable.append(Rentable(d, hardware.name, hardware.price * d.gpus))
    if not rentable:
        return no_answer("capacity", problem)
    targets = FleetTargets(case.number("ttft_target_s"), case.number("tpot_target_s"))
    try:
        requests, _ = within_context(requests, rentable[0].deployment.model)
    except InfeasibleError as refused:
        return no_answer("capacity", str(refused))
    question = CapacityQuestion(
        traffic=traffic_of(requests),
        rentable=rentable,
        admission=Admission(),
        targets=targets,
        limits=FleetLimits(),
        rules=Rules(prefix_caching=requests.block_ids is not None),
    )
    try:
        answer = make_capacity(question)
    except (InputError, InfeasibleError) as problem:
        return no_answer("capacity", str(problem))
    fleet = answer.fleet
    reached = answer.played.reached(targets.share)
    hosts = (fleet.kinds[j].gpu for j in answer.used if fleet.kinds[j].host)
    return {
        "fleet": fleet.name,
        "replicas": fleet.replicas.sum(),
        "gpus": int(fleet.total("gpus")),
        "usd_per_hour": fleet.cost,
        "ttft_s": reached.ttft,
        "tpot_s": reached.tpot,
        "relaxation_usd_per_hour": answer.bound,
        "likelihood": answer.sure.likely["both"],
        "hosts_used": SEPARATOR.join(dict.fromkeys(hosts)),
        "reason": answer.shortfall,
    }


EVALUATORS: dict[str, Callable[[Case], Columns]] = {
    "predict": predict_case,
    "plan": plan_case,
    "simulate": simulate_case,
    "capacity": find_fleet,
}
"""What answers a case of each kind."""


def compute(chunk: SweepChunk) -> tuple[str, bytes]:
    """Compute a chunk.

    Parameters
    ----------
    chunk
        The chunk; its plugins are loaded first.

    Returns
    -------
    version : str
        The version of kvsim that computed it.
    content : bytes
        The Parquet file with its rows.
    """
    install(chunk.plugins)
    return __version__, _parquet(chunk, EVALUATORS[chunk.kind](chunk.case))


def _parquet(chunk: SweepChunk, found: Columns) -> bytes:
    """A table with one row group: the axes, then the results; the same bytes for the same rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = COLUMNS[chunk.kind]
    rows = max(np.size(found[name]) for name in columns)
    arrays: dict[str, pa.Array] = {}

    def add_text(name: str, text: str) -> None:
        """A column of one text."""
        zeros = pa.array(np.zeros(rows, np.int32))
        arrays[name] = pa.DictionaryArray.from_arrays(zeros, pa.array([text], pa.string()))

    for name, value in chunk.case.values.items():
        if isinstance(value, str):
            add_text(name, value)
        else:
            arrays[name] = pa.array(np.full(rows, value))
    texts = [name for name, value in chunk.case.values.items() if isinstance(value, str)]
    for name, kind in columns.items():
        values = found[name]
        if kind is str:
            add_text(name, values)
            texts.append(name)
        else:
            spread = np.broadcast_to(np.asarray(values, float), rows)
            known = np.isfinite(spread)
            arrays[name] = pa.array(np.where(known, spread, 0.0).astype(kind), mask=~known)
    out = BytesIO()
    pq.write_table(
        pa.table(arrays), out, row_group_size=max(rows, 1), compression="zstd", use_dictionary=texts
    )
    return out.getvalue()
