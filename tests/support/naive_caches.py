"""Caches as their papers describe them, slowly: everything in full precision, faked per step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.store import Resident
from kvsim.validate.run import Generation
from tests.support.adopted import Adopted
from tests.support.runs import TOLERANCE, assert_likeliest, logits_of

TIE = 5e-6
"""Attention of two tokens that rounding may put in either order, relative."""


class Naive(Composed):
    """Attention over a faked copy of a full cache, head by head and query by query."""

    sure: dict[int, int]
    late = False  # whether a token attends before it counts as cached

    def __init__(
        self, technique: Technique, decoder: Decoder, prompts: tuple[int, int], generate: int
    ) -> None:
        super().__init__(technique, decoder, prompts, generate)
        self.lengths = [self.prompt] * self.batch
        self.k = [[torch.zeros(0) for _ in self.lengths] for _ in self.shapes]
        self.v = [list(row) for row in self.k]
        self.place = 0, 0, 0  # layer, sequence and KV head that are attended to
        self.sure = {}  # tokens of sequences up to the first choice that was a tie

    def keys(self, x: Tensor, cached: int) -> Tensor:
        """Keys (tokens, channels) of one head as attention reads them with so many cached."""
        raise NotImplementedError

    def values(self, x: Tensor, cached: int) -> Tensor:
        """The values, as ``keys`` has the keys."""
        raise NotImplementedError

    def decide(self, sequence: int, cached: int, taken: float, left: float) -> None:
        """Note a choice between tokens; what follows from a tie cannot be compared."""
        if abs(taken - left) <= TIE * abs(taken):
            until = max(cached - self.lengths[sequence] + 1, 1)  # the prompt's token is sure
            self.sure[sequence] = min(until, self.sure.get(sequence, until))

    def prefill(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        held = self.hold_chunk(layer, k, v, step)
        out = self.attend_prompt(layer, q, *held, step)
        if step.ends_prompt(self.prompt, self.batch):
            self.store_prompt(layer, *held)
        return out

    def attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        return self.layers[layer].attend_prompt(q, k, v, step)

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.k[layer] = [k[i, :, :n].clone() for i, n in enumerate(self.lengths)]
        self.v[layer] = [v[i, :, :n].clone() for i, n in enumerate(self.lengths)]

    def resident(self) -> Resident:
        return {"gpu": {}}

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        out = torch.empty_like(q)
        shared = q.shape[1] // k.shape[1]
        for i, start in enumerate(step.starts):
            keys = torch.cat([self.k[layer][i][:, :start], k[i]], 1)
            values = torch.cat([self.v[layer][i][:, :start], v[i]], 1)
            self.k[layer][i], self.v[layer][i] = keys, values
            for new in range(step.new):
                end = start + new + 1
                cached = start if self.late else end
                for h in range(q.shape[1]):
                    self.place = layer, i, h // shared
                    kh = self.keys(keys[h // shared, :end], cached)
                    vh = self.values(values[h // shared, :end], cached)
                    shares = (kh @ q[i, h, new] / q.shape[-1] ** 0.5).softmax(0)
                    out[i, h, new] = shares @ vh
        return out


class _Following(Generation):
    """Takes the tokens of another run, whatever it would choose itself."""

    follow: Tensor

    def choose(self, logits: Tensor) -> Tensor:
        return self.follow[:, self.done[0]]


def naive_run(kind: type[Naive], run: Generation) -> Generation:
    """A naive cache along the tokens of a complete run."""
    given = (run.decoder, parse("full"), run.prompts, run.generate)
    naive = _Following(*given, keep=True, kind=kind)
    naive.follow = run.tokens
    naive.complete()
    return naive


def assert_like_naive(run: Generation, kind: type[Naive], tolerance: float = TOLERANCE) -> None:
    """Every logit is that of a naive cache, and every token its likeliest, or ties with it."""
    naive = naive_run(kind, run)
    impl: Any = naive.impl
    ties, compared = 0, 0
    for i in range(run.batch):
        sure = slice(impl.sure.get(i, run.generate))
        compared += sure.stop
        rows = logits_of(run, i)[sure], run.tokens[i][sure], logits_of(naive, i)[sure]
        ties += assert_likeliest(*rows, tolerance)
    assert ties <= 1, f"{ties} tokens are ties"
    assert compared >= run.batch * run.generate / 2, "most of the run follows from a tie"


Rows = Callable[[int], int]
"""Packed rows of a sequence with so many cached tokens."""


def naive_packed(
    impl: Any, adopted: Adopted, keys: Rows, values: Rows, packs_late: bool = False
) -> type[Naive]:
    """The first rows as the implementation of a complete run has packed them, checked.

    Parameters
    ----------
    packs_late : whether a token attends before it counts as cached.
    """

    class NaivePacked(Naive):
        late = packs_late

        def keys(self, x: Tensor, cached: int) -> Tensor:
            return self.packed("k", x, keys(cached))

        def values(self, x: Tensor, cached: int) -> Tensor:
            return self.packed("v", x, values(cached))

        def packed(self, which: str, x: Tensor, rows: int) -> Tensor:
            layer, sequence, head = self.place
            if not rows:
                return x
            held = impl.layers[layer].kv if hasattr(impl, "layers") else None
            side = getattr(held, which) if held else getattr(impl, which)[layer]
            store = side.store
            wide = adopted.widened((which, *self.place), x[:rows], store, sequence, head)
            return torch.cat([wide, x[rows:]])

    return NaivePacked
