"""Drafts looked up in the text so far."""

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.drafting import SpeculativeDrafter

SMALL_SETTINGS = ("gamma=2,acceptance=0.5",)  # acceptance is counted
MAX_NGRAM = 3  # tokens that are looked for; fewer where they stand nowhere else


class Ngram(SpeculativeDrafter):
    """Drafter that copies the tokens that followed an earlier occurrence of the latest tokens.

    Without an earlier occurrence, the newest token is drafted again.

    References
    ----------
    .. [1] N. Yang et al., "Inference with reference", arXiv:2304.04487, 2023, section 3.
    """

    def draft(self, generation: RunningGeneration, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Search each sequence's text on the host for drafts."""
        written = generation.tokens.tolist()
        texts = [
            np.array([*prompt, *own[:done]], np.int64)
            for prompt, own, done in zip(generation.prompts, written, generation.done, strict=True)
        ]
        drafts = torch.tensor([continued(text, count) for text in texts])
        found = list(drafts.to(generation.last.device).unbind(1)) if count else []
        return found, [one_hot(token, self.run.model.vocab).float() for token in found]


def continued(text: NDArray[np.int64], count: int) -> list[int]:
    """Return the drafts for a text: tokens that followed its last ones earlier.

    Parameters
    ----------
    text
        Tokens of the text.
    count
        Number of drafts. [tokens]
    """
    for many in range(min(MAX_NGRAM, len(text) - 1), 0, -1):
        alike = (sliding_window_view(text[:-1], many) == text[-many:]).all(1)
        if alike.any():
            start = len(alike) - 1 - int(alike[::-1].argmax())
            after = text[start + many : start + many + count].tolist()
            return [*after, *[int(text[-1])] * (count - len(after))]
    return [int(text[-1])] * count
