"""Costs of each kind of pass, evaluated for arrays of passes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from kvsim.engine import ops as blocks
from kvsim.engine.ops import output_ops
from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.frozen import frozen
from kvsim.graph import Array, Group, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.prediction.memory import decode_point
from kvsim.techniques.axes.placement import STREAMED_WEIGHTS
from kvsim.techniques.technique import Technique


@frozen
class Measure:
    """A measure of passes, such as time: a function for steps and one for operations."""

    round: Callable[[Step, Deployment], Number]  # a step among others like it
    alone: Callable[[Step, Deployment], Number]  # a step from an idle machine on
    op: Callable[[Op, Deployment], Number]


TIME_MEASURE = Measure(steady_seconds, makespan, seconds)
"""How long passes take. [s]"""


@frozen
class Passes:
    """Costs of the passes of a technique in a deployment, by one measure."""

    technique: Technique
    deployment: Deployment
    measure: Measure = TIME_MEASURE

    @cached_property
    def rate(self) -> float:
        """Mean number of tokens that a decoding round yields per sequence."""
        p = Point(float(self.technique.tiles()), 1.0, 1.0, 1.0, 2.0)
        return float(self.technique.cycle(self.deployment, p).tokens)

    @cached_property
    def issued(self) -> float:
        """Time to launch the kernels of a prefill pass; 0 if replayed as CUDA graphs. [s]

        It is a lower bound for the time of the pass.
        """
        time = self.deployment.stack.time
        new = time.graph + 1.0
        p = Point(float(self._one_prompt.tiles()), 0.0, new, new, new + 1.0, prefill=True)
        step = self._one_prompt.prefill(self.deployment, p)
        return float(np.max(blocks.issue_seconds(self.deployment, step.groups, p.tokens)))

    @cached_property
    def replayed(self) -> "Passes":
        """Copy of these passes whose kernels take no time to launch."""
        stack = self.deployment.stack
        time = replace(stack.time, issue=0.0)
        return replace(self, deployment=replace(self.deployment, stack=replace(stack, time=time)))

    @cached_property
    def resident(self) -> "Passes":
        """The same passes with all weights on the GPU.

        Weights that are streamed are transferred once per pass, whatever it computes.
        """
        return self._of_ops(streaming=False) if self.technique.streams_weights else self

    @cached_property
    def streamed(self) -> float:
        """Return the cost of streaming the weights of a pass; 0 where none are streamed. [s]"""
        if not self.technique.streams_weights:
            return 0.0
        return float(self._of_ops(streaming=True).prompt(np.ones(1), np.zeros(1))[0])

    def _of_ops(self, streaming: bool) -> "Passes":
        """Return these passes with only the ops that stream weights, or only the others."""

        def some(step: Step) -> Step:
            groups = (replace(g, layers=tuple(map(chosen, g.layers))) for g in step.groups)
            return Step(tuple(groups), () if streaming else step.head)

        def chosen(layer: tuple[Op, ...]) -> tuple[Op, ...]:
            kept = (op for op in layer if op.name.startswith(STREAMED_WEIGHTS) == streaming)
            return tuple(replace(op, after=tuple(filter(waits, op.after))) for op in kept)

        def waits(name: str) -> bool:
            return name.startswith(STREAMED_WEIGHTS) == streaming

        m = self.measure
        measure = Measure(lambda s, d: m.round(some(s), d), lambda s, d: m.alone(some(s), d), m.op)
        return replace(self, measure=measure)

    @property
    def width(self) -> int:
        """New tokens per sequence in the widest pass of a decoding round."""
        return self.technique.pass_width

    @cached_property
    def _one_prompt(self) -> Technique:
        """The technique without division of the batch, for a single prompt."""
        return self.technique.for_batches(np.ones(1))

    def round(self, batch: Array, context: Array, beside: bool = False) -> Array:
        """Return the cost of a decoding round at each batch and context.

        A batch is divided into as many parts as possible, up to the technique's number, as
        predictions do.

        Parameters
        ----------
        batch : sequences that decode. [sequences]
        context : their mean context. [tokens]
        beside : whether a prompt chunk is prefilled in the same pass.

        Returns
        -------
        array
            As ``measure`` counts it. [s]
        """
        found = np.zeros(np.broadcast_shapes(batch.shape, context.shape))
        for technique, its in self._divided(np.unique(batch).tolist()):
            parts = technique.tiles()
            whole = np.ceil(batch / parts) * parts
            p = Point(whole, context, 1.0, context, context + 1.0, beside=beside)
            total: Number = 0.0
            for step in technique.cycle(self.deployment, p).steps:
                total = total + self.measure.round(step, self.deployment)
            found = np.where(np.isin(batch, its), total, found)
        return found

    def _divided(self, batches: list[float]) -> list[tuple[Technique, list[float]]]:
        """Return the technique with each number of parts, and the batches that it divides."""
        most = self.technique.tiles()
        divide: dict[int, list[float]] = {}
        for batch in batches:
            parts = next(k for k in range(most, 0, -1) if batch % k == 0)
            divide.setdefault(parts, []).append(batch)
        found: dict[int, tuple[Technique, list[float]]] = {}
        for parts, its in divide.items():
            technique = self.technique.for_batches(np.array([float(parts)]))
            found.setdefault(technique.tiles(), (technique, []))[1].extend(its)
        return list(found.values())

    def prompt(self, new: Array, start: Array) -> Array:
        """Return the cost of passes that each prefill one chunk of one prompt.

        Parameters
        ----------
        new : tokens that are read. [tokens]
        start : tokens of the prompt before them. [tokens]

        Returns
        -------
        array
            As ``measure`` counts it. [s]
        """
        new, start = np.broadcast_arrays(new, start)
        parts = float(self._one_prompt.tiles())
        length = start + new
        p = Point(parts, start / 1.0, new / parts, length, length + 1.0, prefill=True)
        total = self.measure.alone(self._one_prompt.prefill(self.deployment, p), self.deployment)
        return np.array(np.broadcast_to(total, new.shape))

    def predecoding(self, prompt: Array) -> Array:
        """Return the cost of the passes between a prompt and its first decoding round.

        Parameters
        ----------
        prompt : length of the prompt. [tokens]

        Returns
        -------
        array
            As ``measure`` counts it; 0 where nothing comes between. [s]
        """
        p = decode_point(float(self._one_prompt.tiles()), prompt, 2.0, 0.0)
        total: Number = np.zeros(prompt.shape)
        for step in self._one_prompt.predecoding(self.deployment, p):
            total = total + self.measure.alone(step, self.deployment)
        return np.asarray(total)

    def tokens(self, tokens: Array) -> Array:
        """Return the cost of each layer's work per token, such as projections and MLPs.

        With several data-parallel ranks the routed experts are left out; see :meth:`routed`.

        Parameters
        ----------
        tokens : tokens in a pass. [tokens]

        Returns
        -------
        array
            As ``measure`` counts it. [s]
        """
        return self._per_token(_tokens(tokens, None if self.deployment.dp == 1 else 0.0))

    def routed(self, tokens: Array) -> Array:
        """Return the cost of the routed experts, which ``tokens`` leaves out with several ranks.

        Parameters
        ----------
        tokens : tokens of all data-parallel ranks. [tokens]

        Returns
        -------
        array
            0 with one rank, whose experts ``tokens`` includes. [s]
        """
        if self.deployment.dp == 1:
            return np.zeros(tokens.shape)
        with_experts, without = (self._per_token(_tokens(tokens, ranks)) for ranks in (1.0, 0.0))
        return with_experts - without

    def _per_token(self, p: Point) -> Array:
        d, tokens = self.deployment, np.asarray(p.batch)
        total: Number = np.zeros(tokens.shape)
        for shapes, count in d.shard.layout:
            for shape in shapes:
                for op in [
                    *blocks.before_attention(d, p, shape),
                    *blocks.after_attention(d, p, shape),
                ]:
                    total = total + count * self.measure.op(op, d)
        return np.where(tokens > 0, total, 0.0)

    def head(self, rows: Array) -> Array:
        """Return the cost of logits and sampling.

        Parameters
        ----------
        rows : rows of logits in a pass.

        Returns
        -------
        array
            As ``measure`` counts it. [s]
        """
        d = self.deployment
        total: Number = np.zeros(rows.shape)
        for op in output_ops(d, _tokens(rows)):
            if op.stream != "gpu":  # runs beside: rounds and prompts hold it
                continue
            total = total + self.measure.op(op, d)
        return np.where(rows > 0, total, 0.0)

    def mixed(self, batch: Array, context: Array, new: Array, start: Array) -> Array:
        """Return the cost of passes with decoding sequences and one prompt chunk, op by op.

        The tables approximate this cost by rounds and prompts. If a round has several passes, the
        chunk is part of the verifying pass.

        Parameters
        ----------
        batch : sequences that decode. [sequences]
        context : their mean context. [tokens]
        new : tokens of the prompt that are read. [tokens]
        start : tokens of the prompt before them. [tokens]

        Returns
        -------
        array
            As ``measure`` counts it. [s]
        """
        t, d = self.technique, self.deployment
        part = Point(1.0, start, new, start + new, start + new + 1.0, prefill=True)
        decoding = Point(batch, context, 1.0, context, context + 1.0, beside=True)
        every, rows = _tokens(batch + new), _tokens(batch + 1.0)
        groups = []
        for shapes, count, parts in t.layout(d):
            layers = []
            for shape in shapes:
                own = t.attend(d, decoding, shape, parts)
                prompt = _renamed(t.attend(d, part, shape, parts))
                rest = blocks.after_attention(d, every, shape)
                layers.append((*blocks.before_attention(d, every, shape), *own, *prompt, *rest))
            groups.append(Group(tuple(layers), count))
        issued = blocks.issue_seconds(d, groups, every.tokens)
        head = output_ops(d, rows, 1.0, issued)
        return np.asarray(self.measure.round(Step(tuple(groups), head), d))

    @property
    def mixes_plainly(self) -> bool:
        """Whether :meth:`mixed` supports this technique."""
        return self.technique.mixes


def _tokens(count: Array, ranks: Number | None = None) -> Point:
    """Return the point of some sequences of one token each."""
    return Point(count, 0.0, 1.0, 1.0, 1.0, ranks=ranks)


def _renamed(ops: list[Op]) -> list[Op]:
    """Rename a prompt's ops, and their waits, to tell them from those of decoding."""
    names = {op.name for op in ops}

    def prompt(wait: str) -> str:
        return f"prompt {wait}" if wait.partition("@")[0] in names else wait

    return [replace(op, name=prompt(op.name), after=tuple(map(prompt, op.after))) for op in ops]
