"""Division of a sweep into chunks, and computation of each chunk's Parquet file.

A chunk carries everything that its evaluation needs, so that any process with the same version of
kvsim computes the same bytes from it. The planner and the simulator are imported where a case needs
them: a worker that predicts starts without either.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np

from kvsim.engine.timeline import makespan
from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Number, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.machines.profiles import load_hardware, load_stack, price_together
from kvsim.models.configs import load_model
from kvsim.models.model import Model
from kvsim.options import ENGINE_SHARE
from kvsim.prediction.generate import round_seconds
from kvsim.prediction.memory import phases, prefill_point, tier_bytes
from kvsim.sweeps.spec import POINT_AXES, SPREAD, Spec, Value
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.traces.read import load
from kvsim.traces.requests import Requests
from kvsim.traces.resample import MOST_REQUESTS, scale_clients


@frozen
class Points:
    """Consecutive points of the grid of batches and contexts, in which contexts vary faster.

    Points are sent to other processes, so they are stored as two axes and a range.

    Attributes
    ----------
    batches, contexts
        Values of the axes; of batches, only those that occur.
    first, size
        Index of the first point in the grid of these axes, and the number of points.
    """

    batches: Array
    contexts: Array
    first: int
    size: int

    @property
    def spread(self) -> tuple[Array, Array]:
        """Batch and context of each point. (n,) each"""
        row, column = np.divmod(np.arange(self.first, self.first + self.size), self.contexts.size)
        return self.batches[row], self.contexts[column]


def divide_points(batches: Array, contexts: Array, most: int) -> Iterator[Points]:
    """Divide the grid of two axes into ranges of limited size.

    Parameters
    ----------
    batches, contexts
        The values of the axes; contexts vary faster.
    most
        Largest number of points in a range.

    Yields
    ------
    Points
        The ranges in order; together they contain every point once.
    """
    width, total = contexts.size, batches.size * contexts.size
    for first in range(0, total, most):
        size = min(most, total - first)
        row, last = first // width, (first + size - 1) // width
        yield Points(batches[row : last + 1].copy(), contexts, first - row * width, size)


@frozen
class Case:
    """Inputs from which the results of a chunk are computed.

    Attributes
    ----------
    values
        Value of each axis that has a single value within a chunk.
    model
        The model.
    hardware
        The GPUs; several if a fleet may be made of them.
    stack
        The software stack.
    points
        Batches and contexts of a prediction; None for other kinds of sweeps.
    requests
        The trace; None for kinds of sweeps without one.
    """

    values: dict[str, Value]
    model: Model
    hardware: tuple[Hardware, ...]
    stack: Stack
    points: Points | None
    requests: Requests | None

    def deployment(self, gpu: int = 0, tp: int = 0) -> Deployment:
        """Build the deployment of the model on one of the GPUs.

        Parameters
        ----------
        gpu
            Index of the GPU in ``hardware``.
        tp
            Tensor-parallel GPUs; 0 for the value of the case.

        Returns
        -------
        Deployment
            The model, hardware and stack.

        Raises
        ------
        InputError
            If the model cannot be divided over the GPUs, or weights have no such format.
        """
        degree = tp or int(self.values["tp"])
        pp, dp, ep = (int(self.values.get(name, 1)) for name in SPREAD)
        weights = str(self.values["weights"])
        return Deployment(self.model, self.hardware[gpu], self.stack, weights, degree, pp, dp, ep)

    def number(self, name: str) -> float:
        """Look up the value of a numeric axis.

        Parameters
        ----------
        name
            The axis.

        Returns
        -------
        float
            The value, in the axis's unit.
        """
        return float(self.values[name])


SEPARATOR = "+"  # between the GPUs that a fleet may consist of
Columns = dict[str, Any]


def _columns(text: str) -> dict[str, type]:
    """Columns from words ``name:type``; a word without a type names a number."""
    types = {"": float, "int": int, "str": str, "bool": bool}
    words = (word.partition(":") for word in text.split())
    return {name: types[kind] for name, _, kind in words}


COLUMNS: dict[str, dict[str, type]] = {
    "predict": _columns(
        """batch:int context:int ttft_s tpot_s decode_tok_s gpu_bytes host_bytes fits:bool
        reason:str"""
    ),
    "plan": _columns(
        """technique:str batch:int ttft_s tpot_s output_tok_s gpu_bytes host_bytes
        usd_per_million_tokens reason:str"""
    ),
    "simulate": _columns(
        """finished:int refused:int ttft_p50_s ttft_p90_s ttft_p99_s tpot_p50_s tpot_p90_s
        tpot_p99_s latency_p99_s good_share goodput_per_s output_tok_s busy_share kv_peak_share
        prefix_hit_share preemptions:int usd hosts_used:str reason:str"""
    ),
    "capacity": _columns(
        """fleet:str replicas:int gpus:int usd_per_hour ttft_s tpot_s relaxation_usd_per_hour
        likelihood hosts_used:str reason:str"""
    ),
}
"""Result columns of each kind of sweep. Missing results are null, and ``reason`` says why.

``hosts_used`` names the GPUs whose host memory holds caches, separated by ``SEPARATOR``.
"""


def no_answer(kind: str, reason: str) -> Columns:
    """Build the row of a case without an answer.

    Parameters
    ----------
    kind
        A key of ``COLUMNS``.
    reason
        Why there is no answer.

    Returns
    -------
    dict
        Empty texts and NaN by column, and the reason.
    """
    empty = {name: "" if of is str else np.nan for name, of in COLUMNS[kind].items()}
    return empty | {"reason": reason}


CHUNK_POINTS = 2**15  # points of a chunk at most


@frozen
class SweepChunk:
    """The unit of work of a sweep: one value of every axis except those evaluated together.

    Attributes
    ----------
    index
        Position of the chunk in the sweep.
    kind
        Kind of the sweep: a key of ``COLUMNS``.
    case
        Inputs of the evaluation.
    """

    index: int
    kind: str
    case: Case

    @property
    def points(self) -> int:
        """Number of points in the chunk."""
        return 1 if self.case.points is None else self.case.points.size


def divide_sweep(spec: Spec) -> Iterator[SweepChunk]:
    """Divide a sweep into chunks.

    Models, profiles and traces are read once each.

    Parameters
    ----------
    spec
        The sweep.

    Yields
    ------
    SweepChunk
        The chunks in order.

    Raises
    ------
    InputError
        If a name is unknown or a file cannot be read.
    """
    model, hardware = lru_cache(None)(load_model), lru_cache(None)(load_hardware)
    stack = lru_cache(None)(load_stack)
    trace = lru_cache(4)(lambda name: load(name).requests)
    index = 0
    for values in spec.combinations():
        named = {name: str(value) for name, value in values.items()}
        gpus = named["gpu"].split(SEPARATOR) if spec.kind == "capacity" else [named["gpu"]]
        for points in _points(spec):
            case = Case(
                values=values,
                model=model(named["model"]),
                hardware=tuple(hardware(gpu) for gpu in gpus),
                stack=stack(named["stack"]),
                points=points,
                requests=trace(named["trace"]) if "trace" in named else None,
            )
            yield SweepChunk(index, spec.kind, case)
            index += 1


def check(spec: Spec) -> None:
    """Refuse a sweep whose models, profiles, techniques or traces cannot be read.

    Parameters
    ----------
    spec
        The sweep.

    Raises
    ------
    InputError
        Naming the first of them.
    """
    readers: dict[str, Callable[[str], object]] = {
        "model": load_model,
        "stack": load_stack,
        "technique": parse,
        "trace": load,
    }
    for axis, reader in readers.items():
        for value in spec.axes.get(axis, ()):
            reader(str(value))
    for value in spec.axes["gpu"]:
        several = str(value).split(SEPARATOR) if spec.kind == "capacity" else [str(value)]
        for gpu in several:
            load_hardware(gpu)


def _points(spec: Spec) -> Iterator[Points | None]:
    """Points of each chunk of a prediction; other kinds of sweeps have one chunk without points."""
    if spec.kind != "predict":
        yield None
        return
    batches, contexts = (np.array(spec.axes[name], float) for name in POINT_AXES)
    yield from divide_points(batches, contexts, CHUNK_POINTS)


def count(spec: Spec) -> int:
    """Count the chunks of a sweep.

    Parameters
    ----------
    spec
        The sweep.

    Returns
    -------
    int
        Number of chunks.
    """
    several = sum(1 for _ in islice(_points(spec), 10**6))
    return several * len(spec.combinations())


CHOSEN = ("batch", "ttft_s", "tpot_s", "output_tok_s", "gpu_bytes", "host_bytes")
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
    times = {"ttft_s": ttft, "tpot_s": tpot, "decode_tok_s": batch / tpot}
    return times | {"gpu_bytes": gpu, "host_bytes": host, "fits": fits}


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
        **{name: getattr(choice, name) for name in CHOSEN},
        "technique": str(choice.technique),
        "usd_per_million_tokens": choice.usd_per_million(),
        "reason": "",
    }


def scale_trace(case: Case) -> Requests:
    """Scale the number of clients of a case's trace, as ``kvsim simulate --rate`` does.

    Parameters
    ----------
    case
        The case, with a trace and a value of the axis ``rate``.

    Returns
    -------
    Requests
        The trace with ``rate`` times as many clients.

    Raises
    ------
    InputError
        If no request is left, or there are too many to simulate.
    """
    assert case.requests is not None
    rate, count = case.number("rate"), len(case.requests)
    if rate * count > MOST_REQUESTS:
        raise InputError(f"rate {rate:g}: over {MOST_REQUESTS:,} requests; give a smaller one")
    some = scale_clients(case.requests, rate)[0]
    if not len(some):
        raise InputError(f"rate {rate:g}: leaves none of {count:,} requests; give a larger one")
    return some


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

    try:
        d, requests = case.deployment(), scale_trace(case)
        technique = parse(str(case.values["technique"]))
        rules = Rules(max_seqs=0, max_tokens=0).scale_to(d)  # the engine's own limits
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

    try:
        requests = scale_trace(case)
    except InputError as error:
        return no_answer("capacity", str(error))
    rentable, problem = [], ""
    for i, hardware in enumerate(price_together(case.hardware)):
        for tp in GPUS_PER_REPLICA:
            if hardware.price is None:
                return no_answer("capacity", f"no price of {hardware.name} is known")
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
        rules=Rules(max_seqs=0, max_tokens=0, prefix_caching=requests.block_ids is not None),
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


def compute(chunk: SweepChunk) -> bytes:
    """Compute the results of a chunk.

    Parameters
    ----------
    chunk
        The chunk.

    Returns
    -------
    bytes
        Content of the chunk's Parquet file.
    """
    return _parquet(chunk, EVALUATORS[chunk.kind](chunk.case))


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
