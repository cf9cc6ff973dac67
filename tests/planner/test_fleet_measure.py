"""What replicas carry, on replicas that are a plain rule: too late beyond a rate, never before."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.planner.fleet import play
from kvsim.planner.fleet.demand import ClassTarget, Demand, FleetTargets, Traffic
from kvsim.planner.fleet.offers import Configuration, Rated
from kvsim.planner.fleet.play import Busy, replicas_kept_busy
from kvsim.traces.requests import Requests

TARGETS = FleetTargets(1.0, 0.1, 0.9)
ANY = cast(Configuration, None)


def requests(count: int = 200, generate: int | np.ndarray = 2) -> Requests:
    """One request per second."""
    several = np.broadcast_to(generate, count).astype(np.int64)
    return Requests(np.arange(float(count)), np.full(count, 8), several)


def played(
    monkeypatch: pytest.MonkeyPatch, waits: Callable[[Requests, float], tuple[Any, Any]]
) -> list[tuple[int, float]]:
    """Replicas whose requests wait as a rule says by their rate; what is played is noted."""
    noted: list[tuple[int, float]] = []

    def serve(some: Requests, _: Configuration, replicas: int) -> tuple[Requests, float]:
        rate = (len(some) - 1) / some.duration
        noted.append((replicas, rate))
        return some, rate / replicas

    monkeypatch.setattr(play, "serve", serve)
    monkeypatch.setattr(play, "waits", lambda outcome: (*waits(*outcome), None))
    return noted


def test_a_small_class_counts_as_much_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of twenty is long and waits longer: within the share of all, not of its own."""
    long = np.arange(200) % 20 == 0

    def waits(some: Requests, rate: float) -> tuple[Any, Any]:
        return np.where(some.prompt > 8, 8 * rate, 0.1), np.zeros(len(some))

    played(monkeypatch, waits)
    some = replace(requests(), prompt=np.where(long, 100, 8))
    alike = replicas_kept_busy(some, ANY, TARGETS).needed
    own = replace(TARGETS, longer=(ClassTarget(8, 2.0, 0.1),))
    apart = replicas_kept_busy(some, ANY, own).needed
    assert alike < 0.1  # as much as is tried: those that wait are too few to count
    assert apart == pytest.approx(4.0, rel=0.05)  # 8 s times the rate of a fourth is 2 s


@pytest.mark.parametrize("needed", [0.06, 0.3, 0.7, 1.4, 1.9, 2.6, 7.3, 40.5])
def test_replicas_are_counted_to_four_hundredths(
    needed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that serves ``1 / needed`` requests per second is needed so many times."""
    each = 1 / needed

    def waits(some: Requests, rate: float) -> tuple[Any, Any]:
        return np.full(len(some), 10.0 if rate > each * 1.0001 else 0.1), np.zeros(len(some))

    noted = played(monkeypatch, waits)
    found = replicas_kept_busy(requests(), ANY, TARGETS, guess=max(needed / 2, 1.0)).needed
    assert needed * 0.99 <= found <= needed * play.LOAD_RESOLUTION * 1.01
    whole = int(np.ceil(needed))
    if whole > 1:  # one fewer does not carry the trace, so that not much more than it is tried
        tried = max(rate for replicas, rate in noted if replicas == whole)
        assert tried < whole / (whole - 1) * play.REPLICA_STEP


@pytest.mark.parametrize(("halting", "meets"), [(0.0, True), (0.09, True), (0.12, False)])
def test_time_per_token_counts_among_requests_that_have_one(
    halting: float, meets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second request has one token, and so no time per token that could be too long."""
    several = requests(generate=np.tile([1, 2], 100))
    halts = np.zeros(200, bool)
    halts[1 : 1 + 2 * round(100 * halting) : 2] = True

    def waits(some: Requests, rate: float) -> tuple[Any, Any]:
        late = 10.0 if rate > 1.5 else 0.1
        tpot = np.where(halts[np.arange(len(some)) % 200], 1.0, 0.01)
        return np.full(len(some), late), np.where(some.generate > 1, tpot, np.nan)

    played(monkeypatch, waits)
    found = replicas_kept_busy(several, ANY, TARGETS)
    assert np.isfinite(found.needed) is np.bool_(meets)
    if meets:
        assert found.missed.mean() == pytest.approx(halting / 2)


def configuration(price: float) -> Any:
    """What offers are made of."""
    return SimpleNamespace(name="a replica", gpu="l40s", price=price, reserved=np.inf, rent=price,
                           extras=0, gpus=1, host=0.0, power=np.inf)  # fmt: skip


def test_a_dear_replica_divides_what_it_carries_as_the_estimate_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is cheap, so each class is played on it; of the second the whole trace alone."""
    every = requests(200)
    rate = np.array([[3.0, 1.0], [2.0, 2.0]])
    traffic = cast(Traffic, SimpleNamespace(
        demand=Demand(rate, np.array([1.0, 1.0])), classes=2, requests=every,
        of=np.arange(200) % 2, part=lambda c: requests(100 + c),
    ))  # fmt: skip
    alone = {100: 1.5, 101: 1.0, 200: 2.0}

    def busy(some: Requests, x: Any, *_: Any, **__: Any) -> Busy:
        times = 1.0 if x.price == 1.0 else 1.6
        return Busy(alone[len(some)] * times, np.zeros(len(some)))

    monkeypatch.setattr(play, "replicas_kept_busy", busy)
    none = np.zeros(2)
    rated = [
        cast(Rated, SimpleNamespace(configuration=configuration(p), needed=x, late=none))
        for p, x in ((1.0, np.array([1.0, 1.0])), (5.0, np.array([0.9, 0.3])))
    ]
    found = play.measure_market(rated, traffic, TARGETS)
    assert found.alone.tolist() == [2.0, 3.2]
    share = rate[:, :, None] / found.offers.capacity  # of a replica, by window and class
    assert share.sum(axis=1).max(axis=0) == pytest.approx(found.alone)
    peaks = rate.max(axis=0)[:, None] / found.offers.capacity
    assert peaks[0] / peaks[1] == pytest.approx([1.5, 3.0])


def test_a_class_that_is_late_alone_is_carried_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two replicas carry the whole trace, but none its second class alone."""
    rate = np.array([[3.0, 1.0]])
    traffic = cast(Traffic, SimpleNamespace(
        demand=Demand(rate, np.ones(1)), classes=2, requests=requests(200),
        of=np.arange(200) % 2, part=lambda c: requests(100 + c),
    ))  # fmt: skip
    alone = {100: 1.5, 101: np.inf, 200: 2.0}

    def busy(some: Requests, *_: Any, **__: Any) -> Busy:
        return Busy(alone[len(some)], np.zeros(len(some)))

    monkeypatch.setattr(play, "replicas_kept_busy", busy)
    one: Any = SimpleNamespace(
        configuration=configuration(1.0), needed=np.array([1.4, 0.5]), late=np.zeros(2)
    )
    found = play.measure_market([one], traffic, TARGETS)
    assert (rate[0] / found.offers.capacity[:, 0]).sum() == pytest.approx(2.0)
    assert found.offers.capacity[:, 0] == pytest.approx(rate[0] / np.array([1.5, 0.5]))
