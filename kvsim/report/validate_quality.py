"""``kvsim validate --quality``: what techniques lose on a text, also layer by layer."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.quality.layers import CACHE_SIDES, Z_95, LayerLosses, Widths
from kvsim.report.answer import Answer
from kvsim.report.json import Row
from kvsim.report.result import Result
from kvsim.report.table import cells_table
from kvsim.report.terminal import BLANK, Block, Heading
from kvsim.report.units import format_number
from kvsim.traces.attention import GAMMAS, Acceptance, AttentionTrace, Quality, TopK, record


def make_trace_result(trace: AttentionTrace, command: str = "") -> Result[AttentionTrace]:
    """Make the answer of a measured text: quality, attention and acceptance, one table each.

    Parameters
    ----------
    trace
        What was measured on the text.
    command
        Command line that gives the same.
    """
    blocks: list[Block] = [
        Heading(f"{trace.model}, {trace.layers} layers: {trace.tokens:,} tokens read"),
        f"weights {trace.weights}",
        f"text {trace.text}",
        trace.settings,
        f"perplexity with full-precision KV {format_number(trace.perplexity)}",
    ]
    if trace.quality:
        heads = ["technique", "perplexity", "of full", "KL nat/token"]
        heads += ["facts found"] if trace.retrieval else []
        rows = [_loss(q, trace.perplexity)[: len(heads)] for q in trace.quality]
        blocks += [BLANK, cells_table(heads, rows)]
    if trace.retrieval:
        share, facts = _percent(trace.retrieval.found), trace.retrieval.facts
        blocks.append(f"Full-precision KV finds {share} of the {facts} facts planted in the text.")
    if trace.top_k:
        heads = ["pairs kept per query head", *map(str, trace.top_k.k)]
        blocks += [BLANK, cells_table(heads, _masses(trace.top_k))]
    if trace.prefetch:
        rows = [
            [f"k={p.k}, {p.bits}-bit keys", *_mean_and_least(p.pairs), *_mean_and_least(p.mass)]
            for p in trace.prefetch
        ]
        found = ["of the oracle's pairs", "least layer", "of their mass", "least layer"]
        blocks += [BLANK, cells_table(["prefetched by SpeCache", *found], rows)]
    if trace.saliency:
        rows = [
            [
                f"{_percent(s.salient)} salient, {_percent(s.probe)} probes",
                *_mean_and_least(s.overlap),
            ]
            for s in trace.saliency
        ]
        heads = ["ZipCache", "of the truly salient found", "least layer"]
        blocks += [BLANK, cells_table(heads, rows)]
    for drafted in trace.acceptance:
        reached = (f"at least {place}" for place in GAMMAS)
        heads = ["gamma", "tokens per round", *reached]
        blocks += [BLANK, _drafts(drafted), cells_table(heads, _rounds(drafted), 0)]
    return Result(command, trace.model, Answer(""), record(trace), trace, blocks=blocks)


def _loss(found: Quality, full: float) -> list[str]:
    ratio = f"{format_number(found.perplexity / full)}x"
    facts = "" if found.found is None else _percent(found.found)
    return [
        _spaced(found.technique),
        format_number(found.perplexity),
        ratio,
        format_number(found.kl, 2),
        facts,
    ]


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


def _mean_and_least(shares: tuple[float, ...]) -> list[str]:
    return [_percent(sum(shares) / len(shares)), _percent(min(shares))]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _spaced(technique: str) -> str:
    return technique.replace(",", ", ")


@frozen
class Executed:
    """A plan of widths, and its measured loss window by window."""

    bits: float
    widths: Widths  # (2, layers), indices
    measured: Array  # (windows,) [nat per token]

    @property
    def error(self) -> float:
        """Standard error of the measured mean. [nat per token]"""
        return float(self.measured.std(ddof=1) / np.sqrt(self.measured.size))


def _layer_fields(found: LayerLosses, plan: Executed | None) -> Row:
    """As ``--json`` has it."""
    each = found.alone.mean(axis=-1)
    row: Row = {
        "model": found.model,
        "text": found.text,
        "settings": found.settings,
        "bits": list(found.bits),
        "factor": found.growth[0],
        "power": found.growth[1],
        "kl_alone": {side: each[i].tolist() for i, side in enumerate(CACHE_SIDES)},
        "kl_uniform": found.uniform.mean(axis=-1).tolist(),
        "plan": None,
    }
    if plan is not None:
        mean, low, high = found.expected(plan.widths)
        row["plan"] = {
            "bits": plan.bits,
            "technique": found.notation(plan.widths),
            "kl_expected": mean,
            "kl_low": low,
            "kl_high": high,
            "kl_measured": float(plan.measured.mean()),
            "kl_error": plan.error,
        }
    return row


def make_layer_result(
    found: LayerLosses, plan: Executed | None, command: str = ""
) -> Result[LayerLosses]:
    """Make the answer of layers packed one by one, and of a plan of bits that was run.

    Parameters
    ----------
    found
        Losses of the layers packed one by one.
    plan
        A plan of bits that was run, if one was asked for.
    command
        Command line that gives the same.
    """
    each = found.alone.mean(axis=-1)
    heads = [f"{side}, {bits} bits" for side in CACHE_SIDES for bits in found.bits]
    alone = each.reshape(-1, each.shape[-1]).T  # keys at every width, then values
    rows = [[str(layer), *(format_number(x, 2) for x in row)] for layer, row in enumerate(alone)]
    blocks: list[Block] = [
        Heading(f"{found.model}: KL divergence [nat per token] of each layer quantised alone"),
        found.settings,
        cells_table(("layer", *heads), rows, 0),
    ]
    sums = each.sum(axis=(0, 2))
    for b, bits in enumerate(found.bits):
        whole = found.uniform[b].mean()
        blocks.append(
            f"All layers at {bits} bits: {format_number(whole, 3)}, "
            f"{whole / sums[b]:.2f} of their sum."
        )
    if plan is not None:
        mean, low, high = found.expected(plan.widths)
        measured = float(plan.measured.mean())
        expected, low_end, high_end = (format_number(x, 3) for x in (mean, low, high))
        inside = "inside" if low <= measured <= high else "outside"
        blocks += [
            BLANK,
            f"At {plan.bits:g} bits on average: {found.notation(plan.widths)}",
            f"Expected {expected} ({low_end} to {high_end}), measured "
            f"{format_number(measured, 3)} \u00b1 {format_number(Z_95 * plan.error, 2)}: {inside} "
            f"the interval; all layers at {found.bits[0]} bits lose "
            f"{format_number(found.uniform[0].mean(), 3)}.",
        ]
    fields = _layer_fields(found, plan)
    return Result(command, found.model, Answer(""), fields, found, blocks=blocks)
