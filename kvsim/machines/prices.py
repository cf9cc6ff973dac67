"""List prices of GPUs by seller (``prices.csv``), with terms, dates and sources."""

import csv
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen

ANY = "any"  # in place of a seller: whoever asks least for each GPU


@frozen
class Price:
    """The price of one GPU at one seller.

    Attributes
    ----------
    gpu
        Name of the GPU's profile.
    seller, terms, region
        Who rents it out, on which terms (such as on demand), and where.
    least
        GPUs that have to be rented together.
    usd
        Price of one GPU. [USD/h]
    date, source
        When the price was seen, and where.
    """

    gpu: str
    seller: str
    terms: str
    region: str
    least: int
    usd: float
    date: str
    source: str

    @property
    def words(self) -> str:
        """Seller, terms and date of the price."""
        several = f", {self.least} together" if self.least > 1 else ""
        where = f" in {self.region}" if self.region else ""
        return f"{self.seller}, {self.terms}{where}{several}, {self.when}"

    @property
    def when(self) -> str:
        """The date, or that it is recalled."""
        return self.date if self.date[:1].isdigit() else f"date {self.date}"


@cache
def list_prices() -> tuple[Price, ...]:
    """Return every known price."""
    text = (files("kvsim.machines") / "prices.csv").read_text(encoding="utf-8")
    return tuple(
        Price(**row | {"least": int(row["least"]), "usd": float(row["usd"])})  # type: ignore[arg-type]
        for row in csv.DictReader(text.splitlines())
    )


def find_sellers(gpus: Iterable[str]) -> dict[str, dict[str, Price]]:
    """Return the prices of every seller who offers any of some GPUs.

    Parameters
    ----------
    gpus
        Names of GPUs, as ``kvsim gpus`` lists them.

    Returns
    -------
    dict
        Price by seller and GPU. Sellers who offer more of the GPUs come first; among equals, those
        with more recent prices, then those with lower ones.
    """
    asked, found = set(gpus), dict[str, dict[str, Price]]()
    for price in list_prices():
        if price.gpu in asked:
            found.setdefault(price.seller, {})[price.gpu] = price

    def rank(seller: str) -> tuple[int, int, float]:
        some = found[seller].values()
        years = [int(x.date[:4]) if x.date[:4].isdigit() else 0 for x in some]
        return -len(some), -min(years), sum(x.usd for x in some)

    return {seller: found[seller] for seller in sorted(found, key=rank)}


def choose_seller(
    gpus: Iterable[str], seller: str | None = None, optional: Iterable[str] = ()
) -> dict[str, Price]:
    """Return the prices that one seller asks for some GPUs, or the lowest of anyone.

    Parameters
    ----------
    gpus
        Names of GPUs.
    seller
        Name of a seller, or ``any``; if None the one who offers all of the GPUs, else ``any``.
    optional
        GPUs that may lack a price.

    Returns
    -------
    dict of Price
        By GPU.

    Raises
    ------
    InputError
        If the seller is unknown, or offers only some of the GPUs.
    """
    asked = list(dict.fromkeys(gpus))
    every = find_sellers(asked)
    if seller is not None and seller not in (ANY, *(known := {x.seller for x in list_prices()})):
        raise unknown("seller in --seller:", seller, (*known, ANY))
    if seller is None:
        whole = (name for name, sold in every.items() if set(asked) <= {*sold, *optional})
        seller = next(whole, ANY)
    if seller == ANY:
        found = {
            gpu: min((x[gpu] for x in every.values() if gpu in x), key=lambda price: price.usd)
            for gpu in asked
            if any(gpu in x for x in every.values())
        }
    else:
        found = every.get(seller, {})
    missing = [gpu for gpu in asked if gpu not in {*found, *optional}]
    if missing:
        others = [x for x, prices in every.items() if missing[0] in prices]
        mend = f"add --price {missing[0]}=USD, per GPU and hour"
        if not others:
            raise InputError(f"--price: no price of {missing[0]} is known; {mend}")
        raise InputError(
            f"--seller: {seller} asks no price for {missing[0]}, which is from "
            f"{' or '.join(others)}; add --seller any to take each GPU where it is cheapest, or "
            f"{mend}"
        )
    return found
