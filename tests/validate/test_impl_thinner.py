"""Thin keys, sparse prompts and shared prefixes: real runs against plain words."""

from collections import Counter
from itertools import pairwise
from math import ceil, log
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers import kvzip
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.generation import RunningGeneration
from tests.support.decoders import prompts
from tests.support.naive_caches import Naive, assert_like_naive
from tests.support.runs import complete
from tests.validate.test_impl_eviction import Choosing

LENGTHS = [(90, 90), (10, 10), (5, 5), (40,)]


class NaiveThink(Choosing):
    """Zeros in place of the half of the channels that the last 6 queries make least of."""

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        shared, dim = self.queries.shape[1] // k.shape[1], k.shape[3]
        for i, length in enumerate(self.lengths):
            for g in range(k.shape[1]):
                asked = self.queries[i, g * shared : (g + 1) * shared, max(length - 6, 0) : length]
                lengths = [
                    float(asked[:, :, c].norm() * k[i, g, :length, c].norm()) for c in range(dim)
                ]
                order = sorted(range(dim), key=lambda c: -lengths[c])
                self.decide(i, 0, lengths[order[dim // 2 - 1]], lengths[order[dim // 2]])
                self.k[layer][i][g][:, order[dim // 2 :]] = 0.0


class NaivePrompt(Choosing):
    """Heads read a prompt one by one."""

    def attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        out = torch.zeros_like(q)
        for i, length in enumerate(self.lengths):
            for h in range(q.shape[1]):
                g = h * k.shape[1] // q.shape[1]
                own = q[i, h, :length], k[i, g, :length], v[i, g, :length]
                out[i, h, :length] = self.sparse(i, *own)
        return out

    def sparse(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outputs (tokens, dim) of a head's queries over its keys and values."""
        raise NotImplementedError


class NaiveBlocks(NaivePrompt):
    """Half of every row of blocks of 8 tokens, its own among them."""

    def by_blocks(
        self, i: int, q: Tensor, k: Tensor, v: Tensor, scores: list[list[float]]
    ) -> Tensor:
        out = torch.zeros_like(q)
        for row, scored in enumerate(scores):
            order = sorted(range(row), key=lambda c: -scored[c])
            taken = ceil((row + 1) / 2) - 1
            if 0 < taken < row:
                self.decide(i, 0, scored[order[taken - 1]], scored[order[taken]])
            blocks = {*order[:taken], row}
            for n in range(8 * row, min(8 * row + 8, len(q))):
                seen = [t for t in range(n + 1) if t // 8 in blocks]
                out[n] = (k[seen] @ q[n] / q.shape[1] ** 0.5).softmax(0) @ v[seen]
        return out


class NaiveSparse(NaiveBlocks):
    """Half of every row of blocks of 8 tokens, by sums of weights of every fourth pair."""

    def sparse(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, dim = q.shape
        many = -(-length // 8)
        far = torch.zeros(many * 8 - length, dim)
        asked, held = torch.cat([q, far]), torch.cat([k, far])
        logits = torch.full((many * 2, many * 2), -torch.inf)
        for a in range(many * 2):
            for b in range(a + 1):
                pairs = [asked[4 * a + 3 - s] @ held[4 * b + s] for s in range(4)]
                logits[a, b] = sum(pairs) / (4 * dim**0.5)
        weights = logits.softmax(1)
        scored = [
            [float(weights[2 * row : 2 * row + 2, 2 * c : 2 * c + 2].sum()) for c in range(row)]
            for row in range(many)
        ]
        return self.by_blocks(i, q, k, v, scored)


class NaiveFlex(NaiveBlocks):
    """Half of every row of blocks of 8 tokens, by means of blocks or by the last 8 queries."""

    trusted: ClassVar[Counter[bool]] = Counter()

    def sparse(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, dim = q.shape
        many = -(-length // 8)
        last = range(max(length - 8, 0), length)
        columns, diagonals = [0.0] * many, [0.0] * many
        for n in last:
            for t, share in enumerate((k[: n + 1] @ q[n] / dim**0.5).softmax(0).tolist()):
                columns[t // 8] += share / len(last)
                diagonals[(n - t) // 8] += share / len(last)
        means = [torch.stack([x[8 * b : 8 * b + 8].mean(0) for b in range(many)]) for x in (q, k)]
        guess = (means[1] @ q[last.start :].mean(0) / dim**0.5).softmax(0).tolist()
        apart = 0.0
        for x, y in zip(guess, columns, strict=True):
            apart += sum(a * log(2 * a / (x + y)) / 2 for a in (x, y) if a)
        trusted = max(apart, 0.0) ** 0.5 < 0.1
        self.trusted[trusted] += 1
        scores = []
        for row in range(many):
            scored = [max(columns[c], diagonals[row - c]) for c in range(row)]
            if trusted:
                scored = (means[1][: row + 1] @ means[0][row] / dim**0.5).softmax(0).tolist()[:row]
            scores.append(scored)
        return self.by_blocks(i, q, k, v, scores)


def test_flexprefill_ranks_blocks_by_means_or_lines() -> None:
    NaiveFlex.trusted.clear()
    for lengths in LENGTHS:
        assert_like_naive(
            complete("flexprefill:block=8,share=0.5", prompts(*lengths), 20), NaiveFlex
        )
    assert min(NaiveFlex.trusted[True], NaiveFlex.trusted[False]) > 9, "one pattern alone"


class NaiveLines(NaivePrompt):
    """Of 4 columns and 8 diagonals, by the last 4 queries, the best 12 tokens of every query."""

    def sparse(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, dim = q.shape
        columns, diagonals = [0.0] * length, [0.0] * length
        for n in range(max(length - 4, 0), length):
            shares = (k[: n + 1] @ q[n] / dim**0.5).softmax(0)
            for t in range(n + 1):
                columns[t] += float(shares[t])
                diagonals[n - t] += float(shares[t])
        ranks = []
        for sums in (columns, diagonals):
            order = sorted(range(length), key=lambda t: -sums[t])
            for one, other in list(pairwise(order))[:12]:
                self.decide(i, 0, sums[one], sums[other])
            ranks.append({t: place for place, t in enumerate(order)})
        out = torch.zeros_like(q)
        for n in range(length):
            best = {t: min(ranks[0][t] / 4, ranks[1][n - t] / 8) for t in range(n + 1)}
            seen = sorted(best, key=lambda t: (best[t], t))[:12]
            out[n] = (k[seen] @ q[n] / dim**0.5).softmax(0) @ v[seen]
        return out


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("think:ratio=0.5,window=6", NaiveThink),
        ("xattention:block=8,stride=4,share=0.5", NaiveSparse),
        ("minference:vertical=4,slash=8,window=4", NaiveLines),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_prompts_are_read_as_papers_say(
    text: str, kind: type[Naive], lengths: tuple[int, ...]
) -> None:
    assert_like_naive(complete(text, prompts(*lengths), 20), kind)


class NaiveZip(Naive):
    """Half of 24 tokens by the greatest weight that their repetition in chunks of 16 gives them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chosen: dict[tuple[int, int, int], list[int]] = {}

    def after_prompt(self, run: RunningGeneration) -> None:
        model, count = self.decoder, len(self.shapes)
        best: dict[tuple[int, int, int, int], float] = {}
        for i, prompt in enumerate(run.prompts):
            length = len(prompt)
            for first in range(0, length, 16):
                tokens = torch.tensor([prompt[first : first + 16]])
                new = tokens.shape[1]
                places = torch.arange(length, length + new)[None]
                x = model.embed(tokens, places)

                def repeat(
                    layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass,
                    i: int = i, first: int = first, new: int = new, length: int = length,
                ) -> Tensor:  # fmt: skip
                    out, shared = torch.empty_like(q), q.shape[1] // k.shape[1]
                    for h in range(q.shape[1]):
                        g = h // shared
                        keys = torch.cat([self.k[layer][i][g], k[0, g]])
                        values = torch.cat([self.v[layer][i][g], v[0, g]])
                        for n in range(new):
                            logits = keys @ q[0, h, n] / q.shape[3] ** 0.5
                            seen = range(length + n + 1)
                            out[0, h, n] = logits[seen].softmax(0) @ values[seen]
                            near = [*range(first, first + new), *range(length, length + n + 1)]
                            shares = logits[near].softmax(0)[:new].tolist()
                            for t, share in enumerate(shares, first):
                                at = layer, i, g, t
                                best[at] = max(best.get(at, 0.0), share)
                    return out

                step = model.step(slice(0, 1), (length,), places, "prefill")
                for layer in range(count):
                    model.layer(layer, model.weights.layers[layer], x, step, repeat)
            for layer in range(count):
                for g in range(self.model.kv_heads):
                    given = {t: best[layer, i, g, t] for t in range(length)}
                    order = sorted(given, key=lambda t: -given[t])
                    if length > 12:
                        self.decide(i, 0, given[order[11]], given[order[12]])
                    self.chosen[layer, i, g] = sorted(order[:12])

    def keys(self, x: Tensor, cached: int) -> Tensor:
        return self.kept(x)

    def values(self, x: Tensor, cached: int) -> Tensor:
        return self.kept(x)

    def kept(self, x: Tensor) -> Tensor:
        return x[self.chosen[self.place] + list(range(self.lengths[self.place[1]], len(x)))]


@pytest.mark.parametrize("lengths", [(40, 40), (5, 5), (33,)])
def test_kvzip_keeps_what_the_repetition_looks_up(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvzip, "CHUNK", 16)
    assert_like_naive(complete("kvzip:budget=12", prompts(*lengths), 20), NaiveZip)


def test_kvzip_refuses_what_its_cache_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("kvzip:budget=12 + kivi:group=16,residual=16", "kvzip:budget=12 + offload"):
        with pytest.raises(InputError, match="without another storage or placement"):
            complete(text, prompts(30), 20)
    with pytest.raises(InputError, match="cuts every layer"):
        complete("0: full; 1-2: kvzip:budget=12", prompts(30), 20)


class NaiveWhole(Naive):
    """Every token."""

    def keys(self, x: Tensor, cached: int) -> Tensor:
        return x

    def values(self, x: Tensor, cached: int) -> Tensor:
        return x


@pytest.mark.parametrize("more", [(9, 9, 9), (6,), (0, 0)])
@pytest.mark.parametrize("shared", [1, 12])
def test_cascade_reads_a_shared_prefix_once(shared: int, more: tuple[int, ...]) -> None:
    (first,) = prompts(shared)
    given = [first + other for other in prompts(*more)]
    assert_like_naive(complete(f"cascade:shared={shared}", given, 20), NaiveWhole)


def test_cascade_refuses_prompts_that_share_nothing() -> None:
    with pytest.raises(InputError, match="do not share their first 12 tokens"):
        complete("cascade:shared=12", [list(range(1, 31)), list(range(40, 70))], 20)
