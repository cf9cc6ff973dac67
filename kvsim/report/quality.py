"""An attention trace as tables."""

from kvsim.report.tables import console, short, table
from kvsim.traces.attention import GAMMAS, Acceptance, AttentionTrace, Quality, TopK


def print_trace(trace: AttentionTrace) -> None:
    """Quality, attention and acceptance, one table each; layers as mean and least."""
    out = console()
    out.print(f"{trace.model}, {trace.layers} layers: {trace.tokens:,} tokens read", style="bold")
    out.print(f"weights {trace.weights}")
    out.print(f"text {trace.text}")
    out.print(trace.settings)
    out.print(f"perplexity with full-precision KV {short(trace.perplexity)}")
    if trace.quality:
        rows = [_loss(q, trace.perplexity) for q in trace.quality]
        out.print()
        heading = {"technique": "left", "perplexity": "right", "of full": "right"}
        out.print(table({**heading, "KL nat/token": "right"}, rows))
    if trace.top_k:
        out.print()
        out.print(table({"pairs kept per query head": "left", **_right(trace.top_k.k)},
                        _masses(trace.top_k)))  # fmt: skip
    if trace.prefetch:
        rows = [
            [f"k={p.k}, {p.bits}-bit keys", *_both(p.pairs), *_both(p.mass)]
            for p in trace.prefetch
        ]  # fmt: skip
        out.print()
        columns = _right(("of the oracle's pairs", "least layer", "of their mass", "least layer "))
        out.print(table({"prefetched by SpeCache": "left", **columns}, rows))
    if trace.saliency:
        rows = [
            [f"{_percent(s.salient)} salient, {_percent(s.probe)} probes", *_both(s.overlap)]
            for s in trace.saliency
        ]
        out.print()
        columns = _right(("of the truly salient found", "least layer"))
        out.print(table({"ZipCache": "left", **columns}, rows))
    for found in trace.acceptance:
        out.print()
        out.print(_drafts(found))
        columns = _right(("tokens per round", *(f"at least {place}" for place in GAMMAS)))
        out.print(table({"gamma": "right", **columns}, _rounds(found)))


def _loss(found: Quality, full: float) -> list[str]:
    ratio = f"{short(found.perplexity / full)}x"
    return [_spaced(found.technique), short(found.perplexity), ratio, f"{found.kl:.2g}"]


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


def _right(names: tuple[object, ...]) -> dict[str, str]:
    return dict.fromkeys(map(str, names), "right")
