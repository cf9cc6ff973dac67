"""Selections: tokens that are dropped for good, and pages that are chosen for every query."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention, ops
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Family, LayerPass, Parts, Selection, attend
from kvsim.techniques.axes.settings import Budget, param

ROUNDING = 1e-9  # blocks that a share may be above a whole number


@frozen
class Bounded(Selection):
    """A selection that keeps at most a budget of tokens at any time."""

    evicts = "always"

    @property
    def budget(self) -> Number:
        """Tokens kept at most. [tokens]"""
        raise NotImplementedError

    def prompt_budget(self) -> Number:
        """Return the budget, by which measured quality losses are looked up. [tokens]"""
        return self.budget

    def count_kept(self, at: LayerPass) -> Number:
        """Return the cached tokens, at most the budget. [tokens]"""
        return np.minimum(at.cached, self.budget)

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """Return the cached tokens, at most the budget. [tokens]"""
        return np.minimum(at.p.length, self.budget)

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a query attends to: all that are kept. [tokens]"""
        return self.budget


@frozen
class Thinned(Selection):
    """A selection whose heads keep a share of their tokens rather than a fixed number."""

    evicts = "always"
    per_head = True

    def mean_kept(self, tokens: Number) -> Number:
        """Return the number of tokens kept, averaged over the heads of a layer. [tokens]

        Parameters
        ----------
        tokens : tokens so far. [tokens]
        """
        raise NotImplementedError

    def count_kept(self, at: LayerPass) -> Number:
        """Return the cached tokens, averaged over heads. [tokens]"""
        return self.mean_kept(at.cached)

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """Return the cached prompt tokens, averaged over heads. [tokens]"""
        return self.mean_kept(at.p.length)

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a query attends to, averaged over heads. [tokens]"""
        return self.mean_kept(at.cached)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that gathers the kept prompt; later tokens overwrite dropped ones."""
        if not at.p.prefill:
            return []
        kept = self.mean_kept(at.p.length)
        size = ops.kv_bytes(at.d.shard, at.p.batch * kept) * (np.asarray(at.p.length) > kept)
        return [Op("compact", kernel="gather", bytes={"hbm": 2 * size})]


def select(at: LayerPass, budget: Number, scored: Number) -> Op:
    """Return the op that ranks the prompt's tokens; it does nothing if none is dropped.

    Parameters
    ----------
    at : the pass through the layer.
    budget : tokens that stay. [tokens]
    scored : tokens that are ranked. [tokens]
    """
    evicts = (at.p.prompt > np.asarray(budget)).astype(float)
    return ops.top_k("select", at.p.batch * at.d.shard.cached_heads * scored * evicts)


def gather_kept(at: LayerPass, budget: Number) -> Op:
    """Return the op that gathers the kept prompt tokens into a contiguous cache.

    Parameters
    ----------
    at : the pass through the layer.
    budget : tokens that stay. [tokens]
    """
    kept = ops.kv_bytes(at.d.shard, at.p.batch * np.minimum(budget, at.p.prompt))
    return Op("compact", kernel="gather", bytes={"hbm": 2 * kept})


def compact(at: LayerPass, budget: Number, scored: Number) -> list[Op]:
    """Return the ops that rank the prompt's tokens and gather those that stay.

    Both do nothing if no token is dropped.

    Parameters
    ----------
    at : the pass through the layer.
    budget : tokens that stay. [tokens]
    scored : tokens that are ranked; 0 if the tokens to keep need no ranking. [tokens]
    """
    evicts = (at.p.prompt > np.asarray(budget)).astype(float)
    kept = gather_kept(at, budget)
    return [
        select(at, budget, scored),
        replace(kept, bytes={"hbm": kept.bytes["hbm"] * evicts}),
    ]


def score_upkeep(at: LayerPass, tokens: Number) -> list[Op]:
    """Return the op that writes attention scores and accumulates them in fp32 per head.

    Parameters
    ----------
    at : the pass through the layer.
    tokens : cached tokens whose scores are added up. [tokens]
    """
    sums = at.p.batch * at.d.shard.heads * tokens
    moved = ops.SCORE * at.p.new * sums + 8.0 * sums  # sums are read and written
    return [Op("scores", kernel="pointwise", bytes={"hbm": moved})]


def score_matrix(at: LayerPass) -> Buffers:
    """Return the memory of one layer's prompt scores, unless the stack keeps them. [B]

    Parameters
    ----------
    at : the pass through the layer.
    """
    d, p = at.d, at.p
    there = p.prefill and not attention.score_bytes(d, p)
    alive = np.minimum(p.tokens, d.stack.memory.prefill_chunk) * p.length
    scores = ops.FP16_BYTES * d.shard.heads * alive if there else 0.0
    return {"gpu": {"score matrix": scores}}


def observe(at: LayerPass, window: Number, budget: Number) -> Op:
    """Return the op that scores the prompt's keys by its last queries, if any token is dropped.

    Parameters
    ----------
    at : the pass through the layer.
    window : queries that observe. [tokens]
    budget : tokens that stay. [tokens]
    """
    m, p = at.d.shard, at.p
    evicts = (p.prompt > np.asarray(budget)).astype(float)
    asking = np.minimum(window, p.prompt)
    pairs = asking * p.prompt * evicts
    width = m.k_width / m.cached_heads
    keys = ops.FP16_BYTES * p.batch * m.k_width * p.prompt * evicts
    queries = ops.FP16_BYTES * p.batch * m.heads * width * asking * evicts
    scores = 2 * ops.SCORE * p.batch * m.heads * pairs  # softmax, then pooling over queries
    flops = 2.0 * p.batch * m.heads * width * pairs
    return Op("observe", kernel="attention", flops=flops, bytes={"hbm": keys + queries + scores})


def kept_tokens(at: LayerPass, budget: Number) -> Number:
    """Return the kept prompt tokens plus all generated tokens. [tokens]

    Parameters
    ----------
    at : the pass through the layer.
    budget : tokens of the prompt that stay. [tokens]
    """
    generated = np.maximum(at.p.length - at.p.prompt, 0.0)
    return np.minimum(at.p.prompt, budget) + generated


@frozen
class PromptCut(Selection):
    """Base of selections that keep the best prompt tokens per KV head and all generated tokens.

    A subclass states the cost of scoring the prompt's tokens. Each head keeps ``budget`` tokens, or
    the heads of a layer share a budget with that mean; bytes and FLOPs are the same.
    """

    evicts = "after the prompt"
    per_head = True

    budget: Number = param(1024, "prompt tokens kept [tokens]", low=1, high=1e7, share=True)

    candidates = ({"budget": Budget((0.125, 0.25, 0.5), of="prompt")},)

    def score(self, at: LayerPass) -> list[Op]:
        """Return the ops that score the prompt's tokens.

        Parameters
        ----------
        at : a pass over the prompt.
        """
        raise NotImplementedError

    def prompt_budget(self) -> Number:
        """Return the budget, averaged over heads. [tokens]"""
        return self.budget

    def count_kept(self, at: LayerPass) -> Number:
        """Return the tokens kept: a part of the prompt, and all that is generated. [tokens]"""
        return np.minimum(at.cached, kept_tokens(at, self.budget))

    def count_kept_prompt(self, at: LayerPass) -> Number:
        """Return the cached tokens, at most the budget. [tokens]"""
        return np.minimum(at.p.length, self.budget)

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a query attends to: all that are kept. [tokens]"""
        return kept_tokens(at, self.budget)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that score the prompt and gather the best; nothing in decoding."""
        if not at.p.prefill:
            return []
        return [*self.score(at), *compact(at, self.budget, scored=at.p.prompt)]

    def cut(self, at: LayerPass) -> Number:
        """Return 1 where the prompt is longer than the budget, else 0."""
        return (np.asarray(at.p.prompt) > np.asarray(self.budget)).astype(float)


@frozen
class SparsePrompt(Selection):
    """Base of sparse prefill: prompt queries attend to a part of the keys; decoding is dense."""

    per_head = True

    @property
    def family(self) -> Family:
        """The kind of loss: prompt queries skip keys, but nothing is evicted."""
        return "selection"

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return what the predicted time of prefill assumes, if no such kernel was measured."""
        if "sparse-prompt" in at.d.stack.kernels:
            return ()
        return (
            "assumes that chosen pairs cost what they do in dense attention; in MInference's "
            "release they took 2.5 times as long on an A100 (--stack minference-hf)",
        )

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that estimate which query-key pairs matter.

        Parameters
        ----------
        at : a pass over the prompt.
        """
        raise NotImplementedError

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops of the estimate, and of attention to the chosen pairs."""
        return [*(self.estimate(at) if at.p.prefill else []), *super().attend(at)]

    def borrow(self, at: LayerPass) -> list[Op]:
        """Return the same ops for a layer that attends to an earlier layer's cache."""
        return [*(self.estimate(at) if at.p.prefill else []), *super().borrow(at)]

    def thin_prompt(self, at: LayerPass, attention: Op) -> Op:
        """Return attention over the chosen pairs, by a sparse kernel."""
        thin = super().thin_prompt(at, attention)
        return replace(thin, kernel="sparse-prompt") if thin.kernel == "prompt" else thin


def chosen_blocks(share: float, rows: Array) -> Array:
    """Return how many key blocks each row of query blocks attends to.

    Parameters
    ----------
    share : share of the blocks that is read.
    rows : key blocks that are visible to each row. [blocks]
    """
    chosen: Array = np.ceil(share * rows - ROUNDING)
    return chosen


def block_density(at: LayerPass, block: int, share: float) -> Number:
    """Return the share of causal query-key pairs that a share of each row's blocks contains.

    Parameters
    ----------
    at : a pass over the prompt.
    block : tokens of a block. [tokens]
    share : share of a row's blocks, including its own; rounded up to whole blocks.
    """
    p = at.p
    rows = np.arange(np.max(p.length, initial=0.0) // block + 2)
    others = block * (chosen_blocks(share, rows) - 1)  # tokens before a query's own block
    each = block * others + block * (block + 1) / 2
    each[0] = 0.0
    whole = np.cumsum(each)

    def pairs(tokens: Number) -> Array:
        """Those of a head's first queries. [pairs]"""
        row = (np.asarray(tokens) // block).astype(int)
        beyond = tokens - row * block
        found: Array = whole[row] + beyond * (others[row + 1] + (beyond + 1) / 2)
        return found

    near = pairs(p.length) - pairs(p.context)
    return near / np.maximum(attention.query_key_pairs(at.d, p, None), 1.0)


@frozen
class Chosen(Selection):
    """Base of selections that score every page by the query and attend to the best pages.

    Pages on the host are fetched after the choice, so no computation hides the copy.
    """

    name = "chosen pages"
    chooses = True
    per_head = True

    def tokens(self, at: LayerPass) -> Number:
        """Return the tokens read per KV head. [tokens]

        Parameters
        ----------
        at : the pass through the layer.
        """
        raise NotImplementedError

    def host_tokens(self, at: LayerPass) -> Number:
        """Return the chosen tokens that are fetched from the host: by default all. [tokens]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return np.minimum(self.tokens(at), at.kept_tokens)

    def fetched_tokens(self, at: LayerPass) -> Number:
        """Return the tokens that a step fetches from the host, except those it still has. [tokens]

        Parameters
        ----------
        at : the pass through the layer.
        """
        return self.host_tokens(at)

    def page_tokens(self) -> int:
        """Return the tokens per page, which are chosen together. [tokens]"""
        raise NotImplementedError

    def pages(self, at: LayerPass) -> Number:
        """Return the number of pages that are ranked: by default those of all kept tokens.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return np.ceil(at.kept_tokens / self.page_tokens())

    def estimate(self, at: LayerPass) -> list[Op]:
        """Return the ops that estimate the relevance of every page to the queries.

        Parameters
        ----------
        at : the pass through the layer.
        """
        raise NotImplementedError

    def summarise(self, at: LayerPass) -> list[Op]:
        """Return the ops that summarise the pages of the new tokens, for example by bounds.

        Parameters
        ----------
        at : the pass through the layer.
        """
        raise NotImplementedError

    def restore_chosen(self, at: LayerPass) -> list[Op]:
        """Return the ops that prepare the chosen tokens for attention, such as rebuilding keys.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return []

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why pages cannot be read separately on the GPU, or an empty string."""
        place, storage = parts.placement, parts.storage
        if deployment.shard.latent:
            return f"{self.name} compares pages by the keys of heads, not by a latent cache"
        if not storage.by_token:
            return f"{self.name} reads single pages, but {storage.name} packs tokens together"
        if place.recomputes or np.any(place.on_cpu):
            return f"{self.name} chooses what it reads once the query is known, on the GPU"
        return ""

    def limit(self, at: LayerPass) -> Number:
        """Return the tokens that a query attends to: those that it chooses. [tokens]"""
        return self.tokens(at)

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops that summarise new pages; in decoding also choice, fetch and attention."""
        storage, place, p = at.storage, at.placement, at.p
        new = [*storage.prepare(at), *place.store(at), *self.summarise(at)]
        if p.prefill:
            done = [*storage.complete(at), *at.drafting.fill_draft_cache(at)]
            return [*place.runtime(at), *new, *attend(at), *done]
        ranked = p.tokens * at.d.shard.cached_heads * self.pages(at)
        choice = ops.top_k("topk", ranked, sync=at.d.stack.selection.gather_sync)
        fetched = self._fetch(at)
        waits = ("fetch",) if fetched else ()
        return [
            *place.runtime(at), *new, *self.estimate(at), choice, *fetched,
            *self.restore_chosen(at), *attend(at, waits), *storage.complete(at),
        ]  # fmt: skip

    def borrow(self, at: LayerPass) -> list[Op]:
        """Return the ops of a layer that chooses pages of an earlier layer's cache."""
        kept = {op.name for op in self.summarise(at)} | {"quantise", "store_kv"}
        if at.p.prefill:
            return attend(at)
        return [op for op in self.attend(at) if op.name not in kept]

    def _fetch(self, at: LayerPass) -> list[Op]:
        """Return the ops that fetch the chosen pages on the host."""
        k_share, v_share = at.placement.k_host, at.placement.v_host
        if not np.any(np.asarray(v_share) > 0):
            return []
        tokens = self.fetched_tokens(at)
        k, v = at.storage.transfer_bytes(at, tokens)
        sides = (np.asarray(k_share) > 0) * 1.0 + 1.0
        rows = sides * at.p.batch * at.d.shard.cached_heads * v_share * tokens / self.page_tokens()
        return [ops.copy("fetch", "h2d", k_share * k + v_share * v, rows=rows, after=("topk",))]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of the fetched pages. [B]"""
        place = at.placement
        if not np.any(np.asarray(place.v_host) > 0):
            return {}
        if at.p.prefill:  # a layer's tokens on their way out
            k, v = at.storage.transfer_bytes(at, at.p.new)
            return {"gpu": {"kv on the way out": 2 * (place.k_host * k + place.v_host * v)}}
        k, v = at.storage.transfer_bytes(at, self.host_tokens(at))
        return {"gpu": {"fetched pages": place.k_host * k + place.v_host * v}}
