"""Step costs of one technique as tables that a compiled simulator can read.

A pass over decoding sequences and parts of prompts takes

    round(batch, mean context)                      alone, as the engine predicts it
    + tokens(all tokens) - tokens(decoding ones)    projections and MLPs run over all at once
    + head(all rows) - head(decoding rows)          a finished prompt adds one row of logits
    + the sum over its parts of prompts of what else each needs: attention, quantisation, copies

``round`` and the pass over one prompt are the engine's own predictions, so batches of only one
kind are exact at the tables' nodes; ``StepCosts.error`` says how far direct evaluation is from
the tables elsewhere, passes of both kinds included.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim import blocks
from kvsim.deployment import Deployment
from kvsim.errors import InputError
from kvsim.evaluate import seconds
from kvsim.generate import CHUNK, round_seconds
from kvsim.graph import Array, Group, Number, Op, Point, Step, Tier
from kvsim.memory import decode_point, prefill_point, tier_bytes
from kvsim.serving import lookup
from kvsim.serving.rules import Rules
from kvsim.techniques.base import Technique
from kvsim.timeline import makespan, steady

Bytes = NDArray[np.int64]
Reader = Callable[["Tables"], Array]

EVERY = 256  # token counts up to here have a node each
GOOD = 2e-3  # worst error of rounds and prompts at which the tables are fine enough
DENSITIES = (4, 8, 16, 32)  # nodes per octave of a context or chunk, tried in this order
SAMPLES = 200  # random points of each kind at which the tables are checked


class Tables(NamedTuple):
    """What the simulator reads; nodes are token counts, values seconds or bytes."""

    contexts: Array  # nodes of the mean context (c,) [tokens]
    round_s: Array  # a decoding round by batch, from 0 (batch + 1, c) [s]
    tokens: Array  # nodes of tokens in a pass (t,) [tokens]
    token_s: Array  # projections, MLPs and norms over that many tokens (t,) [s]
    head_s: Array  # LM head and sampling of that many rows (t,) [s]
    chunks: Array  # nodes of a prompt part's length (n,) [tokens]
    starts: Array  # nodes of the tokens before it (s,) [tokens]
    chunk_s: Array  # what such a part needs besides (n, s) [s]
    between_s: Array  # what follows a prompt of that many tokens (c,) [s]
    prompt_bytes: Bytes  # cache of a sequence until its prompt is read, by its blocks (b,) [B]
    gpu_bytes: Bytes  # cache of one that decodes, never more, from 0 blocks (b,) [B]
    host_bytes: Bytes  # its part in host memory (b,) [B]
    width: int  # tokens per sequence in the widest pass of a round [tokens]
    h2d: float  # rate of swapping in and fetching evicted blocks [B/s]
    d2h: float  # rate of swapping out [B/s]


@dataclass(frozen=True)
class StepCosts:
    """Tables of one technique in one deployment under an engine's rules.

    Parameters
    ----------
    longest : longest sequence, prompt and generated tokens. [tokens]
    longest_prompt : longest prompt. [tokens]
    gpu_memory : what the engine may use of each GPU; None for all. [B]

    Raises
    ------
    InputError
        If the technique cannot run there, or the model leaves no memory for a cache.
    """

    technique: Technique
    deployment: Deployment
    rules: Rules
    longest: int
    longest_prompt: int
    gpu_memory: float | None = None

    def __post_init__(self) -> None:
        reason = self.technique.refuses(self.deployment)
        if reason:
            raise InputError(f"{self.technique.name} cannot run here: {reason}")

    @cached_property
    def tables(self) -> Tables:
        """The coarsest tables that are good, or the finest."""
        return self._checked[0]

    @property
    def error(self) -> dict[str, float]:
        """Worst relative error of the tables at random points, by kind of pass."""
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[Tables, dict[str, float]]:
        samples = self._samples()
        for density in DENSITIES:
            tables = self._tabulate(density)
            error = {kind: _worst(read(tables), direct) for kind, (read, direct) in samples.items()}
            if max(error["rounds"], error["prompts"]) <= GOOD:
                break
        return tables, error

    @property
    def rate(self) -> float:
        """Tokens that a decoding round yields per sequence, on average."""
        p = Point(float(self.technique.tiles()), 1.0, 1.0, 1.0, 2.0)
        return float(self.technique.cycle(self.deployment, p).tokens)

    @cached_property
    def _width(self) -> int:
        """New tokens per sequence in the widest pass of a round."""
        return int(getattr(self.technique, "gamma", 0)) + 1

    @property
    def _most_tokens(self) -> int:
        """Tokens in a pass at most."""
        whole = self.longest_prompt if self.rules.prefill == "whole" else 0
        decoding = self._width * self.rules.max_seqs
        return max(self.rules.max_tokens, whole) + decoding + self.rules.max_seqs

    @property
    def _longest_chunk(self) -> int:
        """Tokens of one prompt in a pass at most."""
        chunked = self.rules.prefill == "chunked"
        return min(self.longest_prompt, self.rules.max_tokens) if chunked else self.longest_prompt

    def _tabulate(self, density: int) -> Tables:
        d = self.deployment
        contexts = _nodes(self.longest, density)[1:]
        tokens = np.unique(
            np.concatenate([np.arange(EVERY + 1), np.round(_nodes(self._most_tokens, 16))])
        ).astype(float)
        chunks, starts = _nodes(self._longest_chunk, density)[1:], _nodes(self.longest, density)
        token_s, head_s = self.token_seconds(tokens), self.head_seconds(tokens)
        alone = self.prompt_seconds(chunks[:, None], starts[None, :])
        gpu_bytes = self._bytes("gpu")
        shared = np.interp(chunks, tokens, token_s)[:, None] + self.head_seconds(np.ones(1))
        return Tables(
            contexts=contexts,
            round_s=self._round_table(contexts),
            tokens=tokens,
            token_s=token_s,
            head_s=head_s,
            chunks=chunks,
            starts=starts,
            chunk_s=np.maximum(alone - shared, 0.0),
            between_s=self.between_seconds(contexts),
            prompt_bytes=np.maximum(self._bytes("gpu", prefill=True), gpu_bytes),
            gpu_bytes=gpu_bytes,
            host_bytes=self._bytes("host"),
            width=self._width,
            h2d=d.tp * d.bandwidth["h2d"],
            d2h=d.tp * d.bandwidth["d2h"],
        )

    # the engine's predictions

    def round_seconds(self, batch: Array, context: Array) -> Array:
        """Decoding rounds, element by element. [s]"""
        parts = self.technique.tiles()
        padded = np.ceil(batch / parts) * parts
        p = Point(padded, context, 1.0, context, context + 1.0)
        took = self.rate * round_seconds(self.technique, self.deployment, p)
        return np.array(np.broadcast_to(took, np.broadcast_shapes(batch.shape, context.shape)))

    def _round_table(self, contexts: Array) -> Array:
        """Rounds of every batch from 0 at every context; none takes no time. [s]"""
        batch = np.arange(1.0, self.rules.max_seqs + 1)
        rows = max(1, CHUNK // contexts.size)
        parts = [
            self.round_seconds(batch[i : i + rows, None], contexts[None, :])
            for i in range(0, batch.size, rows)
        ]
        return np.concatenate([np.zeros((1, contexts.size)), *parts])

    def prompt_seconds(self, new: Array, start: Array) -> Array:
        """The pass over ``new`` tokens of one prompt after ``start`` earlier ones. [s]"""
        new, start = np.broadcast_arrays(new, start)
        parts = float(self.technique.tiles())
        length = start + new
        p = Point(parts, start / 1.0, new / parts, length, length + 1.0, prefill=True)
        took = makespan(self.technique.prefill(self.deployment, p), self.deployment)
        return np.array(np.broadcast_to(took, new.shape))

    def between_seconds(self, prompt: Array) -> Array:
        """Passes between a prompt and its first decoding round. [s]"""
        p = decode_point(float(self.technique.tiles()), prompt, 2.0, 0.0)
        total: Number = np.zeros(prompt.shape)
        for step in self.technique.between(self.deployment, p):
            total = total + makespan(step, self.deployment)
        return np.asarray(total)

    def token_seconds(self, tokens: Array) -> Array:
        """What every layer does to each token, whichever sequence it is of. [s]"""
        d, p = self.deployment, _tokens(tokens)
        total: Number = np.zeros(tokens.shape)
        for shapes, count in d.shard.layout:
            for shape in shapes:
                for op in [*blocks.before_attention(d, p), *blocks.after_attention(d, p, shape)]:
                    total = total + count * seconds(op, d)
        return np.where(tokens > 0, total, 0.0)

    def head_seconds(self, rows: Array) -> Array:
        """Logits and sampling of some rows. [s]"""
        d = self.deployment
        total: Number = np.zeros(rows.shape)
        for op in blocks.head(d, _tokens(rows)):
            total = total + seconds(op, d)
        return np.where(rows > 0, total, 0.0)

    def mixed_seconds(self, batch: Array, context: Array, new: Array, start: Array) -> Array:
        """Passes over decoding sequences and a part of one prompt each, op by op. [s]

        What the tables put together from rounds and prompts. The prompt goes along in the
        verification of a technique whose rounds have several passes.
        """
        t, d = self.technique, self.deployment
        part = Point(1.0, start, new, start + new, start + new + 1.0, prefill=True)
        decoding = Point(batch, context, 1.0, context, context + 1.0)
        every, rows = _tokens(batch + new), _tokens(batch + 1.0)
        groups = []
        for shapes, count, on_gpu in t.layout(d):
            layers = []
            for shape in shapes:
                own = t.attend(d, decoding, shape, on_gpu)
                prompt = _renamed(t.attend(d, part, shape, on_gpu))
                rest = blocks.after_attention(d, every, shape)
                layers.append((*blocks.before_attention(d, every), *own, *prompt, *rest))
            groups.append(Group(tuple(layers), count))
        return np.asarray(steady(Step(tuple(groups), blocks.head(d, rows)), d))

    @property
    def _mixes_plainly(self) -> bool:
        """Whether ``mixed_seconds`` states what this technique would do."""
        t = self.technique
        plain = type(t).layer is Technique.layer and type(t).cycle is Technique.cycle
        return plain and t.tiles() == 1 and self.rules.prefill == "chunked"

    # memory

    @property
    def blocks_of_longest(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.longest // self.rules.block_tokens)

    def _bytes(self, tier: Tier, prefill: bool = False) -> Bytes:
        """Cache of one sequence by its number of KV blocks. (b,) [B]"""
        tokens = np.arange(1, self.blocks_of_longest + 1.0) * self.rules.block_tokens
        parts = self.technique.tiles()

        def cached(batch: float) -> Number:
            """All that grows with the batch, but for the workspace of a step."""
            p = _point(prefill, batch, tokens)
            buffers = self.technique.resident(self.deployment, p)
            return tier_bytes(buffers, tier) - buffers.get(tier, {}).get("workspace", 0.0)

        each = (cached(2.0 * parts) - cached(1.0 * parts)) / parts
        whole = np.ceil(np.broadcast_to(each, tokens.shape) - 1e-6)
        return np.concatenate([[0], np.maximum.accumulate(whole)]).astype(np.int64)

    @property
    def block_bytes(self) -> float:
        """One KV block of the longest sequence, averaged over its blocks. [B]"""
        return float(self.tables.gpu_bytes[-1] / self.blocks_of_longest)

    @property
    def host_capacity(self) -> int:
        """Each GPU's share of host memory, for caches that a technique keeps there. [B]"""
        return int(self.deployment.hardware.host_memory / self.deployment.tp)

    @cached_property
    def capacity(self) -> int:
        """Memory of each GPU that is left for caches. [B]

        Raises
        ------
        InputError
            If weights and workspace leave nothing.
        """
        d, rules = self.deployment, self.rules
        if rules.blocks:
            return round(rules.blocks * self.block_bytes)
        needs = max(
            self._beside_cache(True, self.technique.tiles(), self._longest_chunk),
            self._beside_cache(False, self.technique.tiles() * rules.max_seqs, 1),
        )
        memory = d.hardware.gpu_memory if self.gpu_memory is None else self.gpu_memory
        if memory - needs < self.tables.gpu_bytes[1]:
            raise InputError(
                f"{d.model.name} on {d.hardware.name}: weights and workspace take "
                f"{needs / 2**30:.1f} of {memory / 2**30:.1f} GiB and leave no KV cache; "
                f"choose a larger GPU, more of them (--tp) or narrower --weights"
            )
        return int(memory - needs)

    def _beside_cache(self, prefill: bool, batch: int, length: int) -> float:
        """Weights, workspace and context while that many sequences are of that length. [B]"""
        p = _point(prefill, float(batch), np.array(float(length)))
        total = float(tier_bytes(self.technique.resident(self.deployment, p), "gpu"))
        own = self.tables.prompt_bytes if prefill else self.tables.gpu_bytes
        return total - batch * float(own[-(-length // self.rules.block_tokens)])

    # checks

    def _samples(self) -> dict[str, tuple[Reader, Array]]:
        """Random points of each kind of pass: how tables say it, and direct evaluation. [s]"""
        random = np.random.default_rng(0)
        longest_chunk = self._longest_chunk
        batch = random.integers(1, self.rules.max_seqs, SAMPLES, endpoint=True).astype(float)
        context = _log_uniform(random, self.longest)
        new = _log_uniform(random, longest_chunk)
        start = np.minimum(_log_uniform(random, self.longest) - 1, self.longest - new)

        def rounds(t: Tables) -> Array:
            pairs = zip(batch, context, strict=True)
            return np.array([lookup.round_s(t, int(b), c) for b, c in pairs])

        def chunks(t: Tables) -> Array:
            return np.array([lookup.chunk_s(t, n, s) for n, s in zip(new, start, strict=True)])

        def prompts(t: Tables) -> Array:
            return (
                chunks(t) + np.interp(new, t.tokens, t.token_s) + np.interp(1, t.tokens, t.head_s)
            )

        def mixed(t: Tables) -> Array:
            total = rounds(t) + chunks(t)
            for values, more in ((t.token_s, new), (t.head_s, 1.0)):
                total += np.interp(batch + more, t.tokens, values)
                total -= np.interp(batch, t.tokens, values)
            return total

        samples: dict[str, tuple[Reader, Array]] = {
            "rounds": (rounds, self.round_seconds(batch, context)),
            "prompts": (prompts, self.prompt_seconds(new, start)),
        }
        if self._mixes_plainly:
            samples["mixed"] = (mixed, self.mixed_seconds(batch, context, new, start))
        return samples


def _worst(found: Array, direct: Array) -> float:
    return float(np.max(np.abs(found / direct - 1)))


def _log_uniform(random: np.random.Generator, most: float) -> Array:
    """Whole numbers from 1 to ``most``, as many in every octave."""
    return np.floor(np.exp(random.uniform(0, np.log(most + 1), SAMPLES)))


def _nodes(most: float, per_octave: int) -> Array:
    """Whole numbers 0, 1, ... ``most``, at a constant ratio where that leaves gaps."""
    count = int(np.ceil(np.log2(max(most, 2)) * per_octave)) + 1
    geometric = np.round(np.geomspace(1, max(most, 2), count))
    return np.unique(np.concatenate([[0.0], geometric]))


def _point(prefill: bool, batch: float, length: Array) -> Point:
    """Sequences of that length, while the prompt is read or at a decoded token. [tokens]"""
    if prefill:
        return prefill_point(batch, length, 1.0)
    return decode_point(batch, length - 1, 1.0, 0.0)


def _tokens(count: Array) -> Point:
    """That many sequences of one token each."""
    return Point(count, 0.0, 1.0, 1.0, 1.0)


def _renamed(ops: list[Op]) -> list[Op]:
    """A prompt's own ops beside those of decoding, waits among them included."""
    names = {op.name for op in ops}

    def prompt(wait: str) -> str:
        return f"prompt {wait}" if wait.partition("@")[0] in names else wait

    return [replace(op, name=prompt(op.name), after=tuple(map(prompt, op.after))) for op in ops]
