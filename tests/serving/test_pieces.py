"""Single functions of the simulator, run as plain Python on a few records made by hand."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.graph import Op
from kvsim.serving import batch, costs, memory, scheduler, tiers
from kvsim.serving.passes import _renamed
from kvsim.serving.records import (
    GAP_BINS,
    GAPS,
    GPU,
    HOST,
    NEVER,
    NO_INDEX,
    Bin,
    BlockPlace,
    Limits,
    Replica,
    Request,
    Sequence,
    Sizes,
    make,
)
from kvsim.serving.rules import FASTER
from kvsim.serving.scheduler import GAP_EDGES, Span
from kvsim.serving.simulate import simulate
from kvsim.serving.world import find_places, pool_records
from kvsim.traces.requests import Requests
from tests.support.served import tables_of


def world(**parts: Any) -> Any:
    """As much of a world as a function reads; a block of 16 tokens takes 160 B of the GPU."""
    rows = np.arange(20)
    sizes = make(Sizes, 20, prompt=200 * rows, gpu=160 * rows, host=10 * rows)
    limits = {"block_tokens": 16, "part_bytes": 160, "parts": 2, "gpu": 10_000,
              "host": 100, "host_steepest": 10, "steepest": 160}  # fmt: skip
    limits |= parts.pop("limits", {})
    return SimpleNamespace(limits=make(Limits, 1, **limits)[0], sizes=sizes, **parts)


# the batch


def test_a_request_joins_behind_its_class_on_any_replica() -> None:
    """Places 3 to 5 are the second replica's; the first one's requests are of other classes."""
    requests = make(Request, 6, priority=[5, 5, 5, 0, 2, 1])
    sequences = make(Sequence, 6, request=[0, 1, 2, 3, 4, 0])
    replica = make(Replica, 1, index=1, first_sequence=3, running=2, first_reader=NEVER)[0]
    w = world(requests=requests, sequences=sequences)
    assert [batch.get_class(w, replica, place) for place in (0, 1)] == [0, 2]
    joined = batch.add_sequence(w, replica, 5, 0)
    assert joined.request == 5
    assert sequences.request.tolist() == [0, 1, 2, 3, 5, 4]
    assert replica.running == 3 and replica.first_reader == 1


def test_host_memory_bounds_how_far_all_surely_grow() -> None:
    """Two sequences, 16 tokens each in eight rounds: at most two blocks each."""
    replica = make(Replica, 1, running=2, growth=4.0, host_private=55)[0]
    w = world()
    assert memory.bound_growth(w, replica, 8)  # 32 / 16 + 2 blocks: 40 B of the 45 B left
    replica.host_private = 65
    assert not memory.bound_growth(w, replica, 8)
    replica.host_private, replica.private = 0, 10_000 - 639
    assert not memory.bound_growth(w, replica, 8)  # four blocks of the GPU are 640 B
    replica.private = 10_000 - 640
    assert memory.bound_growth(w, replica, 8)


def test_rounds_hold_what_decoding_sequences_need_beside_shared_blocks() -> None:
    """Lengths 20 and 40 grow by 2 in each of ten rounds; a prompt's last token is not read yet."""
    sequences = make(
        Sequence, 3, intercept=[20.0, 33.0, 40.0], growth=[2.0, 0.0, 2.0], todo=[0, 1, 0],
        shared=[0, 0, 2], held=[320, 77, 160], host_held=[20, 3, 30],
    )  # fmt: skip
    replica = make(Replica, 1, running=3, host_private=53)[0]
    first, more = memory.reserve_rounds(world(sequences=sequences), replica, 10)
    assert first == 0  # 22 and 42 tokens are still in two and in three blocks
    assert more == (480 - 320) + (4 * 160 - 320 - 160)  # 40 and 60 tokens: three and four blocks
    assert sequences.held.tolist() == [480, 77, 320]
    assert sequences.brim.tolist() == [48.0, 0.0, 64.0]
    assert replica.host_private == 53 + 10 + 10 and replica.context == 60.0


# memory


def host_pool(units: int) -> tuple[Any, Any]:
    """A replica whose host memory keeps some units of 640 B, the first one longest."""
    pools, entries, buckets = pool_records([0, 8, 0, 0], 8)
    w = world(pools=pools, entries=entries, buckets=buckets,
              limits={"host_cache": 5000, "unit_bytes": 640})  # fmt: skip
    for unit in range(units):
        memory.append(w, pools[HOST], memory.insert(w, pools[HOST], 100 + unit))
    return w, make(Replica, 1)[0]


@pytest.mark.parametrize(("size", "kept"), [(1000, 5), (1800, 5), (1801, 4), (3700, 2), (5000, 0)])
def test_stored_blocks_give_way_to_a_swapped_sequence(size: int, kept: int) -> None:
    """Five units take 3,200 B of 5,000 B; the least recently used are dropped first."""
    w, replica = host_pool(5)
    assert memory.make_host_room(w, replica, size)
    pool = w.pools[HOST]
    assert pool.count == kept
    left = [unit for unit in range(100, 105) if memory.find(w, pool, unit) != NO_INDEX]
    assert left == list(range(105 - kept, 105))


def test_what_host_memory_never_holds_drops_nothing() -> None:
    w, replica = host_pool(5)
    replica.host_swapped = 100
    assert not memory.make_host_room(w, replica, 4901)
    assert w.pools[HOST].count == 5


def gpu_pool(parts: int, users: int = 0) -> tuple[Any, Any, Any]:
    """Hold KV blocks of 160 B, which are two entries of ``parts`` each."""
    pools, entries, buckets = pool_records([8, 0, 0, 0], 8)
    w = world(pools=pools, entries=entries, buckets=buckets)
    size = 2 * parts * 160
    replica = make(Replica, 1, private=9000, **{"pinned" if users else "cached": size})[0]
    for block in range(2):
        at = memory.insert(w, pools[GPU], block)
        entries[at].parts, entries[at].users = parts, users
        if not users:
            memory.append(w, pools[GPU], at)
    return w, replica, pools[GPU]


def test_kept_blocks_give_way_from_their_end_until_none_is_left() -> None:
    w, replica, pool = gpu_pool(3)  # 960 B: 40 B are free
    memory.make_room(w, replica, 300)
    assert (replica.cached, pool.count, w.entries[0].parts) == (640, 2, 1)
    assert memory.find(w, pool, 0, 0) == 0 and memory.find(w, pool, 0, 1) == NO_INDEX
    memory.make_room(w, replica, 2000)  # more than there is
    assert (replica.cached, pool.count) == (0, 0)
    assert memory.available(w, replica) == 1000


@pytest.mark.parametrize("users", [0, 1])
def test_a_user_of_some_blocks_leaves_the_others_to_theirs(users: int) -> None:
    """Of three blocks two are used again; the third gives way before what came after it."""
    w, replica, pool = gpu_pool(3, users)
    memory.pin(w, replica, 1, (0, 2))
    one, other = w.entries[1], w.entries[memory.find(w, pool, 1, 2)]
    assert (one.parts, one.users, other.first, other.parts) == (2, users + 1, 2, 1)
    assert other.users == users and pool.count == 2 * (users == 0)
    assert replica.pinned + replica.cached == 960


def test_blocks_beyond_an_older_copy_are_used_of_the_next_one() -> None:
    """Two requests computed one block at once; a third has the first part of it from the older."""
    w, replica, pool = gpu_pool(3, users=1)
    w.limits.parts, w.entries[0].parts = 3, 1
    w.entries[1].block = 0
    w.entries[1].chain, w.entries[0].chain = 0, NO_INDEX  # in one chain, the older one at its end
    w.buckets[memory.bucket(pool, 0)], w.places = 1, make(BlockPlace, 1, left=3)
    memory.pin_found(w, replica, make(Request, 1, blocks=3)[0], 3)
    places = [memory.find(w, pool, 0, part) for part in range(3)]
    assert [w.entries[at].users for at in places] == [2, 2, 2]
    assert (w.entries[1].first, w.entries[1].parts, w.entries[1].users) == (0, 1, 1)


@pytest.mark.parametrize(
    ("decoding", "seconds", "first"), [(10, 2.9, 2), (10, 3.1, 5), (0, 0.9, 2)]
)
def test_what_is_read_anew_keeps_those_waiting_who_decode(
    decoding: int, seconds: float, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of ten sequences waits for a second of reading, and of as many still to come."""
    monkeypatch.setattr(tiers, "estimate_recompute", lambda *of: (of[3][1] - of[3][0]) / 96)
    monkeypatch.setattr(tiers, "estimate_load", lambda *of: seconds)
    w = world(requests=make(Request, 1), sequences=make(Sequence, 11),
              limits={"load": FASTER, "unit": 2, "chunked": True, "max_tokens": 999})  # fmt: skip
    replica = make(Replica, 1, running=decoding + 1, reading=1)[0]
    plan = tiers.Plan(request=0, begins=64, length=160, first=2, last=5)
    assert tiers.first_loaded(cast(Any, None), w, replica, plan) == first


# time


def test_a_prompt_of_which_a_token_is_left_is_still_being_read() -> None:
    sequences = make(Sequence, 3, todo=[0, 5, 1], chunk=[0, 2, 0], done=[9, 10, 20])
    replica = make(Replica, 1, running=3, first_reader=1, unread=6)[0]
    scheduler.advance_prompts(world(sequences=sequences), replica)
    assert replica.first_reader == 1 and replica.unread == 4
    assert (sequences.todo.tolist(), sequences.done.tolist()) == ([0, 3, 1], [9, 12, 20])
    sequences.todo[1] = 0
    scheduler.advance_prompts(world(sequences=sequences), replica)
    assert replica.first_reader == 2


def test_bins_twice_as_wide_hold_all_that_was_noted() -> None:
    bins = make(Bin, 2 * GAP_BINS)
    bins.seconds = np.arange(2 * GAP_BINS)
    bins.waiting[:] = 1.0
    replica = make(Replica, 1, index=1, bin_width=0.01)[0]
    mine = bins.seconds[GAP_BINS:].copy()
    scheduler.widen(world(bins=bins), replica)
    assert replica.bin_width == 0.02
    assert bins.seconds[GAP_BINS:].sum() == mine.sum()
    assert bins.seconds[GAP_BINS : GAP_BINS + 2].tolist() == [mine[:2].sum(), mine[2:4].sum()]
    assert bins.waiting[GAP_BINS:].sum() == GAP_BINS and (bins.seconds[-GAP_BINS // 2 :] == 0).all()
    assert (bins.seconds[:GAP_BINS] == np.arange(GAP_BINS)).all()  # another replica's


def test_a_span_fills_the_bins_it_covers() -> None:
    bins = make(Bin, GAP_BINS)
    replica = make(Replica, 1, bin_width=0.01, clock=0.025, waiting=2, private=7)[0]
    scheduler.note_span(world(bins=bins), replica, Span(0.01, 3, 50.0, 1))
    assert bins.seconds[2:4] == pytest.approx([0.005, 0.005])
    assert bins.running.sum() == pytest.approx(0.03) and bins.waiting.sum() == pytest.approx(0.02)
    assert bins.cache.sum() == pytest.approx(0.07) and bins.decoded.sum() == pytest.approx(3.0)


@pytest.mark.parametrize(
    "gap", [0.0, 1e-7, 9.99e-6, 1e-5, 1.01e-5, 3e-4, 0.02, 1.7, 7e3, 1e5, 1e12]
)
def test_gaps_are_in_the_bin_whose_edges_are_around_them(gap: float) -> None:
    expected = min(int(np.searchsorted(GAP_EDGES, gap, side="right")), GAPS - 1)
    assert scheduler.gap_bin(gap) == expected


def test_rounds_of_a_line_are_the_fewest() -> None:
    """Also where a sum of rounds is exactly the time, and where closed forms round."""
    random = np.random.default_rng(0)
    for n in range(1, 60):
        first = float(10 ** random.uniform(-4, 1))
        slope = float(random.choice([0.0, 10 ** random.uniform(-9, 0) * first, -first / 200]))

        def took(k: int, first: float = first, slope: float = slope) -> float:
            return k * first + slope * (k * (k - 1.0) / 2)

        for seconds in (took(n), np.nextafter(took(n), 0), np.nextafter(took(n), np.inf),
                        took(n) * 0.97, 0.0):  # fmt: skip
            expected = next(k for k in range(1, 70) if took(k) >= seconds)
            assert costs._count_rounds(first, slope, float(seconds)) == expected


# the beginning of a run


@pytest.mark.parametrize("replicas", [0, -1, 100_001, 161_051])
def test_a_fleet_has_one_to_a_hundred_thousand_replicas(replicas: int) -> None:
    one = Requests(np.zeros(1), np.array([8]), np.array([2]))
    with pytest.raises(InputError, match=f"--replicas: got {replicas}; expected 1 to 100,000"):
        simulate(one, tables_of("full", 8, 128, "chunked"), replicas)


def test_a_prompts_ops_have_names_of_their_own_in_a_mixed_pass() -> None:
    """Waits among them follow, also those a layer back; waits for what is shared stay."""
    ops = [Op("load", "h2d", after=("attn@-2", "qkv")), Op("attn", after=("load", "topk@step-1"))]
    found = _renamed(ops)
    assert [op.name for op in found] == ["prompt load", "prompt attn"]
    assert found[0].after == ("prompt attn@-2", "qkv")
    assert found[1].after == ("prompt load", "topk@step-1")


@pytest.mark.parametrize(
    ("prompts", "tiers", "runs"),
    [
        ("0123 0123 012", False, "0000 0000 000"),  # what ends earlier parts nothing
        ("0123 0145 0167", False, "0022 0044 0066"),
        ("01 21", False, "01 21"),  # the same block after two others
        ("012 12", False, "011 11"),
        ("0123 0123", True, "0123 0123"),
    ],
)
def test_blocks_that_always_follow_each_other_are_one_run(
    prompts: str, tiers: bool, runs: str
) -> None:
    each = [list(map(int, prompt)) for prompt in prompts.split()]
    lengths = np.array([len(ids) for ids in each])
    start, alike = np.concatenate([[0], np.cumsum(lengths)]), np.ones(len(each), np.int64)
    some = Requests(np.zeros(len(each)), 32 * lengths, alike, np.concatenate(each), start, 32)
    places = find_places(some, make(Limits, 1, parts=2, tiers=tiers)[0])
    assert places.block.tolist() == [int(run) for run in runs.replace(" ", "")]
    for first, last in pairwise(start):
        inside = places[first:last]
        for i, place in enumerate(inside):  # blocks of a run are numbered and counted
            same = inside.block == place.block
            assert tiers or place.before == 2 * (i - np.flatnonzero(same)[0])
            assert place.left == 2 * same[i:].sum()
    finer = find_places(some, make(Limits, 1, parts=4, tiers=tiers)[0])
    assert finer.left.tolist() == (2 * places.left).tolist()  # engines' blocks of another size
