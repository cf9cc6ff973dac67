"""What each kind of sweep computes at its points, as columns; what cannot be has a reason."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.engine.timeline import makespan
from kvsim.errors import InfeasibleError, InputError
from kvsim.graph import Array, Number, Point
from kvsim.limits import ENGINE_SHARE
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.models.model import Model
from kvsim.planner.admit import Admission
from kvsim.planner.fleet.arrays import FleetLimits
from kvsim.planner.fleet.capacity import make_capacity
from kvsim.planner.fleet.question import CapacityQuestion
from kvsim.planner.fleet.shortlist import Rentable
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import traffic_of
from kvsim.planner.plan import make_plan
from kvsim.planner.workload import PlanLimits, Workload
from kvsim.prediction.generate import round_seconds
from kvsim.prediction.memory import phases, prefill_point, tier_bytes
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, Targets
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.sweeps.spec import SPREAD, Value
from kvsim.techniques import parse
from kvsim.techniques.base import Technique
from kvsim.traces.requests import Requests

DEGREES = (1, 2, 4, 8)
AT_ONCE = 2**13  # points evaluated together: intermediate arrays stay in the CPU's cache


@dataclass(frozen=True)
class Points:
    """A stretch of the points of two axes, the last of which varies first.

    It is sent to other processes, so it holds axes and not the points.

    Attributes
    ----------
    batches, contexts
        The axes; of batches, those that occur.
    first, size
        Where the stretch begins, and its points.
    """

    batches: Array
    contexts: Array
    first: int
    size: int

    @property
    def spread(self) -> tuple[Array, Array]:
        """Batch and context of each point. (n,)"""
        row, column = np.divmod(np.arange(self.first, self.first + self.size), self.contexts.size)
        return self.batches[row], self.contexts[column]


def stretches(batches: Array, contexts: Array, most: int) -> Iterator[Points]:
    """All points of two axes, so many together at most."""
    width, total = contexts.size, batches.size * contexts.size
    for first in range(0, total, most):
        size = min(most, total - first)
        row, last = first // width, (first + size - 1) // width
        yield Points(batches[row : last + 1].copy(), contexts, first - row * width, size)


@dataclass(frozen=True)
class Case:
    """What a chunk is evaluated for.

    Attributes
    ----------
    values
        One value per axis that chunks are split by.
    points
        Of predictions: those of the chunk.
    """

    values: dict[str, Value]
    model: Model
    hardware: tuple[Hardware, ...]
    stack: Stack
    points: Points | None
    requests: Requests | None

    def deployment(self, gpu: int = 0, tp: int = 0) -> Deployment:
        """The model on one of the GPUs.

        Raises
        ------
        InputError
            If it cannot be divided so, or weights have no such format.
        """
        degree = tp or int(self.values["tp"])
        pp, dp, ep = (int(self.values.get(name, 1)) for name in SPREAD)
        weights = str(self.values["weights"])
        return Deployment(self.model, self.hardware[gpu], self.stack, weights, degree, pp, dp, ep)

    def number(self, name: str) -> float:
        """The value of an axis of numbers."""
        return float(self.values[name])


Columns = dict[str, Any]
COLUMNS: dict[str, dict[str, type]] = {
    "predict": {
        "batch": int, "context": int, "ttft_s": float, "tpot_s": float, "decode_tok_s": float,
        "gpu_bytes": float, "host_bytes": float, "fits": bool, "reason": str,
    },
    "plan": {
        "technique": str, "batch": int, "ttft_s": float, "tpot_s": float, "output_tok_s": float,
        "gpu_bytes": float, "host_bytes": float, "usd_per_million_tokens": float, "reason": str,
    },
    "simulate": {
        "finished": int, "refused": int, "ttft_p50_s": float, "ttft_p90_s": float,
        "ttft_p99_s": float, "tpot_p50_s": float, "tpot_p90_s": float, "tpot_p99_s": float,
        "latency_p99_s": float, "good_share": float, "goodput_per_s": float, "output_tok_s": float,
        "busy_share": float, "kv_peak_share": float, "prefix_hit_share": float, "preemptions": int,
        "usd": float, "reason": str,
    },
    "capacity": {
        "fleet": str, "replicas": int, "gpus": int, "usd_per_hour": float, "ttft_s": float,
        "tpot_s": float, "relaxation_usd_per_hour": float, "likelihood": float,
        "reason": str,
    },
}  # fmt: skip
"""The results of each kind; what does not exist is null, and the reason says why."""


def _nothing(kind: str, reason: str) -> Columns:
    """One row that says why there is nothing."""
    return {name: "" if of is str else np.nan for name, of in COLUMNS[kind].items()} | {
        "reason": reason
    }


def predicted(case: Case) -> Columns:
    """Times and memory at every batch and context.

    TTFT is of a prompt of the context's length, TPOT of a token decoded at that context.
    """
    assert case.points is not None
    batch, context = case.points.spread
    try:
        d, t = case.deployment(), parse(str(case.values["technique"]))
        reason = t.refuses(d)
    except InputError as problem:
        reason = str(problem)
    if reason:
        nothing = _nothing("predict", reason)
        return nothing | {"batch": batch, "context": context}
    parts = [
        _predicted(t, d, batch[i : i + AT_ONCE], context[i : i + AT_ONCE])
        for i in range(0, batch.size, AT_ONCE)
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
        "ttft_s": ttft, "tpot_s": tpot, "decode_tok_s": batch / tpot, "gpu_bytes": gpu,
        "host_bytes": host, "fits": fits,
    }  # fmt: skip


def planned(case: Case) -> Columns:
    """The best lossless technique, its settings and batch for equal requests."""
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
        return _nothing("plan", str(problem))
    return {
        "technique": str(choice.technique), "batch": choice.batch, "ttft_s": choice.ttft_s,
        "tpot_s": choice.tpot_s, "output_tok_s": choice.output_tok_s,
        "gpu_bytes": choice.gpu_bytes, "host_bytes": choice.host_bytes,
        "usd_per_million_tokens": choice.usd_per_million(), "reason": "",
    }  # fmt: skip


def simulated(case: Case) -> Columns:
    """A trace on equal replicas."""
    assert case.requests is not None
    requests = case.requests.scaled(case.number("rate"))
    try:
        d = case.deployment()
        costs = StepCosts(
            parse(str(case.values["technique"])), d, Rules().over(d),
            int((requests.prompt + requests.generate).max()), int(requests.prompt.max()),
        )  # fmt: skip
        run = simulate(requests, costs, int(case.values["replicas"]), str(case.values["route"]))
    except (InputError, InfeasibleError) as problem:
        return _nothing("simulate", str(problem))
    targets = Targets(case.number("ttft_target_s"), case.number("tpot_target_s"))
    row: dict[str, Any] = Outcome(run, targets).summary()
    spreads = {
        f"{name}_{part}_s": row[f"{name}_s"][part]
        for name in ("ttft", "tpot", "latency")
        for part in ("p50", "p90", "p99")
    }
    known = {**row, **spreads, "reason": ""}
    return {name: np.nan if known[name] is None else known[name] for name in COLUMNS["simulate"]}


def fleets(case: Case) -> Columns:
    """The cheapest fleet of some GPUs for a trace."""
    assert case.requests is not None
    requests = case.requests.scaled(case.number("rate"))
    rentable, problem = [], ""
    for i, hardware in enumerate(case.hardware):
        for tp in DEGREES:
            if hardware.price is None:
                return _nothing("capacity", f"{hardware.name} has no price in its profile")
            try:
                d = case.deployment(i, tp)
            except InputError as error:
                problem = str(error)
                continue
            rentable.append(Rentable(d, hardware.name, hardware.price * d.gpus))
    if not rentable:
        return _nothing("capacity", problem)
    targets = FleetTargets(case.number("ttft_target_s"), case.number("tpot_target_s"))
    question = CapacityQuestion(
        traffic=traffic_of(requests), rentable=rentable, admission=Admission(), targets=targets,
        limits=FleetLimits(), rules=Rules(prefix_caching=requests.block_ids is not None),
    )  # fmt: skip
    try:
        answer = make_capacity(question)
    except (InputError, InfeasibleError) as problem:
        return _nothing("capacity", str(problem))
    fleet = answer.fleet
    reached = fleet.played.reached(targets.share)
    some = answer.market.configurations
    return {
        "fleet": " + ".join(f"{fleet.replicas[j]} x {some[j].name}" for j in answer.used),
        "replicas": fleet.replicas.sum(), "gpus": fleet.replicas @ answer.found.offers.gpus,
        "usd_per_hour": fleet.cost, "ttft_s": reached.ttft, "tpot_s": reached.tpot,
        "relaxation_usd_per_hour": answer.found.bound, "likelihood": answer.sure.likely["both"],
        "reason": answer.shortfall,
    }  # fmt: skip


EVALUATE: dict[str, Callable[[Case], Columns]] = {
    "predict": predicted,
    "plan": planned,
    "simulate": simulated,
    "capacity": fleets,
}
