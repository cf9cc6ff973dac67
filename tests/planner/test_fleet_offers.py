"""Kinds of replica: names, memories, variants; edges of a spread."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.evidence.ledger import share_below
from kvsim.machines.parallel import Parallelism
from kvsim.planner.fleet import offers
from kvsim.planner.fleet.comparisons import simplify_fleet
from kvsim.planner.fleet.offers import SURE, Configuration, FleetLimits, Spread, offers_of
from kvsim.planner.fleet.search import SearchResult
from kvsim.serving.pools import TwoPools
from kvsim.serving.world import _pool_sizes, get_link_rates
from kvsim.techniques import parse

GIB = 2.0**30


def configuration(tp: int = 1, **rules: Any) -> Configuration:
    some: dict[str, Any] = {
        "host_cache": 0.0, "nvme_cache": 0.0, "remote_cache": 0.0, "max_seqs": 10,
        "nvme_read": 6.0, "nvme_write": 4.0, "nic": 20.0,
    }  # fmt: skip
    some |= rules
    some["tiers"] = bool(some["host_cache"] or some["nvme_cache"])
    costs: Any = SimpleNamespace(
        rules=SimpleNamespace(**some), technique=parse("kivi:bits=4"),
        deployment=SimpleNamespace(
            tp=tp, gpus=tp, weights="int4" if tp > 1 else "fp16", parallelism=Parallelism(tp)
        ),
        room=SimpleNamespace(host_bytes=np.array([0.0, 5.0]), host_capacity=40.0),
        tables=SimpleNamespace(h2d=100.0, d2h=50.0),
    )  # fmt: skip
    return Configuration(costs, "l40s", 2.0, 1.5, 300.0)


def test_names_say_the_gpus_weights_and_memories() -> None:
    name = f"l40s {parse('kivi:bits=4')}"
    assert configuration().name == name
    many = configuration(4, host_cache=64 * GIB, nvme_cache=1000 * GIB)
    said = f"l40s x4 int4 {parse('kivi:bits=4')} + 64 GiB host, 1000 GiB NVMe cache"
    assert many.name == said
    assert configuration(nvme_cache=7 * GIB).name == f"{name} + 7 GiB NVMe cache"
    apart = Configuration(configuration().costs, "l40s", 2.0, 3.0, 300.0, TwoPools(1, 2))
    assert apart.name == f"{name} (1 prefill + 2 decode)"
    assert (apart.rent, configuration().rent) == (2.0, 1.5)


def test_host_memory_is_that_of_blocks_and_of_sequences_on_every_gpu() -> None:
    assert configuration().host == 40.0  # ten sequences of 5 B would be more than there is
    assert configuration(4, max_seqs=2).host == 4 * 10.0
    assert configuration(host_cache=7.0, max_seqs=2).host == 7.0 + 10.0


def test_a_plainer_replica_wins_among_equals() -> None:
    some = [configuration(), configuration(nvme_cache=GIB)]
    found = offers_of(some, np.ones((1, 2)), np.zeros((1, 2)))
    assert found.price[0] == 2.0 and 2.0 < found.price[1] < 2.0 * 1.001
    assert 1.5 == found.reserved[0] < found.reserved[1] < 1.5 * 1.001


def test_every_replica_with_memories_is_also_tried_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one beyond the first few has prefixes in host memory that nothing hits."""
    monkeypatch.setattr(offers, "_can_share_prefixes", lambda x, requests: True)
    monkeypatch.setattr(offers, "_add_memory", lambda x, *rest: (x, *rest[:2]))
    some: Any = [f"replica {i}" for i in range(7)]
    found: Any = offers.add_variants(some, cast(Any, None), offers.Extras(host=GIB, drive=9 * GIB))
    plain = [x for x in found if isinstance(x, str)]
    assert plain == some
    assert [x for x in found if x[0] == some[6]] == [(some[6], GIB, 9 * GIB)]
    assert [x for x in found if x[0] == some[0]] == [(some[0], GIB, 0.0), (some[0], GIB, 9 * GIB)]


@pytest.mark.parametrize(
    ("extras", "chosen"), [((0, 1), (1, 0)), ((1, 1), (0, 1)), ((0, 0), (1, 0))]
)
def test_what_nothing_gains_from_is_not_rented(
    extras: tuple[int, int], chosen: tuple[int, int]
) -> None:
    """Of two kinds, the second was found; the first is its plain twin if it has no extras."""
    some: Any = [
        SimpleNamespace(costs=configuration().costs, technique="full", extras=n) for n in extras
    ]
    for x in some:
        x.costs.deployment.hardware = SimpleNamespace(name="l40s")
    fleet = SimpleNamespace(replicas=np.array([0, 1]), cost=1.0)
    search: Any = SimpleNamespace(
        schedule=None, configurations=some, limits=FleetLimits(),
        offers=offers_of([configuration()] * 2, np.ones((1, 2)), np.zeros((1, 2))),
        tried=lambda replicas: SimpleNamespace(replicas=replicas, cost=1.0),
    )  # fmt: skip
    found: Any = SearchResult(cast(Any, fleet), search.offers, 1.0, 1, 1, 0.0, 0.0)
    assert simplify_fleet(search, found).fleet.replicas.tolist() == list(chosen)


@pytest.mark.parametrize("tp", [1, 2])
def test_memories_are_shared_by_the_gpus_of_a_replica(tp: int) -> None:
    """Of units of 10 B; at most as many entries as there are different blocks, here 60."""
    rules = {"host_cache": 100.0, "nvme_cache": 5000.0, "remote_cache": 400.0}
    costs: Any = configuration(tp, **rules).costs
    limits = SimpleNamespace(prefix_bytes=7, unit_bytes=10, gpu=100)
    sizes = _pool_sizes(costs, limits, np.arange(60), 2)
    assert sizes == [15, 10 // tp, 60] * 2 + [40 // tp]
    none = SimpleNamespace(prefix_bytes=0, unit_bytes=10, gpu=100)
    assert _pool_sizes(costs, none, np.arange(60), 2) == [0] * 7
    assert get_link_rates(costs).tolist() == [100.0, 50.0, 6 / tp, 4 / tp, 20 / tp, 20 / tp]


def test_edges_of_a_spread() -> None:
    spread = Spread(0.2, "test")
    assert spread.slowdown(0.5) == pytest.approx(1.0)
    assert share_below(spread.slowdown(), 0.2) == pytest.approx(SURE, abs=1e-6)
    assert spread.slowdown() > 1.0
    assert Spread(0.4, "").slowdown() == pytest.approx(spread.slowdown() ** 2)
