"""Rounds of self-speculative decoding: draft gamma tokens, verify them in one pass."""

from dataclasses import replace

import numpy as np

from kvsim.graph import Point

# Accepted over drafted tokens at each gamma, means over the four model and dataset pairs that
# the QuantSpec paper measured at 8k context (table 6). Other models and texts differ: the
# acceptance of a prediction is an input, and these are its defaults.
PUBLISHED = {
    "quantspec": {1: 0.9456, 2: 0.9398, 4: 0.9041, 6: 0.8454},
    "streamingllm": {1: 0.8683, 2: 0.8213, 3: 0.7732},
    "snapkv": {1: 0.8119, 2: 0.7536, 3: 0.7141},
}


def acceptance_rate(given: float | str, draft: str, gamma: int) -> float:
    """Accepted over drafted tokens: as given, or the published mean for that draft.

    Published values are interpolated in gamma and held constant outside their range.
    """
    if not isinstance(given, str):
        return given
    known = PUBLISHED[draft]
    return float(np.interp(gamma, list(known), list(known.values())))


def assumed_acceptance(given: float | str, rate: float) -> str:
    """Says where an acceptance comes from that the user has not given."""
    if not isinstance(given, str):
        return ""
    return f"an acceptance of {rate:.2f}, the published mean for Llama-2-7B at 8k context"


def draft_points(p: Point, gamma: int) -> list[Point]:
    """The draft passes of one round: one new token each, the context growing by one."""
    return [replace(p, context=p.context + i, new=1.0) for i in range(gamma)]


def verify_point(p: Point, gamma: int) -> Point:
    """The verification of all drafts and one more token."""
    return replace(p, new=gamma + 1.0)
