"""Requests per second that `kvsim simulate` plays, and the memory that 10^7 requests take.

    python benchmarks/serving.py [AZURE_TRACE.csv]

One core. Each case runs in a process of its own: a trace in memory is played twice and the second
run counts, since the first may compile. Speed is asked to be 200,000 requests/s at a million
requests over 50 replicas, and memory at most 2 GiB at ten million.
"""

import resource
import subprocess
import sys
import time

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces import specs
from kvsim.traces.likeness import TrafficModel
from kvsim.traces.read import load
from kvsim.traces.requests import Requests

PEERS = (
    "Peers, as measured on one core of another machine: Vidur 109 requests/s, splitwise-sim 82, "
    "inference-lab (compiled) 1,433 to 2,613 at 1,000 requests and 528 at 10,000."
)
SATURATED = 20.0  # times the trace's rate: far more than one replica carries
PER_REPLICA = 5.0  # requests per second of the generated ones


def main() -> None:
    if len(sys.argv) > 2:
        case(*sys.argv[1:])
        return
    print(PEERS)
    trace = sys.argv[1:]
    cases = [(trace[0], "1000", "1"), (trace[0], "10000", "1")] if trace else []
    cases += [("generated", f"{10**digits}", "50") for digits in (4, 5, 6, 7)]
    for some in cases:
        subprocess.run([sys.executable, __file__, *some], check=True)


def case(source: str, count: str, replicas: str) -> None:
    requests = requests_of(source, int(count), int(replicas))
    where = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))
    longest = int((requests.prompt + requests.generate).max())
    costs = StepCosts(parse("full"), where, Rules(), longest, int(requests.prompt.max()))
    runs = 2 if len(requests) < 10**7 else 1
    if runs == 1:
        simulate(requests.head(100), costs)
    for _ in range(runs):
        started = time.perf_counter()
        run = simulate(requests, costs, int(replicas))
        took = time.perf_counter() - started
    outcome = Outcome(run)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{source} {len(requests):,} requests on {replicas}: {took:.2f} s, "
        f"{len(requests) / took:,.0f} requests/s, busy {outcome.busy_share:.0%}, "
        f"mean batch {outcome.mean_batch:.0f}, {int(outcome.finished.sum()):,} finished, "
        f"{most / 2**30:.2f} GiB at most",
        flush=True,
    )


def requests_of(source: str, count: int, replicas: int) -> Requests:
    if source == "generated":
        workload = TrafficModel(specs.arrivals("poisson"), PER_REPLICA * replicas, specs.DEFAULT)
        return workload.draw(1, count, None)
    return load(source).requests.head(count).scaled(SATURATED)


if __name__ == "__main__":
    main()
