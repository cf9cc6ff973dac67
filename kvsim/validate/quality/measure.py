"""Quality, attention and acceptance of techniques on a text, as one trace."""

from collections.abc import Iterator
from datetime import date

import torch
from torch import Tensor

from kvsim.quality.settings import family
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import AttentionTrace, Prefetch, Quality, Retrieval, Saliency, TopK
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.composed import Composed
from kvsim.validate.progress import Progress
from kvsim.validate.quality.facts import Asked, PlantedFacts
from kvsim.validate.quality.runs import (
    SHARE_DIGITS,
    WATCHED,
    Forced,
    NotingPairs,
    Watched,
    WatchedFull,
    measure_acceptance,
    named,
    powers,
)
from kvsim.validate.quality.settings import Reading, Settings

TEMPERATURES = (0.0, 1.0)


@torch.inference_mode()
def measure(
    decoder: Decoder,
    settings: Settings,
    reading: Reading,
    texts: list[list[int]],
    about: dict[str, str],
    facts: PlantedFacts | None = None,
) -> Iterator[AttentionTrace | str]:
    """Yields what it is about to do as text, and a trace at the end.

    Parameters
    ----------
    texts : windows of a text. (windows, reading.length)
    about : ``model``, ``weights``, ``text`` and ``settings`` as the trace has them.
    facts : what evicting techniques are asked for, if anything.
    """
    evicting = [t for t in settings.lossy if facts and family(t) == "eviction"]
    runs = 1 + len(settings.lossy) + len(TEMPERATURES) * len(settings.drafts)
    progress = Progress(runs + len(evicting) + bool(evicting))
    yield progress.line("full")
    full = _run(decoder, parse("full"), texts, reading)
    assert isinstance(full.impl, WatchedFull)
    mass = full.impl.noted.means()
    retrieval: Retrieval | None = None
    if facts and evicting:
        yield progress.line("full, planted facts")
        retrieval = Retrieval(
            facts.count, _round_significant(_measure_recall(decoder, parse("full"), facts))
        )
    quality, prefetch, saliency, acceptance = [], [], [], []
    for t in settings.lossy:
        yield progress.line(str(t))
        run = _run(decoder, t, texts, reading, full.kept)
        found: float | None = None
        if facts and t in evicting:
            yield progress.line(f"{t}, planted facts")
            found = _round_significant(_measure_recall(decoder, t, facts))
        quality.append(
            Quality(
                named(t),
                _round_significant(run.perplexity),
                _round_significant(run.divergence),
                found,
            )
        )
        if not isinstance(run.impl, Watched):
            continue
        first = run.impl.layers[0]
        if isinstance(first, NotingPairs) and first.chosen and first.guesses:
            pairs, held = run.impl.noted.means().unbind(-1)
            prefetch.append(
                Prefetch(first.chosen, int(t.settings["bits"]), _row(pairs), _row(held))
            )
        if t.name == "zipcache" and 0 < t.settings["salient"] < 1:
            share, probe = t.settings["salient"], t.settings["probe"]
            overlap = _row(run.impl.noted.means())
            saliency.append(Saliency(float(share), float(probe), overlap))
    prompts = [text[: reading.prompt] for text in texts]
    for t in settings.drafts:
        for heat in TEMPERATURES:
            yield progress.line(f"{named(t)}, acceptance at temperature {heat:g}")
            accepted = measure_acceptance(decoder, t, prompts, reading.written, heat)
            if accepted:
                acceptance.append(accepted)
            else:
                yield f"left out: some gamma had no round in {reading.written} tokens"
    m = decoder.arch.model
    yield AttentionTrace(
        tokens=len(texts) * reading.length,
        layers=m.layers,
        date=date.today(),
        perplexity=_round_significant(full.perplexity),
        quality=tuple(quality),
        retrieval=retrieval,
        top_k=TopK(tuple(powers(reading.prompt)), tuple(map(_row, mass))),
        prefetch=tuple(prefetch),
        saliency=tuple(saliency),
        acceptance=tuple(acceptance),
        **about,
    )


def _run(
    decoder: Decoder,
    technique: Technique,
    texts: list[list[int]],
    reading: Reading,
    truth: list[Tensor] | None = None,
) -> Forced:
    kind = WATCHED.get(technique.name, Composed)
    run = Forced(decoder, technique, texts, reading.prompt, truth, kind)
    run.complete()
    return run


def _measure_recall(decoder: Decoder, technique: Technique, facts: PlantedFacts) -> float:
    asked = Asked(decoder, technique, facts)
    asked.complete()
    return asked.recall


def _row(shares: Tensor) -> tuple[float, ...]:
    return tuple(round(share, SHARE_DIGITS) for share in shares.tolist())


def _round_significant(number: float) -> float:
    return float(f"{number:.{SHARE_DIGITS}g}")
