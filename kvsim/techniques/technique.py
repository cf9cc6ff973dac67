"""A technique: for each layer one part per axis, and a drafting method for the whole model.

It states the ops of a step and what stays resident; everything a prediction, a simulation or a
plan needs of it follows from that through the hooks here.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import lcm
from typing import Any, TypeVar

import numpy as np

from kvsim.engine.buffers import HOST_WEIGHTS, merge
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Cycle, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.models.kinds import Mixer
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import PLAIN, Drafting, LayerPass, Part, Parts, Term
from kvsim.techniques.axes.settings import simplify
from kvsim.techniques.memory import kept_share, resident
from kvsim.techniques.papers.cache import is_engine
from kvsim.techniques.steps import (
    Counted,
    Layout,
    count_layers,
    divided_pass,
    forward,
    join_steps,
    lay_out,
    mix_tokens,
    same_parts,
    tile_point,
)

AXIS_WORDS = {
    "selection": "which tokens are kept or read",
    "storage": "how numbers are stored",
    "placement": "where the cache lives",
    "drafting": "who drafts",
}
DEFAULT_NAMES = ("all", "fp16", "gpu")  # parts that change nothing
UNAFFECTED: dict[Mixer, str] = {
    "recurrent": "have a state of constant size, which is unchanged",
    "shared": "attend to an earlier layer's cache, as kept by that layer",
    "none": "mix no tokens",
}
AnyTerm = TypeVar("AnyTerm", bound=Term)
Found = TypeVar("Found")
NEEDS_KERNEL = "needs a kernel that unpacks in registers"
MIXED_LAYERS = "mixed layers"  # the name in tables where layers use different techniques
MAX_CACHED = 64  # answers that a technique keeps of a deployment


@frozen
class Layers:
    """The terms for layers ``first`` to ``last``.

    Attributes
    ----------
    terms : the terms of these layers.
    first, last : first and last layer, inclusive and counted from 0; None is the model's last
        layer.
    """

    terms: tuple[Term, ...]
    first: int = 0
    last: int | None = None

    def __str__(self) -> str:
        """Return the notation of the range and its terms."""
        return self.write(map(str, self.terms))

    def write(self, terms: Iterable[str]) -> str:
        """Write the range, unless it covers all layers, and its terms.

        Parameters
        ----------
        terms : text of the terms.
        """
        text = " + ".join(terms)
        if self.first == 0 and self.last is None:
            return text
        last = "" if self.last is None else self.last
        return (
            f"{self.first}: {text}" if self.first == self.last else f"{self.first}-{last}: {text}"
        )


@frozen
class Technique:
    """A KV-cache technique: a composition for each layer, and drafting for all of them.

    Parameters
    ----------
    layers : ranges of layers with their composition, in order and without overlap.
    whole : terms that hold for the whole model, such as drafting.
    """

    layers: tuple[Layers, ...]
    whole: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        for some in self.layers:
            _combine((*some.terms, *self.whole))

    # what it consists of

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Every term in the order of layers."""
        return tuple(term for some in self.layers for term in some.terms) + self.whole

    @cached_property
    def uniform(self) -> bool:
        """Whether all layers have the same terms."""
        return len(self.layers) == 1

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """The parts of each range of layers; ranges with the same terms share theirs."""
        return _parts_by_range(self.layers, self.whole)

    @property
    def drafting(self) -> Drafting:
        """The method that drafts tokens, and how many."""
        return self.parts[0].drafting

    @cached_property
    def name(self) -> str:
        """The names of the terms, joined as the notation joins them."""
        if self.uniform:
            return "+".join(term.name for term in self.terms)
        ranges = [some.write([t.name for t in some.terms]) for some in self.layers]
        return ";".join(text.replace(" ", "") for text in [*ranges, *(t.name for t in self.whole)])

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters by name, of several terms with the term's name before each."""
        if len(self.terms) == 1:
            return self.terms[0].settings
        found: dict[str, Any] = {}
        for some in self.layers:
            at = "" if self.uniform else f"{some.write(()).rstrip(': ')}."
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
        """Return the technique with new values of settings, in every term that has such settings.

        Parameters
        ----------
        settings : new values by name.
        """

        return self._change_terms(
            lambda t: replace(t, **{k: v for k, v in settings.items() if k in t.settings})
        )

    def rows(self) -> "list[Technique]":
        """Split array-valued settings: return one technique with scalar settings per element."""
        values = (v for term in self.terms for v in term.settings.values())
        count = max((np.size(v) for v in values if isinstance(v, np.ndarray)), default=0)
        return [self._change_terms(partial(_take_row, row=i)) for i in range(count)] or [self]

    def _change_terms(self, change: Callable[[Term], Term]) -> "Technique":
        layers = (replace(some, terms=tuple(map(change, some.terms))) for some in self.layers)
        return Technique(tuple(layers), tuple(map(change, self.whole)))

    # hooks

    def refuses(self, deployment: Deployment) -> str:
        """Return why the technique cannot run in a deployment, or an empty string.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        reason = _coverage_conflict(self.layers, deployment.model.layers)
        if not reason and (deployment.model.owners or deployment.model.indexer):
            reason = _sharing_conflict(deployment, self.layout(deployment))
        for parts in () if reason else self.parts:
            reasons = (part.refuses(deployment, parts) for part in parts.by_axis())
            reason = reason or next(filter(None, reasons), "")
        return reason or _parallel_conflict(deployment, self)

    def refuses_released(self, deployment: Deployment) -> str:
        """Return why it cannot run with the published model, or an empty string.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        return self.refuses(deployment) or self.drafting.lacks(deployment.model)

    @cached_property
    def exact(self) -> bool:
        """Whether generated tokens equal those with a full-precision cache."""
        return all(part.exact for parts in self.parts for part in parts.by_axis())

    def needs_kernel(self, stack: str) -> str:
        """Return the kernel that the prediction assumes but no engine ships, or an empty string.

        For serving engines, a packed cache in a format that the engine does not ship is predicted
        with kernels that do not exist yet, so no ranking puts it first.

        Parameters
        ----------
        stack : name of the software, as vllm@h100.
        """
        stored = (parts.storage for parts in self.parts)
        packs = any(s.read.kernel == "lowbit" and s.name != "cache" for s in stored)
        if not packs or not is_engine(stack):
            return ""
        return f"{NEEDS_KERNEL}, which {stack} does not have for it"

    @property
    def assumes(self) -> str:
        """What the predicted speed assumes, such as an acceptance rate; empty if nothing."""
        return self.drafting.assumes

    @property
    def drafts(self) -> int:
        """Tokens proposed per round."""
        return self.drafting.drafts

    @property
    def pass_width(self) -> int:
        """New tokens per sequence in the widest pass of a round."""
        return self.drafting.verified - 1 + self._queries

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a decoding round yields per sequence, on average."""
        return 1.0 + self.drafting.accepted

    @property
    def _queries(self) -> int:
        return max(parts.selection.queries for parts in self.parts)

    @property
    def mixes(self) -> bool:
        """Whether one pass can contain both prompt chunks and decoding sequences."""
        alone = self.pass_width == 1 and self.tiles() == 1
        return alone and not any(parts.placement.streams for parts in self.parts)

    def term(self, kind: type[AnyTerm]) -> AnyTerm:
        """Return the technique's term of a class.

        Parameters
        ----------
        kind : the class.

        Raises
        ------
        LookupError
            If the technique has no such term.
        """
        for term in self.terms:
            if isinstance(term, kind):
                return term
        raise LookupError(f"{self} has no {kind.__name__}")

    def with_rounds(
        self, drafts: int | None = None, acceptance: float | None = None
    ) -> "Technique":
        """Return the technique with other drafts per round, or another acceptance.

        Parameters
        ----------
        drafts : tokens drafted per round.
        acceptance : accepted over drafted tokens.
        """
        given = {"gamma": drafts, "acceptance": acceptance}
        return self.changed(**{k: v for k, v in given.items() if v is not None})

    def options(self, deployment: Deployment, prompt: int, generate: int) -> "Iterable[Technique]":
        """Return settings worth considering for a workload.

        Parameters
        ----------
        deployment : model, machine and software.
        prompt, generate : lengths of prompts and answers. [tokens]

        Returns
        -------
        Techniques whose array-valued settings lie along the first axis.
        """
        if len(self.terms) > 1:
            return [self]
        return [compose(term) for term in self.terms[0].options(deployment, prompt, generate)]

    def notes(self, deployment: Deployment, point: Point) -> tuple[str, ...]:
        """Return remarks on these settings for readers of a plan.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the last decoding pass.
        """
        shape = deployment.shard.cached_shape
        needed = self.needs_kernel(deployment.stack.name)
        found = dict.fromkeys((needed,) if needed else ())
        found |= dict.fromkeys(_unaffected_layers(deployment, self.parts))
        for some, parts in zip(self.layers, self.parts, strict=True):
            at = LayerPass(deployment, tile_point(point, parts), shape, parts)
            every = (*some.terms, *self.whole)
            found |= dict.fromkeys(note for term in every for note in term.notes(at))
        return tuple(found)

    def tiles(self) -> int:
        """Number of parts into which each layer divides the batch, which must divide evenly."""
        return lcm(*(parts.placement.tiles for parts in self.parts))

    def for_batches(self, batches: Array) -> "Technique":
        """Return the technique with the largest number of batch parts that divides every batch.

        The number is at most the one set. If batches would need different numbers, the technique is
        returned unchanged.

        Parameters
        ----------
        batches : numbers of sequences.
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
        """Return one pass of the new tokens through the model.

        Parameters
        ----------
        deployment : model, machine and software.
        point : batch, context and new tokens of the pass.
        """
        return divided_pass(
            deployment, point, lambda p: forward(deployment, p, self.layout(deployment))
        )

    def prefill(self, deployment: Deployment, point: Point) -> Step:
        """Return the prefill pass of the model, followed by that of a draft model.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the pass over the prompt.
        """
        return join_steps(
            [self.forward(deployment, point), *self.drafting.prompt_steps(deployment, point)]
        )

    def predecoding(self, deployment: Deployment, point: Point) -> tuple[Step, ...]:
        """Return extra passes between prefill and the first decoding round.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the first decoding pass.
        """
        extra = [
            (s, n, own, own.selection.predecoding(own)) for s, n, own in self.layout(deployment)
        ]
        if not any(first for *_, first in extra):
            return ()
        layout = [(s, n, first or own) for s, n, own, first in extra]
        return (divided_pass(deployment, point, lambda own: forward(deployment, own, layout)),)

    def cycle(self, deployment: Deployment, point: Point) -> Cycle:
        """Return one decoding round.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the round's first pass, which starts with ``point.context`` cached tokens.
        """
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
        verify = self.forward(deployment, replace(point, new=float(self.drafting.verified)))
        around = self.drafting.round_ops(deployment, point)
        verify = replace(verify, head=(*verify.head, *around)) if around else verify
        return Cycle(
            (*steps, *self.drafting.steps(deployment, point), verify), self.tokens_per_round
        )

    def attend(
        self, deployment: Deployment, point: Point, shape: LayerShape, parts: Parts | None = None
    ) -> list[Op]:
        """Return the ops of one layer between its projections: attention or a recurrence.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the pass.
        shape : the kind of the layer.
        parts : the layer's parts; by default those of the first layer.
        """
        at = LayerPass(deployment, point, shape, parts or self.parts[0])
        return mix_tokens(at)

    # what stays

    def resident(self, deployment: Deployment, point: Point) -> Buffers:
        """Return the memory of one GPU, and of its share of the host, during a pass. [B]

        Parameters
        ----------
        deployment : model, machine and software.
        point : the pass, of the whole batch.

        Returns
        -------
        Bytes by tier and by name.
        """
        return merge(
            resident(deployment, point, self._counted(deployment)),
            self.drafting.draft_memory(deployment, point),
        )

    @property
    def fills_drive(self) -> bool:
        """Whether some layer keeps a part of its cache, weights or hidden states on a drive."""
        return any(parts.placement.fills_drive for parts in self.parts)

    @property
    def streams_weights(self) -> bool:
        """Whether some layer keeps a part of its weights on the host or a drive."""
        return any(parts.placement.streams_weights for parts in self.parts)

    def uses_host(self, deployment: Deployment) -> bool:
        """Return whether a share of the cache is in host memory or on a drive.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        far = Point(1.0, 2.0**16, 1.0, 2.0**16, 2.0**17)  # where all that goes there has gone
        held = self.resident(deployment, far)
        away = [*held.get("host", {}).items(), *held.get("disk", {}).items()]
        return any(np.any(np.asarray(n) > 0) for name, n in away if name != HOST_WEIGHTS)

    def kept_share(self, deployment: Deployment, point: Point) -> Number:
        """Return the number of cached tokens after a pass relative to a full cache.

        Parameters
        ----------
        deployment : model, machine and software.
        point : the pass, of the whole batch.
        """
        return kept_share(deployment, point, self._counted(deployment))

    def _counted(self, deployment: Deployment) -> Counted:
        return self.cached(deployment, "counted", lambda: count_layers(self.layout(deployment)))

    def layout(self, deployment: Deployment) -> Layout:
        """Return the blocks of layers, the number of times that each repeats, and their parts.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        ranges = [(some.first, some.last) for some in self.layers]
        return self.cached(deployment, "layout", lambda: lay_out(deployment, ranges, self.parts))

    def cached(self, deployment: Deployment, what: Hashable, find: Callable[[], Found]) -> Found:
        """Return a value that does not depend on the batch, computed once per deployment.

        Parameters
        ----------
        deployment : model, machine and software.
        what : key under which it is stored.
        find : computes the value.
        """
        known = self._cached.get(id(deployment))
        if known is None or known[0] is not deployment:
            known = self._cached[id(deployment)] = deployment, {}
        if what not in known[1]:
            if len(known[1]) >= MAX_CACHED:
                known[1].clear()
            known[1][what] = find()
        found: Found = known[1][what]
        return found

    @cached_property
    def _cached(self) -> dict[int, tuple[Deployment, dict[Hashable, Any]]]:
        """By the deployment's identity, each with the deployment itself."""
        return {}


def compose(*terms: Term) -> Technique:
    """Return the technique that applies the given terms to all layers.

    Parameters
    ----------
    terms : at most one for each axis.
    """
    return Technique((Layers(terms),))


def _parts_by_range(ranges: Iterable[Layers], whole: Iterable[Term]) -> tuple[Parts, ...]:
    """Return the parts of each range of layers; ranges with identical terms share them.

    Parameters
    ----------
    whole : terms of all ranges.
    """
    keys = [(tuple(map(id, some.terms)), some.terms) for some in ranges]
    made = {key: _combine((*terms, *whole)) for key, terms in dict(keys).items()}
    return tuple(made[key] for key, _ in keys)


def _combine(terms: Iterable[Term]) -> Parts:
    """Combine terms into one part per axis, with defaults for axes that no term sets.

    Raises
    ------
    InputError
        If two terms set the same axis.
    """
    found: dict[str, tuple[Part, Term]] = {}
    for term in terms:
        for part in term.pieces():
            if part.axis in found and found[part.axis][1] is not term:
                other = found[part.axis][1]
                raise InputError(
                    f"{other.name} and {term.name} both set {AXIS_WORDS[part.axis]}; keep one"
                )
            found[part.axis] = part, term
    chosen: dict[str, Any] = {axis: part for axis, (part, _) in found.items()}
    return replace(PLAIN, **chosen)


def _take_row(term: Term, row: int) -> Term:
    """Return the term with one element of each array-valued setting."""
    arrays = {k: v for k, v in term.settings.items() if isinstance(v, np.ndarray)}
    own = {k: np.ravel(v)[row if np.size(v) > 1 else 0] for k, v in arrays.items()}
    return replace(term, **{k: simplify(v) for k, v in own.items()})


def _coverage_conflict(ranges: tuple[Layers, ...], layers: int) -> str:
    """Return which layers are covered by no range or do not exist, or an empty string."""
    expected = 0
    for some in ranges:
        if some.first != expected:
            return f"layers {expected} to {some.first - 1} have no technique"
        if some.last is None:
            return "" if some.first < layers else f"the model has {layers} layers"
        expected = some.last + 1
    if expected != layers:
        return f"it describes {expected} layers, but the model has {layers}"
    return ""


def _sharing_conflict(deployment: Deployment, layout: Layout) -> str:
    """Return why layers that share a cache or use an indexer cannot run, or an empty string."""
    m = deployment.model
    every = [parts for shapes, count, parts in layout for _ in range(count * len(shapes))]
    for index, owner in m.owners.items():
        if not same_parts(every[index], every[owner]):
            return f"layer {index} shares layer {owner}'s cache and cannot be treated differently"
    for *_, parts in layout:
        name = parts.selection.name
        if m.owners and not parts.selection.borrows:
            return f"{name} chooses tokens per layer, but some share an earlier layer's cache"
        if m.indexer and not parts.selection.borrows:
            return f"{name} selects tokens, which the model's indexer already does"
    return ""


def _parallel_conflict(deployment: Deployment, technique: "Technique") -> str:
    """Return why a technique cannot run on several ranks or stages, or an empty string."""
    if deployment.single_pass:
        return ""
    if technique.mixes and not technique.uses_host(deployment):
        return ""
    return (
        "copies of attention (--dp) and stages (--pp) are modelled only for techniques that keep "
        "the cache on the GPU and draft nothing"
    )


def _unaffected_layers(deployment: Deployment, layers: Sequence[Parts]) -> list[str]:
    """Return notes about layers that have no cache of their own."""
    m = deployment.model
    kinds = Counter(shape.mixer for shape in m.shapes())
    acts = any(part.name not in DEFAULT_NAMES for parts in layers for part in parts.by_axis()[:3])
    found = []
    if acts and kinds["attention"] < m.layers:
        others = [f"{kinds[kind]} {UNAFFECTED[kind]}" for kind in UNAFFECTED if kinds[kind]]
        found.append(f"acts on {kinds['attention']} of {m.layers} layers: {'; '.join(others)}")
    if kinds["recurrent"]:
        found.append(
            f"states: no measurement of such kernels underlies stack {deployment.stack.name}; "
            f"they are assumed to be as efficient as its attention"
        )
    if m.indexer:
        alike = f", all of it on each of {deployment.tp} GPUs" if deployment.tp > 1 else ""
        found.append(
            f"sparse attention: a query reads at most {m.indexer.tokens} tokens; an indexer reads "
            f"{m.indexer.key_bytes:g} bytes of every cached token to choose them{alike}"
        )
    return found
