"""What `kvsim validate --quality` measured: the traces that ship, and the user's own."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING

from kvsim.errors import InputError
from kvsim.quality.settings import Harshness, harshness
from kvsim.techniques import parse
from kvsim.traces.shipped import measured

if TYPE_CHECKING:
    from kvsim.traces.attention import AttentionTrace

READ = re.compile(r"(\d+) windows of (\d+) tokens, (\d+) scored")


@dataclass(frozen=True)
class QualityRun:
    """One setting on one checkpoint.

    Attributes
    ----------
    loss
        By how much perplexity grew, relative.
    error
        Standard error of the loss. The two runs score the same tokens, and for distributions as
        near each other as these the variance of their log-ratio is about twice the KL divergence.
    """

    model: str
    setting: Harshness
    technique: str
    loss: float
    error: float
    context: float  # of the run [tokens]
    source: str


def runs_of(trace: "AttentionTrace") -> tuple[QualityRun, ...]:
    """The settings that a trace measured.

    Raises
    ------
    InputError
        If the trace does not say how its text was read.
    """
    read = READ.search(trace.settings)
    if read is None:
        raise InputError(
            f"quality of {trace.model}: its settings are {trace.settings[:60]!r}; expected "
            f"'N windows of N tokens, N scored ...', as `kvsim validate --quality` writes them"
        )
    windows, prompt, scored = map(int, read.groups())
    return tuple(
        QualityRun(
            model=trace.model,
            setting=harshness(parse(q.technique), prompt),
            technique=q.technique,
            loss=q.perplexity / trace.perplexity - 1,
            error=q.perplexity / trace.perplexity * sqrt(2 * q.kl / (windows * scored)),
            context=prompt,
            source=f"{windows * scored} tokens of {trace.text.split(';')[0]}, {trace.date}",
        )
        for q in trace.quality
    )


@cache
def shipped(model: str) -> tuple[QualityRun, ...]:
    """The runs on one model that come with kvsim."""
    path = measured().get(model)
    if path is None:
        return ()
    from kvsim.traces.attentionfile import load  # only where there is something to read

    return runs_of(load(path))


def with_own(own: Iterable["AttentionTrace"]) -> tuple[QualityRun, ...]:
    """The user's runs, and what ships for models that the user has not measured."""
    mine = [run for trace in own for run in runs_of(trace)]
    others = [model for model in measured() if model not in {run.model for run in mine}]
    return (*mine, *(run for model in others for run in shipped(model)))
