"""Requests per second that `kvsim simulate` plays, its first run, and what recording use costs.

    python -m benchmarks.serving [--against CHECKOUT] [--azure TRACE.csv] [--python PYTHON]

Asked, against commit 0e83896 and for a million generated requests over 50 replicas: 1.2 times as
many requests per second in turn and with prefix blocks in host memory and on NVMe, 3 times with the
least loaded first; and the first run of 1,000 requests after an installation within 8 s of CPU
time. Runs of the two checkouts alternate, each in a process of its own on one core; the CPU time of
the best of its runs counts, so that other load on the machine disturbs both alike.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
ROUNDS = 2

ASKED = {"round-robin": 1.2, "least-loaded": 3.0, "host and NVMe": 1.2, "host, NVMe, remote": 1.2}
MEMORIES = {  # for prefix blocks [GiB]
    "host and NVMe": {"host_cache": 128, "nvme_cache": 1024},
    "host, NVMe, remote": {"host_cache": 128, "nvme_cache": 1024, "remote_cache": 4096},
}
CASE = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
try:
    from kvsim.traces.synthetic import DEFAULT, TrafficModel, parse_arrivals, parse_prefixes
except ImportError:  # 0e83896
    from kvsim.traces.likeness import TrafficModel
    from kvsim.traces.specs import DEFAULT
    from kvsim.traces.specs import arrivals as parse_arrivals
    from kvsim.traces.specs import shared_prefixes as parse_prefixes
from kvsim.traces.read import load
source, count, replicas, runs = sys.argv[2], *map(int, sys.argv[3:6])
stored = {name: size * 2.0**30 for name, size in json.loads(sys.argv[6]).items()}
route = source if source == "least-loaded" else "round-robin"
if not source.endswith(".csv"):
    shared = (parse_prefixes("reuse"),) if stored else ()
    workload = TrafficModel(parse_arrivals("poisson"), 5.0 * replicas, DEFAULT, *shared)
    requests = workload.draw(1, count, None)
else:
    requests = load(source).requests.head(count).scaled(20.0)
where = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))
longest = int((requests.prompt + requests.generate).max())
rules = Rules(prefix_caching=bool(stored), **stored)
costs = StepCosts(parse("full"), where, rules, longest, int(requests.prompt.max()))
costs.tables
began = time.process_time()
simulate(requests.head(1000), costs, replicas, route)
first = time.process_time() - began
best = float("inf")
for _ in range(runs):
    began = time.process_time()
    simulate(requests, costs, replicas, route)
    best = min(best, time.process_time() - began)
print(json.dumps({"first_s": first, "per_s": count / best}))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--against", type=Path, help="a checkout of another commit")
    options.add_argument("--azure", help="AzureLLMInferenceTrace_conv.csv")
    options.add_argument("--python", default=sys.executable)
    chosen = options.parse_args()
    cases = [(name, 10**6, 50) for name in ASKED]
    if chosen.azure:
        cases.append((chosen.azure, 10_000, 1))
    for source, count, replicas in cases:
        checkouts = [HERE, chosen.against] if chosen.against else [HERE]
        best = dict.fromkeys(checkouts, 0.0)
        for _ in range(ROUNDS):
            for place in checkouts:
                found = play(chosen.python, place, (source, count, replicas, 3))
                best[place] = max(best[place], found["per_s"])
        name = f"{Path(source).name}, {count:,} requests on {replicas}"
        print(f"{name}: {best[HERE]:,.0f} requests/s", flush=True)
        if chosen.against:
            ratio = best[HERE] / best[chosen.against]
            asked = f" (asked: {ASKED[source]})" if source in ASKED else ""
            print(f"  {ratio:.2f} times the {best[chosen.against]:,.0f} of {chosen.against}{asked}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache
        found = play(chosen.python, HERE, ("round-robin", 1000, 1, 1))
        print(f"first run of 1,000 requests: {found['first_s']:.1f} s of CPU time (asked: 8)")


def play(python: str, place: Path, case: tuple[object, ...]) -> dict[str, float]:
    """One case in a process of its own."""
    stored = json.dumps(MEMORIES.get(str(case[0]), {}))
    words = [python, "-c", CASE, str(place), *map(str, case), stored]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=place)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
