"""What `kvsim validate --quality` measured: the traces that ship, and the user's own."""

import re
from collections.abc import Iterable
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.quality.settings import FACTS, PERPLEXITY, Harshness, harshness
from kvsim.techniques import parse
from kvsim.traces.shipped import measured

if TYPE_CHECKING:
    from kvsim.traces.attention import AttentionTrace, Retrieval

READ = re.compile(r"(\d+) windows of (\d+) tokens, (\d+) scored")


@frozen
class QualityRun:
    """One setting on one checkpoint.

    Attributes
    ----------
    loss
        By how much perplexity grew, or how many of the planted facts were lost, relative: the
        larger of the two where both were measured.
    error
        Standard error of the loss. The two runs score the same tokens, and for distributions as
        near each other as these the variance of their log-ratio is about twice the KL divergence;
        answers count as if they were independent.
    retrieval
        Whether planted facts were asked for.
    """

    model: str
    setting: Harshness
    technique: str
    loss: float
    error: float
    unit: str
    retrieval: bool
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
    runs = []
    for q in trace.quality:
        ratio = q.perplexity / trace.perplexity
        losses = [(ratio - 1, ratio * sqrt(2 * q.kl / (windows * scored)), PERPLEXITY)]
        if q.found is not None and trace.retrieval is not None and trace.retrieval.found:
            losses.append((*_lost(q.found, trace.retrieval), FACTS))
        loss, error, unit = max(losses)
        runs.append(
            QualityRun(
                model=trace.model,
                setting=harshness(parse(q.technique), prompt),
                technique=q.technique,
                loss=loss,
                error=error,
                unit=unit,
                retrieval=len(losses) > 1,
                context=prompt,
                source=f"{windows * scored} tokens of {trace.text.split(';')[0]}, {trace.date}",
            )
        )
    return tuple(runs)


def _lost(found: float, full: "Retrieval") -> tuple[float, float]:
    """Share of the facts that full KV finds which a technique does not, and its error."""
    variance = (found * (1 - found) + full.found * (1 - full.found)) / full.facts
    return 1 - found / full.found, sqrt(variance) / full.found


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
