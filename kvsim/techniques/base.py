"""A technique: for every layer one part of each axis, and who drafts for the whole model.

It states the ops of a step and what stays resident; everything a prediction, a simulation or a
plan needs of it follows from that through the hooks here.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import cached_property
from math import lcm
from typing import Any, TypeVar

import numpy as np

from kvsim.engine.buffers import merge
from kvsim.engine.spread import piped
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Cycle, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.acting import left_alone, unborrowed, unspread
from kvsim.techniques.axes import Drafting
from kvsim.techniques.layers import LayerPass, Parts
from kvsim.techniques.layout import Layout, counted, laid_out
from kvsim.techniques.ranges import Layers, parts_by_range, parts_of, scalar_rows, uncovered
from kvsim.techniques.residency import resident
from kvsim.techniques.steps import forward, joined, mixing, part_of
from kvsim.techniques.terms import Term

AnyTerm = TypeVar("AnyTerm", bound=Term)
Found = TypeVar("Found")

MOST_KNOWN = 64  # answers that a technique keeps of a deployment


@frozen
class Technique:
    """A composition for every layer, and drafting for all of them.

    Parameters
    ----------
    layers : ranges in order that do not overlap.
    whole : terms of the whole model beside them: drafting.
    """

    layers: tuple[Layers, ...]
    whole: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        for some in self.layers:
            parts_of((*some.terms, *self.whole))

    # what it consists of

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Every term in the order of layers."""
        return tuple(term for some in self.layers for term in some.terms) + self.whole

    @cached_property
    def uniform(self) -> bool:
        """Whether all layers are alike but for what a term itself varies by layer."""
        return len(self.layers) == 1

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The parts of each range of layers; ranges with the same terms share theirs."""
        return parts_by_range(self.layers, self.whole)

    @property
    def drafting(self) -> Drafting:
        """The part that says who drafts, and how many tokens."""
        return self.parts[0].drafting

    @cached_property
    def name(self) -> str:
        """The names of the terms, joined as the notation joins them."""
        if self.uniform:
            return "+".join(term.name for term in self.terms)
        ranges = [some.written([t.name for t in some.terms]) for some in self.layers]
        return ";".join(text.replace(" ", "") for text in [*ranges, *(t.name for t in self.whole)])

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters by name, of several terms with the term's name before each."""
        if len(self.terms) == 1:
            return self.terms[0].settings
        found: dict[str, Any] = {}
        for some in self.layers:
            at = "" if self.uniform else f"{some.written(()).rstrip(': ')}."
            for term in some.terms:
                found |= {f"{at}{term.name}.{k}": v for k, v in term.settings.items()}
        for term in self.whole:
            found |= {f"{term.name}.{k}": v for k, v in term.settings.items()}
        return found

    def __str__(self) -> str:
        """The notation, read back by ``kvsim.techniques.parse``."""
        drafted = " + ".join(map(str, self.whole))
        if self.uniform and self.layers[0].first == 0:
            return " + ".join(filter(None, [str(self.layers[0]), drafted]))
        return "; ".join(filter(None, [*map(str, self.layers), drafted]))

    def changed(self, **settings: Any) -> "Technique":
        """The same with other settings, in every term that has them."""

        def change(terms: tuple[Term, ...]) -> tuple[Term, ...]:
            return tuple(
                replace(t, **{k: v for k, v in settings.items() if k in t.settings}) for t in terms
            )

        layers = tuple(replace(some, terms=change(some.terms)) for some in self.layers)
        return Technique(layers, change(self.whole))

    def rows(self) -> "list[Technique]":
        """One technique with scalar settings per row of array-valued ones."""
        found = scalar_rows(self.layers, self.whole)
        return [Technique(layers, whole) for layers, whole in found] or [self]

    # hooks

    def refuses(self, deployment: Deployment) -> str:
        """Why it cannot run there, or nothing."""
        reason = uncovered(self.layers, deployment.model.layers)
        if not reason and (deployment.model.owners or deployment.model.indexer):
            reason = unborrowed(deployment, self.layout(deployment))
        for parts in () if reason else self.parts:
            reasons = (part.refuses(deployment, parts) for part in parts.every())
            reason = reason or next(filter(None, reasons), "")
        return reason or unspread(deployment, self)

    @cached_property
    def exact(self) -> bool:
        """Whether these settings give the tokens that full-precision KV gives."""
        return all(part.exact for parts in self.parts for part in parts.every())

    @property
    def assumes(self) -> str:
        """What its speed rests on that the user has not said, if anything."""
        return self.drafting.assumes

    @property
    def drafts(self) -> int:
        """Tokens proposed per round."""
        return self.drafting.drafts

    @property
    def pass_width(self) -> int:
        """New tokens per sequence in the widest pass of a round."""
        return self.drafts + self._queries

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a decoding round yields per sequence, on average."""
        return 1.0 + self.drafting.accepted

    @property
    def _queries(self) -> int:
        return max(parts.selection.queries for parts in self.parts)

    @property
    def mixes(self) -> bool:
        """Whether a prompt's ops can stand beside those of a decoding pass in one."""
        alone = self.pass_width == 1 and self.tiles() == 1
        return alone and not any(parts.placement.streams for parts in self.parts)

    def term(self, kind: type[AnyTerm]) -> AnyTerm:
        """The term of that kind.

        Raises
        ------
        LookupError
            If there is none.
        """
        for term in self.terms:
            if isinstance(term, kind):
                return term
        raise LookupError(f"{self} has no {kind.__name__}")

    def with_rounds(
        self, drafts: int | None = None, acceptance: float | None = None
    ) -> "Technique":
        """The same with other drafts per round, or another acceptance (accepted over drafted)."""
        given = {"gamma": drafts, "acceptance": acceptance}
        return self.changed(**{k: v for k, v in given.items() if v is not None})

    def options(self, deployment: Deployment, prompt: int, generate: int) -> "Iterable[Technique]":
        """Settings worth considering for a workload; array-valued ones along the first axis."""
        if len(self.terms) > 1:
            return [self]
        return [compose(term) for term in self.terms[0].options(deployment, prompt, generate)]

    def notes(self, deployment: Deployment, point: Point) -> tuple[str, ...]:
        """What a reader of a plan should know about these settings there."""
        shape = deployment.shard.usual
        found = dict.fromkeys(left_alone(deployment, self.parts))
        for some, parts in zip(self.layers, self.parts, strict=True):
            at = LayerPass(deployment, part_of(point, parts), shape, parts)
            every = (*some.terms, *self.whole)
            found |= dict.fromkeys(note for term in every for note in term.notes(at))
        return tuple(found)

    def tiles(self) -> int:
        """Parts of the batch that pass through a layer one after another; it divides by them."""
        return lcm(*(parts.placement.tiles for parts in self.parts))

    def for_batches(self, batches: Array) -> "Technique":
        """The same in as many parts, up to those set, as divide every batch.

        Batches that would need different numbers of parts leave it as it is.
        """
        most = self.tiles()
        if most == 1 or not (np.asarray(batches) % most).any():
            return self
        if not any("parts" in term.settings for term in self.terms):
            return self
        fitting = {next(k for k in range(most, 0, -1) if b % k == 0) for b in batches.tolist()}
        return self.changed(parts=fitting.pop()) if len(fitting) == 1 else self

    # passes

    def forward(self, deployment: Deployment, point: Point) -> Step:
        """One pass of the new tokens through the model."""
        return piped(deployment, point, lambda p: forward(deployment, p, self.layout(deployment)))

    def prefill(self, deployment: Deployment, point: Point) -> Step:
        """The pass over the prompt, a draft model's after the model's own."""
        return joined(
            [self.forward(deployment, point), *self.drafting.prompt_steps(deployment, point)]
        )

    def between(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Extra passes between prefill and the first decoding round."""
        extra = [(s, n, own, own.selection.between(own)) for s, n, own in self.layout(deployment)]
        if not any(first for *_, first in extra):
            return ()
        layout = [(s, n, first or own) for s, n, own, first in extra]
        return (piped(deployment, point, lambda own: forward(deployment, own, layout)),)

    def cycle(self, deployment: Deployment, point: Point) -> Cycle:
        """One decoding round that starts with ``p.context`` cached tokens."""
        if self._queries > 1:
            point = replace(point, new=float(self._queries))
        if not self.drafts:
            return Cycle((self.forward(deployment, point),), 1.0)
        steps: list[Step] = []
        for i in range(self.drafts):
            q = replace(point, context=point.context + i, new=1.0)
            passes = [
                (s, n, self.drafting.own_pass(q, parts)) for s, n, parts in self.layout(deployment)
            ]
            own = [(s, n, parts) for s, n, parts in passes if parts is not None]
            if own:
                steps.append(forward(deployment, q, own))
        verify = self.forward(deployment, replace(point, new=self.drafts + 1.0))
        return Cycle(
            (*steps, *self.drafting.steps(deployment, point), verify), self.tokens_per_round
        )

    def attend(
        self, deployment: Deployment, point: Point, shape: LayerShape, parts: Parts | None = None
    ) -> list[Op]:
        """Ops between the projections of one layer, whatever mixes tokens in it."""
        at = LayerPass(deployment, point, shape, parts or self.parts[0])
        return mixing(at)

    # what stays

    def resident(self, deployment: Deployment, point: Point) -> Buffers:
        """Bytes that one GPU and its share of the host hold during this pass. [B]"""
        layers = self.once(deployment, "counted", lambda: counted(self.layout(deployment)))
        return merge(resident(deployment, point, layers), self.drafting.beside(deployment, point))

    def layout(self, deployment: Deployment) -> Layout:
        """Blocks of layers with how often each repeats, and what they do."""
        ranges = [(some.first, some.last) for some in self.layers]
        return self.once(deployment, "layout", lambda: laid_out(deployment, ranges, self.parts))

    def once(self, deployment: Deployment, what: Hashable, find: Callable[[], Found]) -> Found:
        """What is true of it there at any batch, found the first time that it is asked for."""
        known = self._known.get(id(deployment))
        if known is None or known[0] is not deployment:
            known = self._known[id(deployment)] = deployment, {}
        if what not in known[1]:
            if len(known[1]) >= MOST_KNOWN:
                known[1].clear()
            known[1][what] = find()
        found: Found = known[1][what]
        return found

    @cached_property
    def _known(self) -> dict[int, tuple[Deployment, dict[Hashable, Any]]]:
        """By the deployment's identity, each with the deployment itself."""
        return {}


def compose(*terms: Term) -> Technique:
    """The technique of some terms in all layers."""
    return Technique((Layers(terms),))
