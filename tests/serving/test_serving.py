"""The compiled simulator against the plain one, and what must hold in every run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsim import techniques
from kvsim.engine.roofline import all_ops
from kvsim.errors import InputError
from kvsim.graph import Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point
from kvsim.serving.costs import StepCosts, pass_seconds, simple_pass_seconds
from kvsim.serving.outcome import Outcome, faults
from kvsim.serving.records import FINISHED, REFUSED
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import draw_rates, simulate
from kvsim.serving.world import limits_of
from kvsim.traces.requests import Requests
from tests.support.plain.memory import PlainRequest, PlainSequence
from tests.support.plain.scheduler import PlainReplica
from tests.support.served import LONGEST, OPTIONS, check_fleet, tables_of

PLAYED = 192  # workloads, three under each of the options; benchmarks/reference.py plays 32,000


@pytest.mark.parametrize("seed", range(0, PLAYED, 12))
def test_every_request_has_the_times_of_the_plain_simulator(seed: int) -> None:
    for number in range(seed, seed + 12):
        check_fleet(number, OPTIONS[number % len(OPTIONS)])


def test_a_round_of_many_tokens_can_be_drawn_or_taken_at_its_mean() -> None:
    costs = tables_of("quantspec", 8, 128, "chunked")
    generate = np.full(4000, 101)
    drawn = draw_rates(costs, generate, seed=1)
    assert (draw_rates(costs, generate, seed=1) == drawn).all()
    assert (drawn >= 1).all()
    assert (drawn <= 5).all()
    rounds = 100 / drawn
    # a request's last round may be cut short, by less than one round on average
    assert 100 / costs.rate <= rounds.mean() <= 100 / costs.rate + 1
    plain = tables_of("full", 8, 128, "chunked")
    assert (draw_rates(plain, generate, seed=1) == 1).all()


@pytest.mark.parametrize("name", ["full", "kivi", "kvpr", "quantspec", "h2o"])
def test_tables_are_as_near_to_direct_evaluation_as_they_say(name: str) -> None:
    costs = tables_of(name, 8, 128, "chunked")
    random = np.random.default_rng(5)
    batch = random.integers(1, 8, 40).astype(float)
    context = random.integers(1, LONGEST, 40).astype(float)
    direct = costs.passes.round(batch, context)
    table = simple_pass_seconds(costs.tables, batch=batch, context=context)
    assert np.abs(table / direct - 1).max() <= max(2 * costs.error["rounds"], 1e-9)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 3), (1, 0), (2, 5)])
def test_a_pass_takes_what_its_composition_says(prefill: int, decode: int) -> None:
    """As the plain simulator adds it up; the first part ends its prompt."""
    costs = tables_of("full", 8, 128, "chunked")
    cached = [40.0 + 17 * i for i in range(decode)]
    chunks = [(30 + 9 * i, 64 * i) for i in range(prefill)]
    ends = [i == 0 for i in range(prefill)]
    limits = limits_of(costs, Requests(np.zeros(1), np.array([64]), np.array([9])))
    replica = PlainReplica(costs.tables, limits)
    for length in cached:
        request = PlainRequest(0, 0.0, 64, 9, 1.0, [])
        running = PlainSequence(request, 0, 0, 0, length=length, left=9, runs=True)
        replica.batch.append(running)
    for (tokens, start), last in zip(chunks, ends, strict=True):
        request = PlainRequest(0, 0.0, start + tokens, 9, 1.0, [])
        reading = PlainSequence(request, tokens if last else 2 * tokens, start, 0, chunk=tokens)
        replica.batch.append(reading)
    replica.play()
    assert pass_seconds(costs.tables, cached, chunks, ends) == pytest.approx(replica.clock)


def test_an_empty_pass_takes_no_time() -> None:
    assert pass_seconds(tables_of("full", 8, 128, "chunked").tables) == 0


@pytest.mark.parametrize("name", ["full", "kivi", "gear", "quantspec", "specache", "h2o"])
def test_rounds_are_read_to_two_parts_in_a_thousand(name: str) -> None:
    """Also where costs have teeth or kinks; what the tables say of themselves is measured."""
    assert tables_of(name, 8, 128, "chunked").error["rounds"] <= 2e-3


def test_one_request_alone_takes_what_predict_says() -> None:
    """Prefill, then one round per token at its own context: the prediction for batch 1."""
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    costs = StepCosts(techniques.parse("full"), d, Rules(prefill="whole"), 700, 512)
    run = simulate(Requests(np.zeros(1), np.array([512]), np.array([100])), costs)
    alone = Prediction(techniques.parse("full"), d, np.ones(1), 512, 100)
    assert run.progress.first[0] == pytest.approx(alone.ttft_s[0], rel=2e-3)
    span = run.progress.last[0] - run.progress.first[0]
    assert span == pytest.approx(alone.decode_s[0], rel=2e-3)


def test_a_request_larger_than_the_cache_is_refused_and_the_others_are_served() -> None:
    base = tables_of("full", 8, 128, "chunked")
    costs = replace(base, rules=replace(base.rules, blocks=10))
    object.__setattr__(costs, "tables", base.tables)
    run = simulate(Requests(np.zeros(2), np.array([300, 30]), np.array([5, 5])), costs)
    assert run.progress.status.tolist() == [REFUSED, FINISHED]
    assert faults(run) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqs": -1}, "--max-seqs: got -1; expected a whole number from 1 to"),
        ({"block_tokens": True}, "--block-tokens: got True; expected a whole number"),
        ({"blocks": 10**12}, "--blocks: got 1000000000000"),
        ({"prefill": "some"}, "--prefill: got 'some'; expected chunked or whole"),
        ({"admission": "never"}, "--admission: got 'never'"),
        ({"host_cache": float("nan")}, "--host-cache: got nan"),
    ],
)
def test_rules_out_of_range_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as problem:
        Rules(**change)
    assert message in str(problem.value)


def test_two_gpus_swap_a_sequence_in_half_the_time_of_one() -> None:
    """Each copies its own half over its own link."""
    one = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    tables = [
        StepCosts(techniques.parse("full"), d, Rules(max_seqs=2), LONGEST, LONGEST).tables
        for d in (one, replace(one, tp=2))
    ]
    took = [np.array([t.gpu_bytes[-1] / t.d2h, t.gpu_bytes[-1] / t.h2d]) for t in tables]
    np.testing.assert_allclose(took[1] / took[0], 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["full", "kvpr", "fastdecode"])
def test_utilisation_is_what_the_ops_move_and_compute(name: str) -> None:
    """One request alone, its passes counted one by one."""
    kind = techniques.parse(name)
    d = Deployment(load_model("llama3.2-1b"), load_hardware("rtx4090"), load_stack("fused"))
    generate = 40
    costs = StepCosts(kind, d, Rules(prefill="whole"), LONGEST, 512)
    run = simulate(Requests(np.zeros(1), np.array([512]), np.array([generate])), costs)
    kind = kind.for_batches(np.ones(1))
    tiles = float(kind.tiles())
    steps = [kind.prefill(d, Point(tiles, 0.0, 512 / tiles, 512.0, 513.0, prefill=True))]
    steps += kind.predecoding(d, decode_point(tiles, 512.0, 2.0, 0.0))
    for length in np.arange(512.0, 511.0 + generate):
        steps += kind.cycle(d, Point(tiles, length, 1.0, length, length + 1.0)).steps
    found = Outcome(run).utilisation
    for channel in ("hbm", "h2d", "d2h", "dram"):
        moved = sum(
            count * float(np.ravel(op.bytes.get(channel, 0.0))[0])
            for step in steps
            for op, count in all_ops(step)
        )
        expected = moved / d.bandwidth[channel] / run.replicas.clock[0]
        assert found[channel] == pytest.approx(expected, rel=5e-3), channel
    flops = sum(
        count * float(np.ravel(op.flops)[0]) / d.flops(op.dtype)
        for step in steps
        for op, count in all_ops(step)
        if op.stream != "cpu"
    )
    assert found["compute"] == pytest.approx(flops / run.replicas.clock[0], rel=5e-3)
    assert 0 < found["hbm"] < 1 and max(found.values()) < 1
    assert found["h2d"] > 0 or name == "full"


@pytest.mark.parametrize(("ahead", "later"), [(False, 1), (True, 2)])
def test_a_pass_that_is_put_together_ahead_leaves_out_who_comes_meanwhile(
    ahead: bool, later: int
) -> None:
    """A request that arrives during a pass is in the next one, or in the one after."""
    costs = tables_of("full", 8, 128, "chunked")
    costs = costs.with_rules(replace(costs.rules, ahead=ahead))
    first = simulate(Requests(np.zeros(1), np.array([40]), np.array([60])), costs)
    begin, end = first.progress.first[0], first.progress.last[0]
    each = (end - begin) / 59  # of a decoding pass [s]
    arrival = np.array([0.0, begin + 4.5 * each])
    run = simulate(Requests(arrival, np.array([40, 8]), np.array([60, 1])), costs)
    ends = begin + (4 + later) * each  # of the last pass without it
    assert run.progress.started[1] == pytest.approx(ends, rel=2e-2)
