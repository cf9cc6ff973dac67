"""Uniform placements and steps to better ones; memory of mixes."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.planner.arrangements import STREAMED, Arrangement, BatchEvaluator, Scored, Trials, Use
from kvsim.planner.costs import FAMILIES, Shares, placement_options, placement_technique
from kvsim.planner.local_search import (
    UniformPlacements,
    grid_of_batches,
    search_from,
    search_streaming,
    search_uniform,
    shares_by_place,
    uniform_kinds,
)
from kvsim.planner.mixed_search import FoundMix, MixedPlacements, Placements, add_mixes
from kvsim.planner.placement import Coefficients
from kvsim.planner.question import GIB, Admission, PlanLimits, Question, Workload
from kvsim.planner.sensitivity import with_faster_links
from kvsim.planner.table import TableSearch, tabulate
from kvsim.techniques import compose
from kvsim.techniques.papers.kvpr import Place
from tests.planner.test_programme import small
from tests.support.mixes import random_mix
from tests.support.steps import deployment

D = deployment("llama3.1-8b", "fused", "l4")
LAYERS = 32


def question(batch: int | None = 40, **limits: float) -> Question:
    """Too many sequences for the GPU's memory, from an idle GPU."""
    given = {"gpu_memory": 20 * GIB, "host_memory": 100 * GIB} | limits
    return Question(D, Workload(1000, 20, batch), "throughput", PlanLimits(**given), error=0.0)


@pytest.mark.parametrize("service", [False, True])
def test_settings_in_arrays_are_what_each_is_alone(service: bool) -> None:
    random, batch = np.random.default_rng(7), np.array([2.0, 24.0])
    shape = (3, batch.size, 1)
    cpu, weights = random.uniform(0.1, 0.4, shape), random.uniform(0.1, 0.9, shape)
    host = random.uniform(0.1, 0.5, shape)
    w = Workload(600, 30, None, service)
    whole = Place(host_share=host, split=np.floor(300 * host), cpu_share=cpu, weights_host=weights)
    found = w.predict(compose(whole), D, batch)
    for row, column in product(range(3), range(2)):
        at = row, column, 0
        split = float(np.floor(300 * host[at]))
        one = Place(
            host_share=float(host[at]), split=split, cpu_share=float(cpu[at]),
            weights_host=float(weights[at]),
        )  # fmt: skip
        alone = w.predict(compose(one), D, batch[column : column + 1])
        for name in ("output_tok_s", "ttft_s", "gpu_bytes", "host_bytes"):
            value = getattr(found, name)[row, column]
            assert value == pytest.approx(getattr(alone, name)[0], rel=1e-12)


def test_no_more_is_streamed_than_memory_asks_for() -> None:
    q, shares = question(), np.zeros((5, 1, 4))
    shares[:, 0, 2] = 0.1, 0.2, 0.4, 0.7, 0.95
    kind = Arrangement(((Use(Shares(cpu=0.5), 1, LAYERS),),))
    played = BatchEvaluator(q, streams=True).played(Trials(kind, np.full(5, 40.0), shares))
    streamed = played.trials.shares[:, 0, STREAMED]
    assert (np.diff(streamed) <= 0).all()
    assert streamed[0] > 0 == streamed[-1]
    for cpu, weights in zip(shares[:, 0, 2].tolist(), streamed.tolist(), strict=True):
        sizes = [
            q.workload.predict(
                compose(Place(cpu_share=cpu, weights_host=max(x, 0.0))), D, np.array([40.0])
            ).given_bytes[0]
            for x in (weights, weights - 1e-4)
        ]
        assert sizes[0] <= q.limits.gpu_memory * (1 + 1e-9)
        assert weights == 0 or sizes[1] > q.limits.gpu_memory
    none = BatchEvaluator(q, streams=False).played(Trials(kind, np.full(5, 40.0), shares))
    assert np.isinf(none.goals[0])
    assert np.isfinite(none.goals[-1])


def test_steps_find_what_every_point_of_the_grid_shows() -> None:
    q = question()
    found = max(float(x.output_tok_s[0]) for x in search_uniform(q, ["shared"], True, 40.0).best)
    shares = np.zeros((10_001, 1, 4))
    shares[:, 0, 2] = np.linspace(0, 1, 10_001)
    kind = Arrangement(((Use(Shares(cpu=0.5), 1, LAYERS),),))
    every = BatchEvaluator(q, streams=True).played(
        Trials(kind, np.full(9_999, 40.0), shares[1:-1]), 0
    )
    assert found == pytest.approx(-every.goals.min(), rel=1e-12)


@pytest.mark.parametrize("change", ["gpu_memory", "dram"])
def test_more_of_anything_is_no_worse_and_worth_what_the_price_says(change: str) -> None:
    q = question(None, ttft=30.0)
    names = ["full", "shared", "cpu"]
    before = search_uniform(q, names, True, 200.0)
    if change == "gpu_memory":
        other = q.with_limits(gpu_memory=21 * GIB)
    else:
        d = with_faster_links(D, (change,))
        other = Question(d, q.workload, q.objective, q.limits, error=0.0)
    speeds = [max(float(x.output_tok_s[0]) for x in found.best)
              for found in (before, search_uniform(other, names, True, 200.0),
                            search_from(other, before.starts, True))]  # fmt: skip
    assert speeds[1] >= speeds[0] * (1 - 1e-9)
    assert speeds[2] == pytest.approx(speeds[1], rel=2e-3)


def test_a_batch_beside_the_best_is_reached_though_its_shares_are_others() -> None:
    """With one GiB more, two sequences more pay, for which the CPU takes more of every cache.

    With the shares of the start that batch streams too many weights, and with as many bytes of
    caches on the GPU the CPU has too much to do: both are worse than the start.
    """
    d = deployment("llama2-13b", "fused", "a100-40g")
    limits = PlanLimits(36.6175e9, 387e9)
    q = Question(d, Workload(929, 39), "throughput", limits, error=0.0)
    kind = Arrangement(((Use(Shares(cpu=0.5), 1, 40),),))
    together, shares = BatchEvaluator(q, streams=True), np.zeros((201, 1, 4))
    shares[:, 0, 2] = np.linspace(0.001, 0.201, 201)
    tops = {}
    for batch in range(10, 17):
        every = together.played(Trials(kind, np.full(201, float(batch)), shares), 0)
        tops[batch] = -float(every.goals.min())
    best = max(tops, key=lambda batch: tops[batch])
    start = together.played(Trials(kind, np.array([best - 2.0]), shares[63:64]))
    found = max(float(x.output_tok_s[0]) for x in search_from(q, [start], True).best)
    assert tops[best] > 1.005 * max(tops[best - 1], tops[best + 1])
    assert found >= tops[best]


def test_a_question_a_little_different_starts_from_the_best_of_each_kind() -> None:
    """From mixes too, if their layers are alike; what is late stays, since limits may change."""
    q, one = question(), np.array([40.0])

    def scored(goal: float, late: float, *shares: float) -> Scored:
        kind = Arrangement(((Use(Shares(*shares), 1, LAYERS),),))
        return Scored(replace(Trials.of(kind, 40.0), batch=one), np.array([goal]), np.array([late]))

    def mix(replay: float, *uses: Use) -> FoundMix:
        prediction = SimpleNamespace(batch=one)
        return cast(FoundMix, SimpleNamespace(
            arrangement=Arrangement((uses,)), replay=replay, prediction=prediction
        ))  # fmt: skip

    def starts(*mixes: FoundMix) -> list[Scored]:
        placements = SimpleNamespace(
            contenders=lambda value: list(mixes), goal=lambda x: q.goal(x.replay, 40.0)
        )
        return MixedPlacements(
            cast(Placements, placements), {}, UniformPlacements([], known)
        ).starts(-100.0)

    late, worse, other = scored(-90, 0.1, 0, 0, 0.3), scored(-95, 0, 0, 0, 0.4), scored(-99, 0, 0.5)
    known = [late, worse, other]
    shared = mix(8.0, Use(Shares(cpu=0.25), 1, LAYERS))  # -100 tokens/s
    slower = mix(9.0, Use(Shares(cpu=0.25), 1, LAYERS))
    blocks = mix(8.0, Use(Shares(cpu=0.25), 1, 30), Use(Shares(), 1, 2))
    assert starts() == known and starts(blocks) == known and starts(slower) == known
    *kept, added = starts(shared, blocks)
    assert kept == [late, other]
    assert added.goals.tolist() == [-100.0] and added.trials.shares[0, 0, 2] == 0.25
    known = [other]
    assert [x.goals[0] for x in starts(slower)] == [-99.0, pytest.approx(-88.9, abs=0.1)]


def test_what_is_too_late_leads_to_what_is_in_time() -> None:
    """No point of the first grid is within the limit, but those between two of them are."""
    q = question()
    best = max(
        search_uniform(q, ["copied"], False, 40.0).best, key=lambda x: float(x.output_tok_s[0])
    )
    tight = question(tpot=1.0002 * float(best.tpot_s[0]))
    found = search_uniform(tight, ["copied"], False, 40.0).best
    assert max(float(x.output_tok_s[0]) for x in found) == pytest.approx(
        float(best.output_tok_s[0]), rel=1e-4
    )


def test_batches_are_every_one_then_eight_per_doubling() -> None:
    assert grid_of_batches(20, 1).tolist() == [*range(1, 17), 18, 20]
    assert grid_of_batches(9, 2).tolist() == [2, 4, 6, 8]
    assert list(uniform_kinds(["cpu", "halved", "shared"], halves=True)) == [
        ("cpu", 2), ("shared", 2), ("shared", 1),
    ]  # fmt: skip
    assert list(uniform_kinds(["halved_joined"], halves=True)) == [
        ("joined", 2),
        ("joined copies", 2),
    ]


def test_layers_behind_another_shape_stream_more_of_their_weights() -> None:
    """Five layers with a window, then one without: its copy runs beside the long attention."""
    d = deployment("gemma-3-12b", "fused", "l4")
    w, limits = Workload(8192, 64, 8), PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory)
    q = Question(d, w, "throughput", limits, error=0.0)
    kind = Arrangement(((Use(Shares(cpu=0.83), 1, 40),), (Use(Shares(cpu=0.83), 1, 8),)))
    shares = np.array([[[0.0, 0.0, 0.83, 0.14]] * 2])
    equal = BatchEvaluator(q, streams=True).played(Trials(kind, np.array([8.0]), shares))
    (starts,) = shares_by_place(d.shard.layout, [equal])
    assert starts.kind.sequence(d)[:12] == starts.kind.sequence(d)[12:24]
    assert [u.layers for u in starts.uses] == [8] * 6
    best = search_streaming(q, starts)
    assert best.goals[0] < 1.01 * equal.goals[0] < 0
    streamed = best.trials.shares[0, :, STREAMED]
    assert streamed.argmax() == 0 and streamed[0] > 2 * streamed[1:].max()
    halved = Arrangement(tuple(tuple(replace(u, parts=2) for u in x) for x in kind.uses))
    found = replace(equal, trials=replace(equal.trials, kind=halved))
    assert shares_by_place(d.shard.layout, [found]) == []
    assert shares_by_place(D.shard.layout, [equal]) == []


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
