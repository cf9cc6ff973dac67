"""Requests of a trace in classes: alike in prompt and in generated tokens."""

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.traces.requests import Requests

PER_AXIS = 3  # classes by prompt, and of each of those by generated tokens


@frozen
class Classes:
    """Mean lengths and rates of the classes of a trace.

    Attributes
    ----------
    prompt, generate
        Mean lengths. (c,) [tokens]
    per_s
        Requests per second over the whole trace. (c,) [1/s]
    of, prompts
        The class of each request, and its prompt. (n,) [tokens]
    """

    prompt: Array
    generate: Array
    per_s: Array
    of: NDArray[np.int64]
    prompts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.per_s)

    @property
    def decoded_per_s(self) -> Array:
        """Tokens per second after the first of each request. (c,) [tokens/s]"""
        return self.per_s * (self.generate - 1)


def classes_of(requests: Requests, per_axis: int = PER_AXIS) -> Classes:
    """Prompts in parts of equally many tokens, and each part again by generated tokens.

    The rates are those of the trace's duration; requests that all arrive at once count as
    arriving within one second.
    """
    prompts = _parts(requests.prompt, per_axis)
    of = np.zeros(len(requests), np.int64)
    for part in range(per_axis):
        rows = np.flatnonzero(prompts == part)
        of[rows] = part * per_axis + _parts(requests.generate[rows], per_axis)
    _, of = np.unique(of, return_inverse=True)
    count = np.bincount(of)
    duration = requests.duration or 1.0
    return Classes(
        prompt=np.bincount(of, requests.prompt) / count,
        generate=np.bincount(of, requests.generate) / count,
        per_s=count / duration,
        of=of.astype(np.int64),
        prompts=requests.prompt,
    )


def _parts(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Parts 0, 1, ... of equally many tokens, the shortest first; equal lengths stay together."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    first = np.searchsorted(ordered, lengths, side="left")
    before = np.where(first > 0, share[first - 1], 0.0)
    return np.minimum((before * count).astype(np.int64), count - 1)
