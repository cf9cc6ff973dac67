"""Techniques that attend to some tokens, against what they choose put down in plain words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.validate.model.attention import Pass
from tests.support.decoders import prompts
from tests.support.naive_caches import Naive, assert_like_naive
from tests.support.runs import complete

BASE = 1e4  # of the toy model's rotations
LENGTHS = [(90, 90), (5, 5), (25,), (24,), (23,)]
"""Prompts beyond the budget of 24 tokens, at it, within it, and all in one batch."""


def check(text: str, kind: type[Naive], lengths: tuple[int, ...], generate: int = 40) -> None:
    assert_like_naive(complete(text, prompts(*lengths), generate), kind)


def turned(keys: Tensor, by: int) -> Tensor:
    """Keys (tokens, channels) as if they stood ``by`` positions later."""
    half = keys.shape[1] // 2
    angle = by * BASE ** -(torch.arange(half) / half)
    real, imaginary = keys[:, :half], keys[:, half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], 1)


class NaiveStreaming(Naive):
    """The first 4 tokens, moved next to the latest 20."""

    def keys(self, x: Tensor, cached: int) -> Tensor:
        away = max(len(x) - 24, 0)
        return torch.cat([turned(x[:4], away), x[4 + away :]])

    def values(self, x: Tensor, cached: int) -> Tensor:
        return torch.cat([x[:4], x[4 + max(len(x) - 24, 0) :]])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_streamingllm_puts_sinks_and_window_side_by_side(lengths: tuple[int, ...]) -> None:
    check("streamingllm:sink=4,recent=20", NaiveStreaming, lengths)


class Choosing(Naive):
    """A KV head attends to the tokens it has kept."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.queries = torch.zeros(0)  # of a layer's prompt
        self.cached = 0, 0  # the sequence that attends, and its tokens before

    def prefill(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        self.queries = q
        return super().prefill(layer, x, q, k, v, step)

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        shared = self.queries.shape[1] // k.shape[1]
        for i, length in enumerate(self.lengths):
            for g in range(k.shape[1]):
                asked = self.queries[i, g * shared : (g + 1) * shared, :length]
                logits = asked @ k[i, g, :length].T / k.shape[3] ** 0.5
                seen = torch.ones(length, length).tril().bool()
                self.read(layer, i, g, logits.masked_fill(~seen, -torch.inf).softmax(-1).sum(0))

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        out, shared = torch.empty_like(q), q.shape[1] // k.shape[1]
        for i, start in enumerate(step.starts):
            keys = torch.cat([self.k[layer][i][:, :start], k[i]], 1)
            values = torch.cat([self.v[layer][i][:, :start], v[i]], 1)
            self.k[layer][i], self.v[layer][i] = keys, values
            for g in range(k.shape[1]):
                kept = self.kept(layer, i, g, start)
                heads = slice(g * shared, (g + 1) * shared)
                shares = (q[i, heads, 0] @ keys[g, kept].T / k.shape[3] ** 0.5).softmax(-1)
                self.cached = i, start
                out[i, heads, 0] = self.used(shares) @ values[g, kept]
                self.seen(layer, i, g, kept, shares.sum(0))
        return out

    def read(self, layer: int, i: int, g: int, shares: Tensor) -> None:
        """A prompt has been read; ``shares`` (queries, tokens) are summed over a group's heads."""

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        """Positions to attend to when token ``new`` comes in."""
        return list(range(new + 1))

    def used(self, shares: Tensor) -> Tensor:
        """Of attention (heads, tokens), what weighs values."""
        return shares

    def seen(self, layer: int, i: int, g: int, kept: list[int], shares: Tensor) -> None:
        """Attention, summed over a group's heads, that the kept tokens have got."""


class NaiveKcache(Choosing):
    """The 7 largest weights of every query head as they are, the others 0."""

    def used(self, shares: Tensor) -> Tensor:
        ordered = shares.sort(descending=True).values
        least = ordered[:, :7][:, -1:]
        for head in ordered if ordered.shape[1] > 7 else ():
            self.decide(*self.cached, float(head[6]), float(head[7]))
        return torch.where(shares >= least, shares, 0.0)


@pytest.mark.parametrize("text", ["kcache:n=7", "kcache:n=7,gpu_layers=2"])
@pytest.mark.parametrize("lengths", [(90, 90), (5, 5)])
def test_kcache_weighs_the_values_of_the_best(lengths: tuple[int, ...], text: str) -> None:
    check(text, NaiveKcache, lengths)


class NaiveSnapkv(Choosing):
    """The last 6 tokens of a prompt, and the 18 that these and their neighbours attend to most."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chosen: dict[tuple[int, int, int], list[int]] = {}

    def read(self, layer: int, i: int, g: int, shares: Tensor) -> None:
        length = len(shares)
        own = list(range(max(length - 6, 0), length))
        votes = shares[-6:].sum(0)
        votes[own] = 0.0
        around = [range(max(j - 2, 0), min(j + 3, self.prompt)) for j in range(length)]
        votes = torch.cat([votes, torch.zeros(self.prompt - length)])
        pooled = [sum(float(votes[j]) for j in near) / len(near) for near in around]
        ranked = sorted(range(max(length - 6, 0)), key=lambda j: -pooled[j])
        if len(ranked) > 18:
            self.decide(i, 0, pooled[ranked[17]], pooled[ranked[18]])
        self.chosen[layer, i, g] = sorted(ranked[:18] + own)

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        return self.chosen[layer, i, g] + list(range(self.lengths[i], new + 1))


class NaiveH2o(Choosing):
    """The 9 tokens with the most attention so far, and the latest 15."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.heavy: dict[tuple[int, int, int], list[int]] = {}
        self.recent: dict[tuple[int, int, int], list[int]] = {}
        self.sums: dict[tuple[int, int, int], dict[int, float]] = {}

    def read(self, layer: int, i: int, g: int, shares: Tensor) -> None:
        at, total = (layer, i, g), shares.sum(0).tolist()
        tokens = list(range(len(total)))
        old, latest = tokens[:-15], tokens[-15:]
        if len(tokens) <= 24:  # nothing has to go: the first ones count as heavy
            old, latest = tokens[:9], tokens[9:]
        ranked = sorted(old, key=lambda j: -total[j])
        if len(ranked) > 9:
            self.decide(i, 0, total[ranked[8]], total[ranked[9]])
        self.heavy[at] = ranked[:9]
        self.recent[at], self.sums[at] = latest, dict(enumerate(total))

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        at = layer, i, g
        heavy, recent, sums = self.heavy[at], self.recent[at], self.sums[at]
        if len(heavy) < 9:
            heavy.append(new)
        else:
            recent.append(new)
        if len(recent) > 15:
            leaving, lowest = recent.pop(0), min(heavy, key=lambda j: sums[j])
            self.decide(i, new, sums[leaving], sums[lowest])
            if sums[lowest] < sums[leaving]:
                heavy[heavy.index(lowest)] = leaving
        sums[new] = 0.0
        return heavy + recent

    def seen(self, layer: int, i: int, g: int, kept: list[int], shares: Tensor) -> None:
        for j, share in zip(kept, shares.tolist(), strict=True):
            self.sums[layer, i, g][j] += share


@pytest.mark.parametrize(
    ("text", "kind"),
    [("snapkv:budget=24,window=6", NaiveSnapkv), ("h2o:heavy=9,recent=15", NaiveH2o)],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_attention_says_is_kept(
    text: str, kind: type[Naive], lengths: tuple[int, ...]
) -> None:
    check(text, kind, lengths)
