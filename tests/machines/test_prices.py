"""Prices of sellers, and whose are taken."""

from pathlib import Path

import pytest

from kvsim.errors import InputError
from kvsim.machines.prices import ANY, choose_seller, list_prices
from kvsim.machines.profiles import hardware_names, load_hardware, price_together


def test_every_price_is_of_a_known_gpu_and_each_seller_asks_one() -> None:
    prices = list_prices()
    assert len({(x.gpu, x.seller) for x in prices}) == len(prices)
    assert {x.gpu for x in prices} <= set(hardware_names())
    assert all(x.usd > 0 and x.terms and x.date and x.source for x in prices)


def test_a_gpu_costs_what_its_cheapest_seller_asks_unless_its_profile_says(tmp_path: Path) -> None:
    cheapest: dict[str, float] = {}
    for x in list_prices():
        cheapest[x.gpu] = min(x.usd, cheapest.get(x.gpu, x.usd))
    known = {gpu: load_hardware(gpu) for gpu in hardware_names()}
    assert {gpu: h.price for gpu, h in known.items() if h.price is not None} == cheapest
    own = tmp_path / "h100.toml"
    own.write_text(
        'title = "Mine"\nbasis = "datasheet"\nextends = "h100"\n[price]\nusd_per_hour = 1.5\n'
        'date = "2026"\n[source]\n"price.usd_per_hour" = "our contract"\n'
    )
    mine, l40s = price_together([load_hardware(own), known["l40s"]])
    assert (mine.price, mine.listed, l40s.price) == (1.5, None, cheapest["l40s"])


def test_gpus_that_are_compared_have_the_prices_of_one_seller() -> None:
    cards = [load_hardware(gpu) for gpu in ("l40s", "h100", "gtx1070")]
    terms = choose_seller(("l40s", "h100"))
    assert [h.price for h in price_together(cards)] == [
        *(terms[h.name].usd for h in cards[:2]),
        None,
    ]
    assert price_together(cards)[1].price != cards[1].price


@pytest.mark.parametrize(
    ("gpus", "seller", "expected"),
    [
        (("l40s", "h100"), None, {"runpod-community"}),  # alone in offering both
        (("h100", "h200"), None, {"verda"}),  # of two with both, the more recent and cheaper
        (("h100",), "lambda", {"lambda"}),
        (("l40s", "h200"), ANY, {"runpod-community", "verda"}),
        (("l40s", "h200"), "runpod-community", "asks no price for h200, which is from verda or"),
        (("h100",), "lambada", "unknown seller .* nearest: lambda"),
        (("gtx1070",), None, "no price of gtx1070 is known; add --price gtx1070=USD"),
    ],
)
def test_one_seller_unless_asked(
    gpus: tuple[str, ...], seller: str | None, expected: set[str] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            choose_seller(gpus, seller)
    else:
        assert {x.seller for x in choose_seller(gpus, seller).values()} == expected


def test_where_no_seller_offers_all_each_gpu_is_taken_where_it_is_cheapest() -> None:
    found = choose_seller(("l40s", "a100-80g"))
    assert found == choose_seller(("l40s", "a100-80g"), "any")
    assert {price.seller for price in found.values()} == {"runpod-community", "verda"}


def test_a_seller_is_taken_who_has_every_gpu_that_needs_a_price() -> None:
    found = choose_seller(("a6000", "l40s", "a100-80g", "h100"), optional=["l40s"])
    assert len({price.seller for price in found.values()}) == 1 and "a100-80g" in found
