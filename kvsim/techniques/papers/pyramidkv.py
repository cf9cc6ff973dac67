"""PyramidKV: SnapKV with budgets that shrink from the first layer to the last."""

from bisect import bisect_left

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.settings import Budget, param
from kvsim.techniques.papers.snapkv import Snapkv

RELEASED_WINDOW = 8  # observing queries of the release [tokens]
WHOLE_PROMPT = 1 - 1e-9  # a share that is all of any prompt


@frozen
class Pyramidkv(Snapkv):
    """Keeps fewer prompt tokens in deeper layers.

    Budgets fall linearly with depth among the layers with a cache; their mean is ``budget``.

    The last layer keeps the mean divided by ``beta``, and the first twice the mean minus that
    number.

    References
    ----------
    .. [1] Z. Cai et al., "PyramidKV: dynamic KV cache compression based on pyramidal information
       funneling", 2024, section 4.2, equations 3 and 4; beta 20, window 8.
    """

    name = "pyramidkv"

    budget: Number = param(
        1024, "prompt tokens kept, mean over layers [tokens]", low=1, high=1e7, share=True
    )
    window: int | str = param(  # type: ignore[assignment]
        8, "observing queries [tokens], or on-top: 8 beyond the budget, as released",
        low=1, high=1e5, also="on-top".__eq__,
    )  # fmt: skip
    beta: float = param(
        20, "ratio of the mean budget to that of the last layer", low=1, high=1e3, whole=False
    )

    candidates = ({"budget": Budget((0.125, 0.25, 0.5), of="prompt", least=8)},)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.window, str) and self.shares:
            raise InputError(
                f"{self.name}: window={self.window} adds tokens; give budget in tokens"
            )

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return all layers but the first, as every layer has a different budget."""
        return tuple(range(1, deployment.model.layers))

    def for_layer(self, index: int, deployment: Deployment) -> Snapkv:  # type: ignore[override]
        """Return the selection of one layer, whose budget is at least the window."""
        least, caches = self.budget / self.beta, deployment.model.caches
        depth = bisect_left(caches, index) / max(1, len(caches) - 1)
        budget = 2 * self.budget - least - depth * (2 * self.budget - 2 * least)
        if isinstance(self.window, str):  # kvpress and the release add it to every layer's budget
            return Snapkv(np.round(budget) + RELEASED_WINDOW, RELEASED_WINDOW)
        if self.shares:
            return Snapkv(np.minimum(budget, WHOLE_PROMPT), self.window)
        return Snapkv(np.maximum(np.round(budget), self.window), self.window)
