"""Prompts cut by scores: real runs against what their papers say in plain words, and counts."""

import pytest
import torch
from torch import Tensor

from kvsim.validate.model.attention import Pass
from tests.support.decoders import prompts
from tests.support.naive_caches import Naive, assert_like_naive
from tests.support.runs import complete
from tests.validate.test_impl_eviction import LENGTHS, Choosing, turned

BUDGET = 24


class NaiveCut(Choosing):
    """The best 24 tokens of a prompt, and all that follow."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.best: dict[tuple[int, int, int], list[int]] = {}

    def prefill(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        self.now = layer
        return super().prefill(layer, x, q, k, v, step)

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        for i, length in enumerate(self.lengths):
            if length <= BUDGET:
                self.best |= {(layer, i, g): list(range(length)) for g in range(k.shape[1])}
                continue
            scored = self.score(self.queries[i, :, :length], k[i, :, :length], v[i, :, :length])
            for g, row in enumerate(scored):
                order = row.argsort(descending=True, stable=True).tolist()
                self.decide(i, 0, float(row[order[BUDGET - 1]]), float(row[order[BUDGET]]))
                self.best[layer, i, g] = order[:BUDGET]

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores (KV heads, tokens) of a prompt's queries, keys and values (heads, tokens, dim)."""
        raise NotImplementedError

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        return [*sorted(self.best[layer, i, g]), *range(self.lengths[i], new + 1)]


class NaiveKeydiff(NaiveCut):
    """Minus the cosine of a key with the mean of the keys' directions."""

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        directions = k / k.norm(dim=2, keepdim=True)
        mean = directions.mean(1)
        return -torch.stack(
            [
                torch.cosine_similarity(head, to[None], dim=1)
                for head, to in zip(k, mean, strict=True)
            ]
        )


class NaiveTova(NaiveCut):
    """The last query's weights, their mean over all heads."""

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = len(q) // len(k)
        rows = [(k[h // shared] @ q[h, -1] / q.shape[2] ** 0.5).softmax(0) for h in range(len(q))]
        return torch.stack(rows).mean(0).expand(len(k), -1)


class NaiveExpected(NaiveCut):
    """Expected weights of normal queries at the positions to come, times the values' lengths."""

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, dim, shared = q.shape[1], q.shape[2], len(q) // len(k)
        eye = torch.eye(dim)
        after = range(max(self.lengths), self.capacity)
        turn = torch.stack([turned(eye, n) for n in after]).mean(0)
        found = []
        for g in range(len(k)):
            weights = []
            for head in q[g * shared : (g + 1) * shared]:
                plain = torch.cat([turned(head[n : n + 1], -n) for n in range(4, length)])
                many = len(plain)
                mean = plain.sum(0) / many
                spread = plain.T @ plain / many - torch.outer(mean, mean)
                mean, spread = mean @ turn, turn.T @ spread @ turn
                logits = [key @ mean / dim**0.5 + key @ spread @ key / dim / 2 for key in k[g]]
                weights.append(torch.stack(logits).softmax(0))
            scored = (sum(weights) / shared + 0.02) * v[g].norm(dim=1)
            scored[:4] = torch.inf
            found.append(scored)
        return torch.stack(found)


class NaiveAda(NaiveCut):
    """What SnapKV's scores rank highest in a layer; a fifth of 24 tokens is every head's own."""

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        for i, length in enumerate(self.lengths):
            if length <= BUDGET:
                continue
            heads = range(k.shape[1])
            scored = self.score(self.queries[i, :, :length], k[i, :, :length], v[i, :, :length])
            rows = {g: scored[g].tolist() for g in heads}
            order = {g: sorted(range(length), key=lambda t: -rows[g][t]) for g in heads}
            first = {g: order[g][: BUDGET // 5] for g in heads}
            rest = sorted(
                ((rows[g][t], g, t) for g in heads for t in order[g][BUDGET // 5 :]), reverse=True
            )
            left = len(heads) * (BUDGET - BUDGET // 5)
            self.decide(i, 0, rest[left - 1][0], rest[left][0])
            for g in heads:
                self.best[layer, i, g] = first[g] + [t for _, h, t in rest[:left] if h == g]

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared, length = len(q) // len(k), q.shape[1]
        found = []
        for g in range(len(k)):
            votes = torch.zeros(self.prompt)
            for head in q[g * shared : (g + 1) * shared]:
                for n in range(length - 6, length):
                    shares = (k[g, : n + 1] @ head[n] / q.shape[2] ** 0.5).softmax(0)
                    votes[: n + 1] += shares
            votes[length - 6 :] = 0.0
            near = [votes[max(j - 2, 0) : j + 3].mean() for j in range(length)]
            near[-6:] = [torch.tensor(torch.inf)] * 6
            found.append(torch.stack(near))
        return torch.stack(found)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"ada-kv:budget={BUDGET},window=6", NaiveAda),
        (f"keydiff:budget={BUDGET}", NaiveKeydiff),
        (f"tova:budget={BUDGET}", NaiveTova),
        (f"expected-attention:budget={BUDGET}", NaiveExpected),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_prompt_is_cut_as_the_paper_says(
    text: str, kind: type[Naive], lengths: tuple[int, ...]
) -> None:
    assert_like_naive(complete(text, prompts(*lengths), 20), kind)


class NaiveRkv(Choosing):
    """Ten tokens by attention and redundancy, cut anew whenever fourteen are there."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.held: dict[tuple[int, int, int], list[int]] = {}
        self.asked: dict[tuple[int, int], list[Tensor]] = {}  # queries (heads, dim), by position

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        for i, length in enumerate(self.lengths):
            self.asked[layer, i] = list(self.queries[i, :, :length].unbind(1))
            for g in range(k.shape[1]):
                self.held[layer, i, g] = list(range(length))
                if length > 10:
                    self.cut(layer, i, g)

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        for i in range(len(q)):
            self.asked[layer, i].append(q[i, :, 0])
        return super().attend(layer, x, q, k, v, step)

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        self.held[layer, i, g].append(new)
        return list(self.held[layer, i, g])

    def seen(self, layer: int, i: int, g: int, kept: list[int], shares: Tensor) -> None:
        if len(kept) == 14:
            self.cut(layer, i, g)

    def cut(self, layer: int, i: int, g: int) -> None:
        held = self.held[layer, i, g]
        k = self.k[layer][i][g, held]
        dim, many = k.shape[1], len(held)
        shared = len(self.asked[layer, i][0]) // len(self.k[layer][i])
        rows = []
        for h in range(g * shared, (g + 1) * shared):
            mean = torch.zeros(many)
            for back in range(3):
                now = held[many - 1 - back]
                logits = k[: many - back] @ self.asked[layer, i][now][h] / dim**0.5
                mean[: many - back] += logits.softmax(0) / 3
            rows.append([float(mean[max(0, j - 3) : j + 4].max()) for j in range(many)])
        important = torch.tensor(rows).amax(0)
        alike = torch.zeros(many)
        for one in range(many):
            row = torch.cosine_similarity(k, k[one][None], dim=1)
            row[one] = 0.0
            like = (row > 0.5).nonzero().flatten().tolist()
            row[like[-1] if like else 0] = 0.0
            alike += row
        joint = 0.1 * important - 0.9 * (alike / many).softmax(0)
        joint[-3:] = torch.inf
        order = joint.argsort(descending=True).tolist()
        cached = max(self.lengths[i], held[-1])
        self.decide(i, cached, float(joint[order[9]]), float(joint[order[10]]))
        self.held[layer, i, g] = sorted(held[j] for j in order[:10])


@pytest.mark.parametrize("lengths", [(40,), (9, 9), (31, 31), (3,)])
def test_reasoning_is_cut_whenever_the_buffer_is_full(lengths: tuple[int, ...]) -> None:
    text = "r-kv:kept=10,buffer=4,window=3"
    assert_like_naive(complete(text, prompts(*lengths), 20), NaiveRkv)
