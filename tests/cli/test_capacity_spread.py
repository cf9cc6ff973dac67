"""Candidates of `kvsim capacity` that are spread by stages, copies of attention and experts."""

import json

import pytest

from kvsim.api.fleets import list_rentable
from kvsim.emit.served import serve_costs
from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import Parallelism
from kvsim.machines.prices import choose_seller
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.options import Inputs
from kvsim.planner.fleet.offers import Configuration, Rentable
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.techniques import parse
from tests.support.commands import run
from tests.support.envelope import answer_in

WHERE = ("capacity", "--trace", "sample:chat", "--gpus", "h100", "--ttft", "2s", "--tpot", "100ms")


def rentable(model: str, *spread: str) -> list[Rentable]:
    tp, pp, dp, ep = spread
    case = {
        "trace": "sample:chat", "model": model, "gpus": "h100", "ttft": 2, "tpot": 0.1, "tp": tp,
        "pp": pp, "dp": dp, "ep": ep, "weights": "fp16", "stack": "fused",
        "reserved": {"h100": 1.0}, "watts": "h100=700",
    }  # fmt: skip
    return list_rentable(Inputs("capacity", case))[0]


def test_every_way_that_a_model_can_be_spread_is_a_candidate() -> None:
    some = rentable("mixtral-8x7b", "2,4", "1,2", "1,2", "1,8")
    spreads = {x.deployment.parallelism for x in some}
    whole = {Parallelism(tp, pp, dp, 1) for tp in (2, 4) for pp in (1, 2) for dp in (1, 2)}
    assert spreads == whole | {Parallelism(4, pp, 2, 8) for pp in (1, 2)}
    price = choose_seller(["h100"])["h100"].usd
    for x in some:
        gpus = x.deployment.gpus
        assert x.price == pytest.approx(gpus * price)
        assert (x.reserved, x.power) == (gpus, gpus * 700)


@pytest.mark.parametrize(
    ("model", "spread", "expected"),
    [
        ("llama3-8b", ("1", "1", "2", "1"), "--dp: llama3-8b has no experts"),
        ("llama3-8b", ("1,2", "1", "1", "1,2"), "--ep: llama3-8b has no experts"),
        ("mixtral-8x7b", ("2", "1", "1", "3"), "--ep: got 3"),
        ("llama3-8b", ("1", "100", "1", "1"), "--pp: got 100"),
        ("llama3-8b", ("1", "1,x", "1", "1"), "--pp: got '1,x'"),
    ],
)
def test_degrees_that_no_candidate_can_have_are_refused(
    model: str, spread: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        rentable(model, *spread)


def test_a_replica_has_the_gpus_and_memories_of_all_its_ranks() -> None:
    d = Deployment(load_model("mixtral-8x7b"), load_hardware("h100"), load_stack("fused"), "fp16",
                   tp=2, dp=2, ep=4)  # fmt: skip
    rules = Rules(max_seqs=32, prefix_caching=True, host_cache=4e9, nvme_cache=8e9).scale_to(d)
    x = Configuration(StepCosts(parse("full"), d, rules, 4096, 2048), "h100", 16.0)
    assert (x.gpus, x.name.partition(" full")[0]) == (4, "4 h100 (tp 2, dp 2, ep 4)")
    served = serve_costs(x.costs, 0.9, (2, 1))
    assert (served.max_seqs, served.nvme_cache, served.apart) == (32, 8e9, (2, 1))
    assert served.spread == d.parallelism


def test_the_command_prices_proves_and_emits_stages() -> None:
    found = answer_in(run(*WHERE, "--model", "llama3-8b", "--tp", "1", "--pp", "2", "--only",
                           "full", "--emit", "vllm", "--json").out)  # fmt: skip
    (replica,) = found["fleet"]
    assert (replica["tp"], replica["pp"]) == (1, 2) and "dp" not in replica
    price = choose_seller(["h100"])["h100"].usd
    assert replica["usd_per_hour"] == pytest.approx(2 * price * replica["replicas"])
    assert "--pipeline-parallel-size 2" in " ".join(json.dumps(replica["settings"]).split())
