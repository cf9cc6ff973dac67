"""Memories for prefix blocks: hits and TTFT.

    python -m benchmarks.tiers MOONCAKE_TRACE.jsonl

Asked: hits per memory as a plain count finds them (a test does that), the gain in TTFT of host
memory and of NVMe, and `split` and `faster` never worse than `load` or `recompute` alone. How fast
they are played, ``benchmarks.serving`` measures.
"""

import sys
from dataclasses import replace

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.rules import PREFIX_LOADS, Rules
from kvsim.serving.simulate import simulate
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests

GIB = 2.0**30
WHERE = Deployment(load_model("llama3.1-8b"), load_hardware("h100"), load_stack("fused"))


def costs_of(requests: Requests, rules: Rules) -> StepCosts:
    longest = int((requests.prompt + requests.generate).max())
    return StepCosts(parse("full"), WHERE, rules, longest, int(requests.prompt.max()))


def mooncake(place: str) -> None:
    requests = load(place).requests
    base = costs_of(requests, Rules(prefix_caching=True))
    assert base.tables
    print(f"{len(requests):,} requests on 6 replicas of llama3.1-8b on H100, cache-and-load")
    cases: dict[str, dict[str, object]] = {"GPU alone": {}}
    for how in PREFIX_LOADS:
        cases[f"host 256 GiB, {how}"] = {"host_cache": 256 * GIB, "prefix_load": how}
    for how in PREFIX_LOADS:
        both = {"host_cache": 64 * GIB, "nvme_cache": 4096 * GIB, "prefix_load": how}
        cases[f"host 64 GiB + NVMe 4 TiB, {how}"] = both
    for how in PREFIX_LOADS:
        cases[f"remote 8 TiB at 2 GB/s, {how}"] = {
            "remote_cache": 8192 * GIB,
            "nic": 2e9,
            "prefix_load": how,
        }
    for name, changes in cases.items():
        costs = replace(base, rules=replace(base.rules, **changes))
        object.__setattr__(costs, "tables", base.tables)
        found = Outcome(simulate(requests, costs, 6, "cache-and-load"))
        assert faults(found.run) == []
        ttft = found.ttft_s[found.finished]
        hits = ", ".join(f"{k} {v:.1%}" for k, v in found.prefix_hits.items() if v)
        print(
            f"  {name}: TTFT mean {ttft.mean():.3f} s, p50 {np.median(ttft):.3f} s, "
            f"p99 {np.quantile(ttft, 0.99):.2f} s; hits: {hits}",
            flush=True,
        )


if __name__ == "__main__":
    mooncake(sys.argv[1])
