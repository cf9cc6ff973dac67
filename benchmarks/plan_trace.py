"""`kvsim plan --trace` against every candidate simulated, 3 GPUs x 2 models.

    python -m benchmarks.plan_trace TRACE [REQUESTS]

The trace is scaled to three quarters of what full KV can carry on one replica, by the planner's
own estimate. For each objective and deployment: the planner's choice and the best of all
candidates, their objectives, and the seconds that either took. Below 1.02 is asked.
"""

import sys
import time

import numpy as np

from kvsim.errors import InfeasibleError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.planner.question import Admission, PlanLimits
from kvsim.planner.replica import (
    ReplicaCapacity,
    ReplicaTargets,
    group_requests,
    list_step_costs,
    load_coefficients,
    solve_replica,
)
from kvsim.planner.trace import make_trace_plan, simulate_choice
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests

MODELS = ("llama2-7b", "llama3-8b")
GPUS = ("a6000", "a100-80g", "h100")
SHARE = 0.75
CASES = (  # objective, lossy techniques admitted, TTFT and TPOT targets [s]
    ("throughput", 1.0, 2.0, 0.1),
    ("throughput", 0.0, np.inf, np.inf),
    ("latency", 0.0, np.inf, np.inf),
    ("throughput", 0.0, 0.5, np.inf),  # the longest prompts alone take longer
)


def main() -> None:
    requests = load(sys.argv[1]).requests
    if len(sys.argv) > 2:
        requests = requests.head(int(sys.argv[2]))
    worst = 1.0
    for model in MODELS:
        for gpu in GPUS:
            d = Deployment(load_model(model), load_hardware(gpu), load_stack("fused"))
            share = requests.scaled(SHARE / load_of_full(d, requests))
            for case in CASES:
                worst = max(worst, compare(d, share, *case))
    print(f"worst ratio {worst:.4f}")


def load_of_full(d: Deployment, requests: Requests) -> float:
    limits = limits_of(d, 0.0, np.inf, np.inf)
    options = list_step_costs(d, requests, limits, Rules(), Admission((parse("full"),)))
    loads = load_coefficients(options, group_requests(requests))
    return solve_replica(loads, ReplicaTargets(max_seqs=Rules().max_seqs)).load


def limits_of(d: Deployment, loss: float, ttft: float, tpot: float) -> PlanLimits:
    return PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory, ttft, tpot, loss)


def compare(
    d: Deployment, requests: Requests, objective: str, loss: float, ttft: float, tpot: float
) -> float:
    limits = limits_of(d, loss, ttft, tpot)
    began = time.perf_counter()
    try:
        plan = make_trace_plan(d, requests, objective, limits, Admission(), Rules())
        value, name = plan.choice.measures()[objective], str(plan.choice.techniques[0])
    except InfeasibleError:
        value, name = np.inf, "none within the limits"
    planned = time.perf_counter()
    best, other = best_of_all(d, requests, objective, limits)
    ratio = 1.0 if value == best else value / best
    print(
        f"{d.model.name} {d.hardware.name} {objective} loss {loss:.0f} TTFT {ttft} TPOT {tpot}: "
        f"{name} {value:.5g}; best {other} {best:.5g}; ratio {ratio:.4f}; "
        f"{planned - began:.1f} s against {time.perf_counter() - planned:.1f} s",
        flush=True,
    )
    return ratio


def best_of_all(
    d: Deployment, requests: Requests, objective: str, limits: PlanLimits
) -> tuple[float, str]:
    options = list_step_costs(d, requests, limits, Rules(), Admission())
    classes = group_requests(requests)
    loads = load_coefficients(options, classes)
    targets = ReplicaTargets(limits.ttft, limits.tpot, max_seqs=Rules().max_seqs)
    best, name = np.inf, "none within the limits"
    for i, costs in enumerate(options):
        one = ReplicaCapacity((i,) * len(classes), 0.0, 0.0, 0.0)
        found = simulate_choice(requests, options, loads, classes, one, targets).measures()
        within = found["ttft"] <= limits.ttft and found["tpot"] <= limits.tpot
        if within and not found["refused"] and found[objective] < best:
            best, name = found[objective], str(costs.technique)
    return best, name


if __name__ == "__main__":
    main()
