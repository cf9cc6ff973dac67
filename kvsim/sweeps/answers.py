"""What the planner and the serving simulator answer to one case of a sweep."""

from typing import Any

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.options import ENGINE_SHARE
from kvsim.planner.alternatives import GPUS_PER_REPLICA
from kvsim.planner.fleet.answer import make_capacity
from kvsim.planner.fleet.demand import FleetTargets, traffic_of
from kvsim.planner.fleet.offers import CapacityQuestion, FleetLimits, Rentable
from kvsim.planner.plan import make_plan
from kvsim.planner.question import Admission, PlanLimits, Workload
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, Targets
from kvsim.serving.rules import Rules
from kvsim.serving.servable import within_context
from kvsim.serving.simulate import simulate
from kvsim.sweeps.cases import COLUMNS, SEPARATOR, Case, Columns, no_answer
from kvsim.techniques import parse


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
        "technique": str(choice.technique), "batch": choice.batch, "ttft_s": choice.ttft_s,
        "tpot_s": choice.tpot_s, "output_tok_s": choice.output_tok_s,
        "gpu_bytes": choice.gpu_bytes, "host_bytes": choice.host_bytes,
        "usd_per_million_tokens": choice.usd_per_million(), "reason": "",
    }  # fmt: skip


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
        traffic=traffic_of(requests), rentable=rentable, admission=Admission(), targets=targets,
        limits=FleetLimits(), rules=Rules(prefix_caching=requests.block_ids is not None),
    )  # fmt: skip
    try:
        answer = make_capacity(question)
    except (InputError, InfeasibleError) as problem:
        return no_answer("capacity", str(problem))
    fleet = answer.fleet
    reached = answer.played.reached(targets.share)
    hosts = (fleet.kinds[j].gpu for j in answer.used if fleet.kinds[j].host)
    return {
        "fleet": fleet.name,
        "replicas": fleet.replicas.sum(), "gpus": int(fleet.total("gpus")),
        "usd_per_hour": fleet.cost, "ttft_s": reached.ttft, "tpot_s": reached.tpot,
        "relaxation_usd_per_hour": answer.bound, "likelihood": answer.sure.likely["both"],
        "hosts_used": SEPARATOR.join(dict.fromkeys(hosts)),
        "reason": answer.shortfall,
    }  # fmt: skip
