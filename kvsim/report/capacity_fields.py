"""A fleet as rows under contract names: what ``kvsim capacity --json`` has."""

from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from kvsim.graph import Array
from kvsim.machines.deployment import basis
from kvsim.machines.hardware import GIB
from kvsim.planner.fleet.answer import CapacityAnswer, OtherFleet, WhatIf
from kvsim.planner.fleet.demand import FleetTargets
from kvsim.planner.fleet.milp import scheduled_cost
from kvsim.planner.fleet.offers import Configuration
from kvsim.planner.fleet.play import Fleet, Played
from kvsim.planner.fleet.replica import find_unadmitted
from kvsim.planner.question import PlanLimits
from kvsim.report import evidence
from kvsim.report.json import Row, number
from kvsim.report.names import ranks
from kvsim.report.units import seconds
from kvsim.serving.outcome import spread
from kvsim.serving.records import MEMORIES
from kvsim.serving.servable import describe_left_out

SHORT_TRACE = 60.0  # of a trace, below which it says little of queues [s]


def make_fields(answer: CapacityAnswer, trace: str, said: str) -> Row:
    """All of a fleet under contract names; times in seconds, prices in USD per hour.

    Parameters
    ----------
    trace
        The trace as it was named.
    said
        The decision in words.
    """
    q, fleet = answer.question, answer.fleet
    mean = q.traffic.demand.mean
    deployment = q.rentable[0].deployment
    return {
        "model": deployment.model.name,
        "trace": trace,
        "requests": len(q.traffic.requests),
        "refused_by": {"context": q.left_out, "cache": answer.played.refused},
        "trace_s": q.traffic.requests.duration,
        "rate_per_s": float(mean.sum()) if q.traffic.requests.duration else None,
        "headroom": q.limits.headroom,
        "failures": q.limits.failures,
        "targets": _target_row(q.targets),
        "met": not answer.shortfall,
        "shortfall": answer.shortfall,
        "planned_for": {**_target_row(answer.targets), "load": answer.load},
        "answer": said,
        "fleet": [_replicas(answer, j) for j in answer.used],
        "usd_per_hour": fleet.cost,
        "usd_per_million_tokens": price_per_million(answer),
        "gpus": int(fleet.total("gpus")),
        "rated_power_w": _power(answer),
        "joules_per_token": _joules(answer),
        "schedule": _schedule(answer),
        "simulated": _times_row(answer.played, answer.targets),
        "class_targets": _class_rows(answer.played, answer.targets),
        "at_load": {f"{load:g}": _case(x, answer.targets) for load, x in answer.at_load.items()},
        "after_loss": {
            fleet.kinds[j].name: _case(x, answer.targets) for j, x in answer.after_loss.items()
        },
        "alternatives": [_alternative(a, fleet.cost) for a in answer.alternatives],
        "limits": [_alternative(a, fleet.cost) for a in answer.limits],
        "fleet_at_load": {
            f"{load:g}": _alternative(a, fleet.cost) for load, a in answer.at_other_loads.items()
        },
        "prices": _prices(answer),
        "sellers": _sellers(answer),
        "assumed": list_assumptions(answer),
        "certainty": _certainty(answer),
        "classes": _classes(answer),
        "considered": [_considered(answer, j) for j in range(len(answer.kinds))],
        "search": {"bound_usd_per_hour": answer.bound, "plays": answer.plays},
        "basis": basis(deployment),
    }


def _power(answer: CapacityAnswer) -> float | None:
    """Rated power of the fleet's GPUs, if that of all is known. [W]"""
    return number(answer.fleet.total("power"))


def _joules(answer: CapacityAnswer) -> float | None:
    """Energy of a generated token at the rated power, if that of all GPUs is known. [J]"""
    tokens, power = sum(g.tokens for g in answer.played.groups), _power(answer)
    return power * answer.played.duration / tokens if tokens and power is not None else None


def _replicas(answer: CapacityAnswer, j: int) -> Row:
    """One kind of replica of the fleet."""
    fleet, played = answer.fleet, answer.played
    x = fleet.kinds[j]
    d, groups = x.costs.deployment, [g for g in played.groups if g.kind == j]
    mine = played.kind == j
    asked = len(answer.question.traffic.requests)
    return {
        "name": x.name,
        "replicas": int(fleet.replicas[j]),
        "reserved": int(fleet.reserved[j]),
        "gpu": x.gpu,
        **ranks(d),
        "weights": d.weights,
        "technique": x.technique,
        "max_seqs": x.costs.rules.max_seqs,
        "max_tokens": x.costs.rules.max_tokens,
        "route": x.route,
        "max_model_len": x.costs.longest,
        "gpu_memory_utilization": answer.question.utilisation,
        "kv_cache_tokens": _kv_tokens(x),
        "host_cache_bytes": x.costs.rules.host_cache,
        "nvme_cache_bytes": x.costs.rules.nvme_cache,
        "engines": {"prefill": x.apart.prefill, "decode": x.apart.decode} if x.apart else None,
        "usd_per_hour": _paid(answer, j),
        "share_of_requests": float(mine.sum() / asked),
        "busy_share": _mean([(g.busy, g.count) for g in groups]),
        "most_running": max((g.most_running for g in groups), default=0),
        "prefix_hit_share": _mean([(sum(g.hits.values()), g.requests) for g in groups]),
        "prefix_hits": {
            name: _mean([(g.hits[name], g.requests) for g in groups]) for name in MEMORIES
        },
        "simulated": _times_row(played, answer.targets, mine),
    }


def _paid(answer: CapacityAnswer, j: int) -> float:
    """What the replicas of one kind cost; with a schedule the mean of the day. [USD/h]"""
    q, fleet = answer.question, answer.fleet
    if q.schedule is None:
        return float(fleet.replicas[j] * fleet.kinds[j].rent)
    mine = np.arange(fleet.running.shape[1]) == j
    running, reserved = fleet.running * mine, fleet.reserved * mine
    return scheduled_cost(fleet.kinds, q.traffic.demand, q.schedule, running, reserved)


def _kv_tokens(configuration: Configuration) -> int:
    """Count the tokens that a replica's KV cache holds, as engines print on start."""
    costs = configuration.costs
    return int(costs.capacity / costs.room.block_bytes) * costs.rules.block_tokens


def _mean(weighted: list[tuple[float, int]]) -> float:
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total else 0.0


def _schedule(answer: CapacityAnswer) -> list[Row] | None:
    """Replicas by window; None if they always run."""
    if answer.question.schedule is None:
        return None
    hours = np.cumsum(answer.question.traffic.demand.hours)
    known = name_replicas(answer)
    return [
        {
            "until_h": float(hours[w]),
            "replicas": {known[j]: int(n) for j, n in enumerate(running) if n},
        }
        for w, running in enumerate(answer.fleet.running)
    ]


def _alternative(a: OtherFleet, cost: float) -> Row:
    if a.fleet is None:
        return {"name": a.label, "fleet": None, "usd_per_hour": None, "reason": a.reason}
    return {
        "name": a.label,
        "fleet": a.fleet.name,
        "usd_per_hour": a.fleet.cost,
        "dearer": a.fleet.cost / cost - 1,
    }


def list_assumptions(answer: CapacityAnswer) -> list[str]:
    """List what is assumed of contexts, and of memories and links besides the GPU's.

    Parameters
    ----------
    answer
        Answer of the capacity planner.

    Returns
    -------
    list of str
        Sentences.
    """
    extras, said = answer.question.extras, []
    some = [answer.fleet.kinds[j] for j in answer.used]
    rules = [x.costs.rules for x in some if x.tiers]
    model, most = some[0].costs.deployment.model, some[0].costs.rules.max_model_len
    lasts = answer.question.traffic.requests.duration
    if 0 < lasts < SHORT_TRACE:
        said.append(
            f"The trace lasts only {seconds(lasts)}: longer queues are not seen, so the same "
            "rate over a longer time may need more replicas."
        )
    left_out = answer.question.left_out
    if left_out:
        refused = describe_left_out(left_out, model, most)
        said.append(f"Requests that the engine would refuse: {refused}.")
    q = answer.question
    none = PlanLimits(np.inf, np.inf, loss=q.largest_loss)
    each = (x.deployment for x in q.rentable)
    for name, option in find_unadmitted(each, q.traffic.requests, none, q.admission).items():
        said.append(f"{name}, named with --only, was not considered: {option} would admit it.")
    if any(r.host_cache for r in rules):
        said.append(
            f"Assumed: {extras.host / GIB:.0f} GiB of host memory for prefix blocks per GPU "
            "(--host-cache), free of charge."
        )
    told: dict[str, None] = {}
    for x in some:
        costs, cached = x.costs, bool(x.costs.rules.host_cache)
        told |= dict.fromkeys(
            evidence.list_assumptions_of_techniques(costs.deployment, [costs.technique], cached)
        )
    said += [f"Assumed: {line}." for line in told]
    if any(r.nvme_cache for r in rules):
        one = next(r for r in rules if r.nvme_cache)
        said.append(
            f"Assumed: one NVMe drive per replica, {one.nvme_read / 1e9:g} GB/s read and "
            f"{one.nvme_write / 1e9:g} written (--nvme-read, --nvme-write), free of charge."
        )
    if any(x.apart for x in some):
        said.append(
            f"Assumed: KV caches move at {extras.nic / 1e9:g} GB/s per engine (--nic), at no load "
            "on the receiver."
        )
    return said


def _sellers(answer: CapacityAnswer) -> Row:
    """Whose prices these are, and the cheapest fleet at those of every other seller."""
    asked = {
        x.gpu: {"usd_per_gpu_hour": number(x.price / x.deployment.gpus), "source": x.source}
        for x in answer.question.rentable
    }
    return {
        "prices": asked,
        "others": [
            {"seller": seller, "name": fleet.name, "usd_per_hour": fleet.cost}
            for seller, fleet in answer.at_sellers.items()
        ],
    }


def _prices(answer: CapacityAnswer) -> list[Row]:
    """For every GPU alone, the price of one GPU at which it would be as cheap as the fleet.

    None with a schedule, as GPUs are not paid all the time then.
    """
    found: list[Row] = []
    for a in [] if answer.question.schedule else answer.alternatives:
        gpu, alone = a.label.removesuffix(" alone"), a.fleet
        if alone is None or gpu == a.label:
            continue
        price = _break_even(answer.fleet, alone, gpu)
        if price is not None:
            now = alone.cost / alone.total("gpus")
            found.append({"gpu": gpu, "usd_per_gpu_hour": float(now), "as_cheap_at": price})
    return found


def _break_even(fleet: Fleet, alone: Fleet, gpu: str) -> float | None:
    """Price of one GPU at which a fleet of it alone costs as much as another fleet. [USD/h]"""
    used = [(int(n), x) for n, x in zip(fleet.replicas, fleet.kinds, strict=True) if n]
    rest = sum(n * x.rent for n, x in used if x.gpu != gpu)
    more = alone.total("gpus") - sum(n * x.gpus for n, x in used if x.gpu == gpu)
    return rest / more if rest > 0 and more > 0 else None


def _certainty(answer: CapacityAnswer) -> Row:
    sure, targets = answer.sure, answer.targets.each
    asked = [name for name in ("ttft", "tpot") if any(isfinite(getattr(x, name)) for x in targets)]
    return {
        "asked": answer.question.sure,
        "spread": sure.spread.sigma,
        "source": sure.spread.source,
        "days": sure.days,
        "ttft_met": sure.likely["ttft"] if "ttft" in asked else None,
        "tpot_met": sure.likely["tpot"] if "tpot" in asked else None,
        "both_met": sure.likely["both"],
    }


def _classes(answer: CapacityAnswer) -> list[Row]:
    traffic, share = answer.question.traffic, answer.fleet.share.mean(axis=0)
    known = name_replicas(answer)
    return [
        {
            "prompt": float(traffic.prompt[c]),
            "generate": float(traffic.generate[c]),
            "reuse": float(traffic.reuse[c]),
            "rate_per_s": float(traffic.demand.mean[c]),
            "served_by": {known[j]: float(s) for j, s in enumerate(share[c]) if s > 1e-9},
        }
        for c in range(traffic.classes)
    ]


def _considered(answer: CapacityAnswer, j: int) -> Row:
    kind, alone = answer.kinds[j], answer.alone[j]
    return {
        "name": kind.choices[0].name,
        "usd_per_hour": kind.rent,
        "replicas_alone": number(alone),
        "usd_per_hour_alone": number(alone * kind.rent),
        "kv_cache_tokens": _kv_tokens(kind.choices[0]),
    }


def _target_row(targets: FleetTargets) -> Row:
    """Make the row of the targets of all requests."""
    return {
        "ttft_s": number(targets.ttft),
        "tpot_s": number(targets.tpot),
        "percentile": 100 * targets.share,
    }


def _case(case: WhatIf, targets: FleetTargets) -> Row:
    """Make the row of the fleet at another load; met: as surely as asked."""
    times = _times_row(case.played, targets)
    return {**times, "within": times["met"], "met": case.met, "probability": case.likely}


def _times_row(played: Played, targets: FleetTargets, rows: NDArray[np.bool_] | None = None) -> Row:
    """Make the row of what requests waited, and whether that is within the targets."""
    some = slice(None) if rows is None else rows
    reached = played.reached(targets.share, rows)
    ttft, tpot = played.ttft[some], played.tpot[some]

    def within(values: Array, value: float) -> float | None:
        return None if np.isnan(values).all() else number(value)

    return {
        "met": played.meets(targets, rows),
        "ttft_s": {**spread(ttft), "at_target": within(ttft, reached.ttft)},
        "tpot_s": {**spread(tpot), "at_target": within(tpot, reached.tpot)},
        "latency_s": spread(played.latency[some]),
        "good_share": played.good_share(targets, rows),
        "refused": int(np.isinf(ttft).sum()),
    }


def _class_rows(played: Played, targets: FleetTargets) -> list[Row]:
    """Make a row for each class of prompts with targets of its own."""
    if not targets.longer:
        return []
    found, bounds = [], [x.above for x in targets.each]
    longest = dict(pairwise(bounds))
    for rows, target in played.by_class(targets):
        reached = played.reached(targets.share, rows)
        found.append(
            {
                "prompt_above": target.above,
                "prompt_up_to": longest.get(target.above),
                "requests": int(rows.sum()),
                "targets": {"ttft_s": number(target.ttft), "tpot_s": number(target.tpot)},
                "ttft_s": number(reached.ttft),
                "tpot_s": number(reached.tpot),
                "met": played.meets(targets, rows),
            }
        )
    return found


def name_replicas(answer: CapacityAnswer) -> list[str]:
    """Name every kind of replica of the fleet.

    Parameters
    ----------
    answer
        Answer of the capacity planner.

    Returns
    -------
    list of str
        Names in the order of the fleet's kinds.
    """
    return [x.name for x in answer.fleet.kinds]


def price_per_million(answer: CapacityAnswer) -> float | None:
    """Compute the price of a million generated tokens in the trace.

    Parameters
    ----------
    answer
        Answer of the capacity planner.

    Returns
    -------
    float or None
        Price; None if nothing was generated. [USD]
    """
    tokens = sum(g.tokens for g in answer.played.groups)
    hours = answer.played.duration / 3600
    return answer.fleet.cost * hours / tokens * 1e6 if tokens else None
