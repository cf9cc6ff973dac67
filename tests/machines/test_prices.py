"""Prices of sellers, and whose are taken."""

import pytest

from kvsim.errors import InputError
from kvsim.machines.prices import ANY, choose_seller, list_prices
from kvsim.machines.profiles import hardware_names, load_hardware


def test_every_price_is_of_a_known_gpu_and_each_seller_asks_one() -> None:
    prices = list_prices()
    assert len({(x.gpu, x.seller) for x in prices}) == len(prices)
    assert {x.gpu for x in prices} <= set(hardware_names())
    assert all(x.usd > 0 and x.terms and x.date and x.source for x in prices)


def test_prices_of_profiles_are_some_sellers() -> None:
    asked = {(x.gpu, x.usd) for x in list_prices()}
    own = {gpu: load_hardware(gpu).price for gpu in hardware_names()}
    assert {(gpu, usd) for gpu, usd in own.items() if usd is not None} <= asked


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
