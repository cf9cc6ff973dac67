"""InfiniGen and CacheGen run for real, against their papers put down token by token."""

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.model.attention import Pass
from kvsim.validate.run import Generation
from kvsim.validate.techniques.cachegen import Coder
from tests.support.decoders import decoder, prompts
from tests.support.naive_caches import Naive, assert_like_naive
from tests.support.runs import assert_same, complete
from tests.validate.test_impl_eviction import BASE, Choosing

BUDGET, CHANNELS = 7, 4  # of 16, in pairs


class NaiveInfinigen(Choosing):
    """The seven tokens that the input of the layer before would attend to by four channels."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.weight: dict[int, Tensor] = {}  # of every channel, by layer
        self.inputs: dict[int, Tensor] = {}  # of every layer in this step

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        asked = torch.zeros(k.shape[1], k.shape[3])
        for i, length in enumerate(self.lengths):
            every = self.queries[i, :, :length].abs().sum(1)
            for g in range(k.shape[1]):
                shared = len(every) // k.shape[1]
                asked[g] += every[g * shared : (g + 1) * shared].sum(0)
                asked[g] += k[i, g, :length].abs().sum(0)
        self.weight[layer] = asked

    def attend(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Pass) -> Tensor:
        self.inputs[layer] = x
        return super().attend(layer, x, q, k, v, step)

    def kept(self, layer: int, i: int, g: int, new: int) -> list[int]:
        keys = self.k[layer][i][g, :new]
        if not layer or new <= BUDGET:
            return list(range(new + 1))
        dim = keys.shape[1]
        half = dim // 2
        pairs = [(float(self.weight[layer][g, c] + self.weight[layer][g, c + half]), c)
                 for c in range(half)]  # fmt: skip
        best = [c for _, c in sorted(pairs, reverse=True)[: CHANNELS // 2]]
        shared = self.model.heads // self.model.kv_heads
        matrix = self.decoder.weights.layers[layer].qkv.weight
        promised = torch.full((new,), -torch.inf)
        for h in range(g * shared, (g + 1) * shared):
            whole = matrix[h * dim : (h + 1) * dim] @ self.inputs[layer - 1][i, 0]
            products = torch.zeros(new)
            for c in best:
                angle = torch.tensor(new * BASE ** -(c / half))
                real = whole[c] * angle.cos() - whole[c + half] * angle.sin()
                imaginary = whole[c + half] * angle.cos() + whole[c] * angle.sin()
                products += real * keys[:, c] + imaginary * keys[:, c + half]
            promised = torch.maximum(promised, products)
        order = promised.argsort(descending=True).tolist()
        self.decide(i, new, float(promised[order[BUDGET - 1]]), float(promised[order[BUDGET]]))
        return sorted([*order[:BUDGET], new])


@pytest.mark.parametrize("lengths", [(40, 40), (5, 5), (24,)])
def test_tokens_are_guessed_by_the_layer_before(lengths: tuple[int, ...]) -> None:
    text = f"infinigen:budget={BUDGET},part={CHANNELS / 16}"
    assert_like_naive(complete(text, prompts(*lengths), 16), NaiveInfinigen)


@pytest.mark.parametrize("model", ["llama", "qwen3", "opt", "biased"])
@pytest.mark.parametrize("settings", ["budget=500", "budget=500,part=1", "whole=3", "whole=9"])
def test_all_tokens_give_full_kvs(model: str, settings: str) -> None:
    assert_same(f"infinigen:{settings}", "full", prompts(31, 31), 12, model)


@pytest.mark.parametrize(
    ("model", "text", "said"),
    [
        ("llama", "infinigen + fp8", "no real implementation"),
        ("mistral", "infinigen", "sliding windows"),
    ],
)
def test_what_it_does_not_run(model: str, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Generation(decoder(model), parse(text), prompts(24), 4)


class NaiveCachegen(Naive):
    """A prompt as it comes back: every tenth token in 8 bits, differences ever more coarse."""

    def store_prompt(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().store_prompt(layer, k, v)
        most = (32 >> 3 * layer // len(self.shapes)) // 2 - 1
        for side in (self.k[layer], self.v[layer]):
            for i, heads in enumerate(side):  # (KV heads, tokens, dim)
                found = []
                for n in range(heads.shape[1]):
                    row = heads[:, n]
                    if n % 10 == 0:
                        step = row.abs().max() / 127
                        anchor = (row / step).round() * step
                        found.append(anchor)
                        continue
                    step = (row - anchor).abs().max() / most
                    found.append(anchor + ((row - anchor) / step).round() * step)
                side[i] = torch.stack(found, 1)

    def keys(self, x: Tensor, cached: int) -> Tensor:
        return x

    def values(self, x: Tensor, cached: int) -> Tensor:
        return x


@pytest.mark.parametrize("model", ["llama", "opt"])
@pytest.mark.parametrize("lengths", [(40, 40), (15, 15, 15)])
def test_a_prompt_comes_back_from_its_stream(lengths: tuple[int, ...], model: str) -> None:
    text = "cachegen:bits=16,load=true"
    assert_like_naive(complete(text, prompts(*lengths), 12, model), NaiveCachegen)


def test_whoever_reads_the_prompt_loses_nothing() -> None:
    assert_same("cachegen:bits=16", "full", prompts(31, 31), 12)


@pytest.mark.parametrize("symbols", [3, 31, 255])
def test_a_stream_is_lossless_and_as_short_as_its_symbols_allow(symbols: int) -> None:
    generator = torch.Generator().manual_seed(symbols)
    made = torch.randn(2, 600, 24, generator=generator) * symbols / 8
    made = made.round().clamp(-(symbols // 2), symbols // 2).long()
    coder = Coder(24, symbols, made.device)
    coder.count(made)
    words, count, state = coder.encode(made)
    back = coder.decode(words, count, state, (2, 600))
    assert torch.equal(back, made)
    bits = 0.0  # what each symbol takes by its channel's own table
    for token in range(600):
        table = coder.tables[token % 10 > 0].double() / 4096
        for i in range(2):
            index = made[i, token][:, None] + table.shape[1] // 2
            bits -= float(table.gather(1, index).log2().sum())
    assert bits <= 16 * (len(words) + len(state)) <= 1.002 * bits + 32 * len(state)


def test_a_stream_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes [\d.]+ bits per number in layer 0; set cachegen"):
        Generation(decoder("llama"), parse("cachegen:bits=2"), prompts(24), 4).complete()
