"""Drawn traces: what was asked for is what comes out, the same under a seed, and nobody's rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, kstest

from kvsim.errors import InputError
from kvsim.traces import synthetic
from kvsim.traces.read import load
from kvsim.traces.requests import Floats, Requests
from kvsim.traces.statistics import describe, dispersion
from kvsim.traces.synthetic import Diurnal, Lengths, Lognormal, OnOff, TrafficModel
from tests.support.places import SHARED

TRACES = SHARED / "traces"
MANY = 100_000
SOME = Lengths(Lognormal(1000.0, 1.0), Lognormal(100.0, 0.5), 0.3)


def gaps(text: str, rate: float = 2.0, seed: int = 1) -> Floats:
    random = np.random.default_rng(seed)
    return np.diff(synthetic.parse_arrivals(text).draw(random, rate, MANY, None))


@pytest.mark.parametrize(
    ("text", "cv"),
    [("poisson", 1.0), ("gamma:cv=0", 0.0), ("gamma:cv=0.5", 0.5), ("gamma:cv=3", 3.0)],
)
def test_renewal_gaps_have_the_mean_and_variation_asked_for(text: str, cv: float) -> None:
    found = gaps(text)
    assert found.mean() == pytest.approx(0.5, rel=0.03)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.03, abs=1e-9)


def test_poisson_gaps_are_exponential() -> None:
    assert kstest(gaps("poisson") * 2.0, "expon").pvalue > 0.01


def test_bursts_have_the_variance_of_an_interrupted_poisson_process() -> None:
    """Asymptotic variance / mean of counts of an interrupted Poisson process (Fischer and
    Meier-Hellstern, 1993): 1 + 2 rate_on x off_share / (1/on + 1/off), with exponential states."""
    process = OnOff(on=2.0, off=6.0)
    arrival = process.draw(np.random.default_rng(3), 2.0, None, 400_000.0)
    on_rate, off_share = 2.0 * 4, 0.75
    expected = 1 + 2 * on_rate * off_share / (1 / 2.0 + 1 / 6.0)
    assert len(arrival) == pytest.approx(800_000, rel=0.03)
    assert dispersion(arrival, 400.0) == pytest.approx(expected, rel=0.15)


def test_a_day_rises_and_falls_as_the_sine_says() -> None:
    process = Diurnal(amplitude=0.8, period=1000.0)
    arrival = process.draw(np.random.default_rng(4), 5.0, None, 100_000.0)
    counts, edges = np.histogram(arrival % 1000.0, 20, (0.0, 1000.0))
    middles = (edges[1:] + edges[:-1]) / 2
    expected = 5.0 * 100 * 50 * (1 - 0.8 * np.cos(2 * np.pi * middles / 1000.0))
    assert np.allclose(counts, expected, rtol=0.06)


@given(st.sampled_from(["poisson", "gamma:cv=4", "onoff:on=1,off=50", "diurnal:period=100"]),
       st.floats(0.01, 100), st.floats(0.1, 500), st.integers(0, 99))  # fmt: skip
@settings(max_examples=40)
def test_durations_and_counts_are_kept(text: str, rate: float, duration: float, seed: int) -> None:
    process = synthetic.parse_arrivals(text)
    for_time = process.draw(np.random.default_rng(seed), rate, None, duration)
    assert ((for_time >= 0) & (for_time <= duration * (1 + 1e-9))).all()
    counted = process.draw(np.random.default_rng(seed), rate, 37, None)
    assert len(counted) == 37
    for arrival in (for_time, counted):
        assert (np.diff(arrival) >= 0).all()


def test_lognormal_lengths() -> None:
    prompt, generate = SOME.draw(np.random.default_rng(5), MANY)
    for tokens, median, sigma in ((prompt, 1000, 1.0), (generate, 100, 0.5)):
        assert np.median(tokens) == pytest.approx(median, rel=0.02)
        assert np.log(tokens).std() == pytest.approx(sigma, rel=0.02)
    found = np.corrcoef(np.log(prompt), np.log(generate))[0, 1]
    assert found == pytest.approx(0.3, abs=0.01)
    three = Lognormal(10.0, 1.0).quantiles(np.array([0.16, 0.5, 0.84]), np.array([-1.0, 0.0, 1.0]))
    assert three == pytest.approx([10 / np.e, 10, 10 * np.e])


def test_prefix_reuse_is_what_was_asked_for() -> None:
    shared = synthetic.parse_prefixes("reuse:share=0.6,depth=0.4,distance=10,block=64")
    long = Lengths(Lognormal(20_000.0, 0.3), Lognormal(100.0, 0.5))  # short ones have few blocks
    requests = TrafficModel(synthetic.parse_arrivals("poisson"), 1.0, long, shared).draw(
        6, 20_000, None
    )
    assert requests.block_tokens == 64
    assert requests.block_start is not None
    assert (np.diff(requests.block_start) == -(-requests.prompt // 64)).all()
    reuse = describe(requests).reuse
    assert reuse is not None
    assert reuse.hit_rate == pytest.approx(0.6 * 0.4, abs=0.02)
    assert reuse.request_share == pytest.approx(0.6, abs=0.03)


def test_the_same_seed_gives_the_same_trace_and_another_another() -> None:
    workload = TrafficModel(
        synthetic.parse_arrivals("gamma"), 2.0, SOME, synthetic.parse_prefixes("reuse")
    )
    first, again, other = (workload.draw(seed, 500, None) for seed in (1, 1, 2))
    for name in ("arrival", "prompt", "generate", "block_ids", "block_start"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))


def test_a_shorter_trace_begins_alike() -> None:
    workload = TrafficModel(synthetic.parse_arrivals("gamma"), 2.0, SOME)
    assert np.allclose(
        workload.draw(1, 100, None).arrival, workload.draw(1, 200, None).arrival[:100]
    )


def bursty(seed: int = 7) -> Requests:
    """Load that rises and falls, gaps of cv 1.5, correlated lengths with two modes."""
    random = np.random.default_rng(seed)
    arrival = Diurnal(cv=1.5, amplitude=0.7, period=5000.0).draw(random, 3.0, None, 20_000.0)
    kind = random.random(len(arrival)) < 0.3
    prompt = np.where(kind, random.integers(3900, 4100, len(arrival)),
                      random.lognormal(6, 1, len(arrival))).astype(int) + 1  # fmt: skip
    generate = (random.lognormal(4, 0.5, len(arrival)) * (prompt / 500) ** 0.3).astype(int) + 1
    return Requests(arrival - arrival[0], prompt, generate)


def alike(source: Requests, drawn: Requests, reuse: float = 0.02) -> None:
    """The stated error of a likeness: what docs/traces.md says."""
    mine, theirs = describe(source), describe(drawn)
    assert theirs.rate == pytest.approx(mine.rate, rel=0.05)
    assert theirs.gap_cv == pytest.approx(mine.gap_cv, rel=0.05)
    assert theirs.dispersion == pytest.approx(mine.dispersion, rel=0.35)
    assert theirs.correlation == pytest.approx(mine.correlation, abs=0.03)
    for name in ("prompt", "generate"):
        one, other = getattr(source, name), getattr(drawn, name)
        assert other.mean() == pytest.approx(one.mean(), rel=0.03)
        assert ks_2samp(one, other).statistic < 0.02  # any percentile is off by 2 ranks of 100
    if mine.reuse is not None and theirs.reuse is not None:
        assert theirs.reuse.hit_rate == pytest.approx(mine.reuse.hit_rate, abs=reuse)


def test_a_likeness_has_the_statistics_of_its_source() -> None:
    source = bursty()
    workload = synthetic.fit_traffic(source)
    for seed in range(3):
        alike(source, workload.draw(seed, None, source.duration))


def test_a_likeness_follows_the_load_over_time() -> None:
    source = bursty()
    drawn = synthetic.fit_traffic(source).draw(1, None, source.duration)
    mine, theirs = (np.histogram(r.arrival, 40, (0, 20_000))[0] for r in (source, drawn))
    assert np.corrcoef(mine, theirs)[0, 1] > 0.9


def test_a_likeness_of_a_poisson_process_is_one() -> None:
    arrival = np.sort(np.random.default_rng(8).uniform(0, 10_000, 20_000))
    like = synthetic.ResampledArrivals(times=tuple(arrival.tolist()))
    drawn = like.draw(np.random.default_rng(9), 2.0, None, 10_000.0)
    assert dispersion(drawn, 60.0) == pytest.approx(1.0, abs=0.35)


def test_a_likeness_can_be_faster_and_longer() -> None:
    source = bursty()
    workload = synthetic.fit_traffic(source)
    drawn = replace(workload, rate=12.0).draw(1, None, 2 * source.duration)
    statistics = describe(drawn)
    assert statistics.rate == pytest.approx(12.0, rel=0.03)
    assert statistics.duration == pytest.approx(2 * source.duration, rel=0.01)
    first, second = (np.histogram(drawn.arrival, 40, (a, a + 20_000))[0] for a in (0, 20_000))
    assert np.corrcoef(first, second)[0, 1] > 0.9  # the load repeats, the arrivals do not


def test_what_coincides_in_a_trace_does_in_its_likenesses() -> None:
    """Also how many requests there are, on average."""
    random = np.random.default_rng(10)
    lone, several = np.sort(random.uniform(0, 9000, 8000)), np.sort(random.uniform(0, 9000, 2000))
    arrival = np.sort(np.concatenate([lone, np.repeat(several, 3)]))
    arrival -= arrival[0]
    ones = np.ones(len(arrival), np.int64)
    like = synthetic.fit_traffic(Requests(arrival, ones, ones))
    drawn = [like.draw(seed, None, float(arrival[-1])).arrival for seed in range(20)]
    ties = [float((np.diff(times) == 0).mean()) for times in (arrival, *drawn)]
    assert np.mean(ties[1:]) == pytest.approx(ties[0], abs=0.02)
    assert np.mean([len(x) for x in drawn]) == pytest.approx(len(arrival), rel=0.02)


@pytest.mark.parametrize("name", ["azure_conv_2023.csv", "mooncake_conversation_trace.jsonl"])
def test_a_likeness_of_a_public_trace(name: str) -> None:
    if not TRACES.is_dir():
        pytest.skip("needs the public traces beside the checkout")
    source = load(str(TRACES / name)).requests
    workload = synthetic.fit_traffic(source)
    triples = set(zip(source.arrival, source.prompt, source.generate, strict=True))
    for seed in range(3):
        drawn = workload.draw(seed, None, source.duration)
        alike(source, drawn)
        same = [row for row in zip(drawn.arrival, drawn.prompt, drawn.generate, strict=True)
                if row in triples]  # fmt: skip
        assert len(same) <= len(drawn) / 1000  # by chance, on Mooncake's clock of 3 s


def test_pairs_of_lengths_return_only_by_chance() -> None:
    """No more of the source's pairs than two draws from one distribution have in common."""
    source = bursty()
    drawn = synthetic.fit_traffic(source).draw(1, None, source.duration)
    twin = bursty(11)

    def pairs(requests: Requests) -> set[tuple[int, int]]:
        return set(zip(requests.prompt.tolist(), requests.generate.tolist(), strict=True))

    known = pairs(source)
    by_chance = len(known & pairs(twin)) / len(pairs(twin))
    assert len(known & pairs(drawn)) / len(pairs(drawn)) < by_chance + 0.02


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("arrivals", "poison", "unknown --arrivals 'poison'|poisson"),
        ("arrivals", "gamma:cv=-1", "cv is '-1'|from 0 to 100"),
        ("arrivals", "gamma:vc=2", "unknown --arrivals gamma setting 'vc'|cv"),
        ("arrivals", "diurnal:amplitude=1.5", "amplitude is '1.5'|from 0 to 1"),
        ("lengths", "normal", "unknown --lengths 'normal'|lognormal|empirical:FILE"),
        ("lengths", "lognormal:correlation=2", "correlation is '2'|from -1 to 1"),
        ("prefixes", "reuse:share=2", "share is '2'"),
        ("prefixes", "tree", "unknown --prefixes 'tree'|reuse"),
    ],
)
def test_bad_specs(kind: str, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        getattr(synthetic, f"parse_{kind}")(text)
    assert all(word in str(caught.value) for word in words.split("|")), caught.value


def test_too_short_a_source_and_too_long_a_trace() -> None:
    with pytest.raises(InputError, match="100 requests; expected at least 200"):
        synthetic.fit_traffic(bursty().head(100))
    with pytest.raises(InputError, match="requests; expected at most 100,000,000"):
        TrafficModel(synthetic.parse_arrivals("poisson"), 1e9, SOME).draw(1, None, 1e9)
