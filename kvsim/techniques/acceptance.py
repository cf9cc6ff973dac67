"""How many drafts are accepted: a rate, shares by position, or published means."""

from itertools import pairwise
from typing import Any

import numpy as np

from kvsim.errors import InputError
from kvsim.techniques.settings import param

# Accepted over drafted tokens at each gamma, means over the four model and dataset pairs that
# the QuantSpec paper measured at 8k context (table 6). Other models and texts differ: the
# acceptance of a prediction is an input, and these are its defaults.
PUBLISHED = {
    "quantspec": {1: 0.9456, 2: 0.9398, 4: 0.9041, 6: 0.8454},
    "streamingllm": {1: 0.8683, 2: 0.8213, 3: 0.7732},
    "snapkv": {1: 0.8119, 2: 0.7536, 3: 0.7141},
    "mtp": {1: 0.875},  # DeepSeek-V3 technical report, section 5.4.3: 85 to 90 %
}
Acceptance = float | str


def acceptance_param(default: Acceptance = "auto") -> Any:
    """The setting: accepted over drafted tokens, or shares of rounds by position, as 0.8/0.6."""
    return param(
        default, "accepted over drafted tokens, or by position as 0.8/0.6/0.5",
        high=1, choices=("auto",), whole=False, also=is_shares,
    )  # fmt: skip


def is_shares(text: str) -> bool:
    """Whether a text lists shares of rounds that accept at least 1, 2, ... drafts."""
    try:
        shares = [float(item) for item in text.split("/")]
    except ValueError:
        return False
    falling = all(a >= b for a, b in pairwise(shares))
    return all(0 <= share <= 1 for share in shares) and falling


def accepted_drafts(name: str, given: Acceptance, gamma: int, published: str = "") -> float:
    """Drafts accepted per round, on average.

    Published rates are interpolated in gamma and held constant outside their range.

    Raises
    ------
    InputError
        If nothing is published for such drafts, or shares are given for fewer than gamma.
    """
    if not gamma:
        return 0.0
    if not isinstance(given, str):
        return gamma * given
    if given == "auto":
        if published not in PUBLISHED:
            raise InputError(
                f"{name}: no acceptance is published for such drafts; set acceptance=SHARE, "
                f"accepted over drafted tokens"
            )
        known = PUBLISHED[published]
        return gamma * float(np.interp(gamma, list(known), list(known.values())))
    shares = [float(item) for item in given.split("/")]
    if len(shares) < gamma:
        raise InputError(
            f"{name}: acceptance={given} has {len(shares)} positions and gamma is {gamma}; "
            f"give a share for each"
        )
    return sum(shares[:gamma])


def assumed_acceptance(given: Acceptance, accepted: float, gamma: int) -> str:
    """Says where an acceptance comes from that the user has not given."""
    if given != "auto" or not gamma:
        return ""
    rate = accepted / gamma
    return f"an acceptance of {rate:.2f}, the published mean for Llama-2-7B at 8k context"
