"""An attention trace as tables."""

from kvsim.report.screen import Screen
from kvsim.report.table import of_cells
from kvsim.report.units import short
from kvsim.traces.attention import GAMMAS, Acceptance, AttentionTrace, Quality, TopK


def print_trace(trace: AttentionTrace) -> None:
    """Quality, attention and acceptance, one table each; layers as mean and least."""
    out = Screen()
    out.title(f"{trace.model}, {trace.layers} layers: {trace.tokens:,} tokens read")
    out.say(f"weights {trace.weights}")
    out.say(f"text {trace.text}")
    out.say(trace.settings)
    out.say(f"perplexity with full-precision KV {short(trace.perplexity)}")
    if trace.quality:
        measured = ["technique", "perplexity", "of full", "KL nat/token"]
        measured += ["facts found"] if trace.retrieval else []
        rows = [_loss(q, trace.perplexity)[: len(measured)] for q in trace.quality]
        out.blank()
        out.table(of_cells(tuple(measured), rows))
    if trace.retrieval:
        share, facts = _percent(trace.retrieval.found), trace.retrieval.facts
        out.say(f"Full-precision KV finds {share} of the {facts} facts planted in the text.")
    if trace.top_k:
        heads = ("pairs kept per query head", *map(str, trace.top_k.k))
        out.blank()
        out.table(of_cells(heads, _masses(trace.top_k)))
    if trace.prefetch:
        rows = [
            [f"k={p.k}, {p.bits}-bit keys", *_both(p.pairs), *_both(p.mass)]
            for p in trace.prefetch
        ]  # fmt: skip
        heads = ("of the oracle's pairs", "least layer", "of their mass", "least layer")
        out.blank()
        out.table(of_cells(("prefetched by SpeCache", *heads), rows))
    if trace.saliency:
        rows = [
            [f"{_percent(s.salient)} salient, {_percent(s.probe)} probes", *_both(s.overlap)]
            for s in trace.saliency
        ]
        out.blank()
        out.table(of_cells(("ZipCache", "of the truly salient found", "least layer"), rows))
    for found in trace.acceptance:
        out.blank()
        out.say(_drafts(found))
        heads = ("tokens per round", *(f"at least {place}" for place in GAMMAS))
        out.table(of_cells(("gamma", *heads), _rounds(found), 0))


def _loss(found: Quality, full: float) -> list[str]:
    ratio = f"{short(found.perplexity / full)}x"
    facts = "" if found.found is None else _percent(found.found)
    return [_spaced(found.technique), short(found.perplexity), ratio, f"{found.kl:.2g}", facts]


def _masses(top: TopK) -> list[list[str]]:
    columns = list(zip(*top.mass, strict=True))
    mean = [_percent(sum(column) / len(column)) for column in columns]
    return [
        ["mass, mean of layers", *mean],
        ["least layer", *(_percent(min(column)) for column in columns)],
    ]


def _drafts(found: Acceptance) -> str:
    how = f"drawn at temperature {found.temperature:g}" if found.temperature else "greedy"
    return f"{_spaced(found.technique)}: {how}, {found.rounds} or more rounds each"


def _rounds(found: Acceptance) -> list[list[str]]:
    return [
        [str(gamma), f"{found.tokens(gamma):.2f}", *map(_percent, row)]
        + [""] * (len(GAMMAS) - gamma)
        for gamma, row in zip(GAMMAS, found.reached, strict=True)
    ]


def _both(shares: tuple[float, ...]) -> list[str]:
    return [_percent(sum(shares) / len(shares)), _percent(min(shares))]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _spaced(technique: str) -> str:
    return technique.replace(",", ", ")
