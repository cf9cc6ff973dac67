"""Packed caches that run for real, against naive caches and full precision."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.parts.scores import KeptQueries
from kvsim.validate.run import Generation
from kvsim.validate.techniques import specache
from kvsim.validate.techniques.mikv import Mikv
from kvsim.validate.techniques.zipcache import Zipcache
from tests.support.adopted import Adopted
from tests.support.decoders import decoder, oracle_attentions, prompts
from tests.support.naive_caches import assert_like_naive, naive_packed
from tests.support.runs import assert_same_run, complete
from tests.support.sampled import few

GROUP, RESIDUAL = 16, 32


def logits(run: Generation) -> Tensor:
    return torch.stack([torch.stack(rows) for rows in run.logits])


@pytest.mark.parametrize("bits", few([1, 2, 4, 8], [2, 4]))
@pytest.mark.parametrize("name", ["kivi", "late-kivi"])
def test_kivi_is_its_algorithm_with_a_residual_that_rolls(name: str, bits: int) -> None:
    run = complete(f"{name}:bits={bits},group={GROUP},residual={RESIDUAL}", prompts(69, 69), 50)
    adopted = Adopted()
    kind = naive_packed(
        run.impl,
        adopted,
        keys=lambda cached: cached // RESIDUAL * RESIDUAL,
        values=lambda cached: max(cached - RESIDUAL, 0),
        packs_late=name == "late-kivi",
    )
    assert_like_naive(run, kind)
    adopted.assert_few()


SPECACHE = ["bits=2,group=8,residual=24", "bits=1", "speculative=false"]
FETCHED = few(
    [(s, model) for s in SPECACHE for model in ("llama", "llama-mha", "opt", "qwen2")],
    [*((s, "llama") for s in SPECACHE), *((SPECACHE[0], m) for m in ("llama-mha", "opt"))],
)


@pytest.mark.parametrize(("settings", "model"), FETCHED)
def test_specache_that_fetches_everything_is_full(settings: str, model: str) -> None:
    given = prompts(40, 40)
    full = complete("full", given, 60, model)
    shape = "" if "residual" in settings else "group=16,residual=16,"
    run = complete(f"specache:k=500,{shape}{settings}", given, 60, model)
    assert_same_run(run, full)


def test_specache_attends_to_what_the_guess_chose(monkeypatch: Any) -> None:
    """With few pairs: the same choice as a plain reading of algorithm 3 makes."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(scores: Tensor, heads: int, k: int, eligible: Tensor) -> Tensor:
        index = softmax_top_k(scores, heads, k, eligible)
        shares = scores.softmax(-1).view(len(scores), heads, -1, scores.shape[-1]).mean(2)
        for b, limit in enumerate(eligible.tolist()):
            for h in range(heads):
                chosen = index[b, h][index[b, h] >= 0].long()
                assert len(set(chosen.tolist())) == min(k, limit) and (chosen < limit).all()
                left = shares[b, h, :limit].scatter(0, chosen, -1.0)
                assert shares[b, h, chosen].min() >= left.max() * (1 - 1e-5)
        seen.append((scores, eligible, index))
        return index

    monkeypatch.setattr(specache, "softmax_top_k", spy)
    run = complete("specache:bits=2,group=16,residual=16,k=6", prompts(40, 40), 20)
    layers = 3
    assert len(seen) == layers * (1 + 19)  # pre-decoding, then every step
    starts = [eligible.tolist() for _, eligible, _ in seen[::layers]]
    assert starts == [[40, 40]] + [[41 + i, 41 + i] for i in range(19)]
    impl: Any = run.impl
    # what was fetched is what the full cache on the host has there
    for layer in impl.layers:
        rows = layer.index.long()[..., None].expand(-1, -1, -1, 16)
        for fetched, home in zip(layer.fetched, layer.host.homes, strict=True):
            assert torch.equal(fetched, home.gather(2, rows))


def naive_saliency(k: Tensor, q: Tensor) -> Tensor:
    """Equation 8 with every token as a probe, one score at a time; (KV heads, tokens)."""
    kv_heads, tokens, dim = k.shape
    shared = q.shape[0] // kv_heads
    total = torch.zeros(kv_heads, tokens)
    for h in range(q.shape[0]):
        for i in range(tokens):
            shares = (k[h // shared, : i + 1] @ q[h, i] / dim**0.5).softmax(0)
            total[h // shared, : i + 1] += shares / shared
    return total / torch.arange(tokens, 0, -1)


def test_zipcache_finds_the_salient_tokens_of_equation_8(monkeypatch: Any) -> None:
    kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    real, taken = Zipcache.pack, KeptQueries.observe

    def take(self: KeptQueries, q: Tensor, step: Any) -> None:
        taken(self, q, step)
        kept[len(kept)] = (q, q, q)

    def spy(self: Zipcache, k: Tensor, v: Tensor, saliency: Tensor, time: int) -> None:
        if not time:
            q = kept[len(kept) - 1][0]  # of the layer that has just read the prompt
            for b, found in enumerate(saliency):
                assert (found - naive_saliency(k[b], q[b])).abs().max() < 1e-5
        real(self, k, v, saliency, time)
        part = self.high.view(time)
        assert part.k is not None
        if not time:  # the salient rows are those of the largest saliency, up to packing
            best = saliency.topk(self.salient).indices
            rows = k.gather(2, best[..., None].expand(-1, -1, -1, k.shape[3]))
            off = (part.k.numbers()[:, :, : self.salient] - rows).abs()
            assert off.max() <= part.k.scale.float().amax() * 1.5

    monkeypatch.setattr(KeptQueries, "observe", take)
    monkeypatch.setattr(Zipcache, "pack", spy)
    complete("zipcache:probe=1,high=8,low=4", prompts(30, 30), 4)
    assert len(kept) == 3


def test_zipcache_packs_window_by_window() -> None:
    given = prompts(40, 40)
    full = complete("full", given, 60)
    run = complete("zipcache:high=8,low=8,window=10", given, 60)
    impl: Any = run.impl
    kv = impl.layers[0].kv
    assert kv.packed == 5  # the last full window was packed after its 50th token
    assert (kv.high.count(5), kv.low.count(5)) == (24 + 30, 16 + 20)
    same = int((run.tokens == full.tokens).cumprod(1).sum())
    assert same >= 40, "eight bits drift at once"
    lossy = complete("zipcache:high=4,low=2,window=10", given, 60)
    near = [(logits(r) - logits(full))[:, 1].abs().mean() for r in (run, lossy)]
    assert near[0] < 0.05 < near[1]


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_mikv_keeps_what_was_given_most_at_high_precision(model: str) -> None:
    """After the prompt as full attention says, then every token once, in the right share."""
    given, share = prompts(40, 40), 0.3
    run = Generation(decoder(model), parse(f"mikv:salient={share},group=8"), given, 20)
    run.start()
    impl: Any = run.impl
    for b, prompt in enumerate(given):
        n = len(prompt)
        for layer, true in zip(impl.layers, oracle_attentions(model, prompt), strict=True):
            kv, sums = layer.kv, true.sum(1)  # (heads, tokens)
            assert (kv.sums[b, :, :n] - sums).abs().max() < 1e-4
            by_head = kv.sums[b, :, :n].view(kv.room.heads, -1, n).sum(1)
            best = by_head.topk(kv.high_count(n)).indices
            assert torch.equal(kv.high.tokens[b, :, : kv.high_count(n)].long(), best)
    while min(run.done) < 20:
        impl.decode_round(run)
    for layer in impl.layers:
        kv = layer.kv
        for b, n in enumerate(run.cached):
            high = round(share * n)
            tokens = [kv.high.tokens[b, :, :high], kv.low.tokens[b, :, : n - high]]
            every = torch.cat(tokens, -1).sort(-1).values
            assert torch.equal(every, torch.arange(n).expand_as(every))


@pytest.mark.parametrize("model", ["llama", "opt", "llama-mha"])
def test_gear_of_full_rank_is_full_and_less_is_less(model: str) -> None:
    """The error of a block of 16 tokens x 16 numbers has a product of rank 16."""
    given = prompts(40, 40)
    full = complete("full", given, 30, model)
    off = []
    for rank in (0, 2, 6, 16):
        run = complete(f"gear:bits=2,group=16,residual=16,rank={rank}", given, 30, model)
        off.append(float((logits(run) - logits(full))[:, 1].abs().mean()))
    assert off == sorted(off, reverse=True) and off[2] < off[0] / 1.5
    assert_same_run(run, full, tolerance=1e-3)


def test_mikv_pushes_down_what_was_given_least(monkeypatch: Any) -> None:
    pushed: list[int] = []
    push = Mikv._push_down

    def spy(self: Mikv, high: int, low: int) -> Tensor:
        before = [set(row.tolist()) for row in self.high.tokens[0, :, :high]]
        rows = push(self, high, low)
        for head, tokens in enumerate(before):
            gone = int(self.low.tokens[0, head, low])
            sums = self.sums[0].view(self.room.heads, -1, self.sums.shape[-1])[head].sum(0)
            assert gone in tokens and sums[gone] == min(sums[token] for token in tokens)
            pushed.append(gone)
        return rows

    monkeypatch.setattr(Mikv, "_push_down", spy)
    complete("mikv:salient=0.5,group=8", prompts(30), 21)
    assert len(pushed) == 3 * 2 * 10  # layers, KV heads, every other step


def test_mikv_is_closer_to_full_the_wider_it_is() -> None:
    given = prompts(40, 40)
    full = logits(complete("full", given, 2))
    texts = ("high=4,low=1", "high=8,low=2", "high=8,low=8", "high=16,low=8,salient=0.9")
    runs = [complete(f"mikv:group=8,{text}", given, 2) for text in texts]
    off = [float((logits(run) - full)[:, 1].abs().mean()) for run in runs]
    assert off == sorted(off, reverse=True) and off[-1] < 0.01


@pytest.mark.parametrize(
    "text",
    [
        "mikv:high=16,low=16",
        "kivi:residual=40,group=32",
        "kivi:bits=16",
        "kivi:group=128,residual=128",
        "specache:residual=0",
        "zipcache:high=16",
        "quantspec:group=16,residual=40",
        "quantspec:group=16,residual=33",
        "magicdec:budget=4",
        "magicdec:draft=snapkv,budget=32",
    ],
)
def test_settings_that_cannot_run_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match=r"choose|expected") as caught:
        Generation(decoder("llama"), parse(text), prompts(5), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["kivi", "specache", "zipcache", "quantspec", "mikv", "gear"])
def test_sliding_windows_are_refused(name: str) -> None:
    text = {"zipcache": name, "mikv": "mikv:group=16"}.get(name) or f"{name}:group=16,residual=32"
    with pytest.raises(InputError, match="sliding windows"):
        Generation(decoder("mistral"), parse(text), prompts(5), 2)
