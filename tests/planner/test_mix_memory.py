"""What the placement programme says of memory, beside what the engine needs."""

import numpy as np

from kvsim.planner.placement import Coefficients
from kvsim.planner.shares import FAMILIES, options_for
from kvsim.planner.workload import PlanLimits, Workload
from tests.support.mixes import random_mix
from tests.support.steps import deployment


def test_memory_of_a_mix_is_nowhere_above_the_engines() -> None:
    """Layers, and of each shared buffer the mean of what layers of one shape need."""
    d, random = deployment("gemma-3-12b", "fused", "l4"), np.random.default_rng(5)
    w, found = Workload(8192, 4, 8), []
    c = Coefficients(d, w, np.array([8.0]), options_for(d, halves=True))
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
