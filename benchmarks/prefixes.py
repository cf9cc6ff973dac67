"""Recompute or load of stored prefixes against either alone, by replicas and memories.

    python -m benchmarks.prefixes TRACE.jsonl     # Mooncake's conversation trace

Asked: never worse than the better of `load` and `recompute`. `--prefix-load auto` plays every way
and keeps the one with the least mean TTFT; `split` decides prompt by prompt. All times are
simulated. benchmarks/tiers.py has hits, the gain of each memory on one card, and the simulator's
speed.
"""

import sys
from typing import Any, NamedTuple

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import PREFIX_LOADS, Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests

GIB = 2.0**30
REPLICAS = (2, 3, 4, 6)
HOST, DRIVE, STORE = 200 * GIB, 2000 * GIB, 4000 * GIB
MEMORIES: dict[str, dict[str, Any]] = {
    "host 200 GiB": {"host_cache": HOST},
    "drive 2000 GiB": {"nvme_cache": DRIVE},
    "host and drive": {"host_cache": HOST, "nvme_cache": DRIVE},
    "remote store": {"remote_cache": STORE},
    "drive at 1.7 GB/s": {"nvme_cache": DRIVE, "nvme_read": 1.7e9, "nvme_write": 1.7e9},
}


class Means(NamedTuple):
    """Of all requests. [s]"""

    ttft: float
    latency: float
    hits: dict[str, float]


def costs_of(requests: Requests) -> StepCosts:
    where = Deployment(load_model("llama3-8b"), load_hardware("h100"), load_stack("fused"))
    longest = int((requests.prompt + requests.generate).max())
    rules = Rules(prefix_caching=True)
    return StepCosts(parse("full"), where, rules, longest, int(requests.prompt.max()))


def policies(requests: Requests) -> None:
    costs = costs_of(requests)
    for count in REPLICAS:
        rules = Rules(prefix_caching=True)
        alone = _played(requests, costs, rules, count)
        print(f"{count} replicas, GPU memory alone: mean TTFT {alone.ttft:.3f} s")
        for name, changes in MEMORIES.items():
            found = {
                how: _played(
                    requests, costs, Rules(prefix_caching=True, prefix_load=how, **changes), count
                )
                for how in PREFIX_LOADS
            }
            load_, again = found["load"], found["recompute"]
            auto = min(found, key=lambda how: found[how].ttft)
            ttft, latency = (
                {
                    how: getattr(found[how], what) / min(getattr(load_, what), getattr(again, what))
                    for how in ("split", auto)
                }
                for what in ("ttft", "latency")
            )
            best = found[auto]
            print(
                f"  {name}: auto takes {auto}: mean TTFT {best.ttft:.3f} s, "
                f"{best.ttft / alone.ttft:.3f} of that of the GPU's memory alone; hits {best.hits};"
                f" over the better of load and recompute (at most 1): TTFT of auto "
                f"{ttft[auto]:.4f}, of split {ttft['split']:.4f}; latency {latency[auto]:.4f} and "
                f"{latency['split']:.4f}",
                flush=True,
            )


def _played(requests: Requests, costs: StepCosts, rules: Rules, count: int) -> Means:
    done = Outcome(simulate(requests, costs.with_rules(rules), count, "cache-and-load"))
    hits = {name: round(share, 3) for name, share in done.prefix_hits.items()}
    return Means(float(done.ttft_s.mean()), float(done.latency_s.mean()), hits)


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    policies(load(sys.argv[1]).requests)


if __name__ == "__main__":
    main()
