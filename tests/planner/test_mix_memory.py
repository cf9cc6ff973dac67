"""What the placement programme says of memory, beside what the engine needs, and more of it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.planner.costs import FAMILIES, Shares, placement_options, placement_technique
from kvsim.planner.mixed_search import add_mixes
from kvsim.planner.placement import Coefficients
from kvsim.planner.question import Admission, PlanLimits, Question, Workload
from kvsim.planner.table import TableSearch, tabulate
from tests.planner.test_programme import small
from tests.support.mixes import random_mix
from tests.support.steps import deployment


def test_memory_of_a_mix_is_nowhere_above_the_engines() -> None:
    """Layers, and of each shared buffer the mean of what layers of one shape need."""
    d, random = deployment("gemma-3-12b", "fused", "l4"), np.random.default_rng(5)
    w, found = Workload(8192, 4, 8), []
    c = Coefficients(d, w, np.array([8.0]), placement_options(d, halves=True))
    for family in FAMILIES:
        p = c.programme(0, PlanLimits(1e18, 1e18), family)
        assert p.buffered is not None
        for _ in range(8):
            a, _, corners, streamed = random_mix(c, p, random)
            most = 0.0
            for each, once in zip(p.gpu, p.once_gpu, strict=True):
                mean = (once @ corners / p.layers)[:, p.buffered]
                most = max(most, float((each * corners).sum() + mean.max(axis=1).sum()))
            most += (p.streaming.buffers / p.layers.sum() - p.streaming.gpu[0]) * streamed.sum()
            replay = w.predict(a.technique(d, w.prompt), d, c.batches)
            found.append(most / float(replay.gpu_bytes[0]))
    assert np.median(found) > 0.95
    assert max(found) <= 1 + 1e-6


@settings(max_examples=4, deadline=None)
@given(
    layers=st.integers(2, 6),
    batch=st.integers(2, 40),
    prompt=st.integers(200, 4000),
    share=st.floats(0.6, 1.0),
    more=st.sampled_from([1.01, 1.05, 1.2]),
)
def test_more_memory_makes_no_plan_worse(
    layers: int, batch: int, prompt: int, share: float, more: float
) -> None:
    """A share of what full KV needs, and a little more; layers may be in ranges of their own."""
    d, w = small("llama2-7b", layers, "a6000"), Workload(prompt, 8, batch)
    whole = w.predict(
        placement_technique(Shares(), prompt), d, np.array([float(batch)])
    ).given_bytes[0]
    speeds = []
    for room in (share * float(whole), more * share * float(whole)):
        limits = PlanLimits(room, d.hardware.host_memory)
        only = Admission(only=("full", "offload"))
        q = Question(d, w, "throughput", limits, only, error=0.0)
        search = TableSearch(q, tabulate(q))
        add_mixes(q, search)
        best = search.optimum(limits.finite())
        speeds.append(0.0 if best is None else -search.value(best))
    assert speeds[1] >= speeds[0] * (1 - 1e-9)
