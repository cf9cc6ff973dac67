"""Self-speculation: outputs are the target's, token by token or in distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from kvsim.techniques import parse
from kvsim.validate.parts import drafting
from kvsim.validate.parts.drafting import verify_drawn, verify_likeliest
from kvsim.validate.run import Generation
from kvsim.validate.techniques.ngram import continued
from tests.support.adopted import Adopted
from tests.support.decoders import decoder, prompts
from tests.support.naive_caches import assert_like_naive, naive_packed
from tests.support.runs import assert_same_run
from tests.support.sampled import few

HALF = 16
QUANTSPEC = f"quantspec:group=16,residual={2 * HALF}"


def flushed(cached: int) -> int:
    """Rows that the target has packed: its buffer is flushed by halves."""
    return max(cached // HALF - 1, 0) * HALF


@pytest.mark.parametrize("gamma", few([1, 4, 6], [4]))
def test_quantspec_is_greedy_decoding_of_its_target(gamma: int) -> None:
    run = Generation(
        decoder("llama"), parse(f"{QUANTSPEC},gamma={gamma}"), prompts(70, 70, 70), 80, keep=True
    )
    run.complete()
    adopted = Adopted()
    assert_like_naive(run, naive_packed(run.impl, adopted, flushed, flushed, packs_late=True))
    adopted.assert_few()
    impl: Any = run.impl
    packed = impl.layers[0].kv.packed_keys
    for prompt, cached in zip((70, 33, 5), run.cached, strict=True):
        assert (packed(cached) - packed(prompt)) / HALF >= 3, "three flushes"
    rejected = sum(g + 1 - n for g, ns in zip(impl.drafted, run.yielded, strict=True) for n in ns)
    assert rejected > 10, "rollbacks"


def test_quantspecs_drafts_are_worse_than_its_target() -> None:
    """Or nothing above would be rejected: four bits and packed weights must be in use."""
    run = Generation(decoder("llama"), parse(f"{QUANTSPEC},gamma=1"), prompts(70), 2)
    with torch.inference_mode():
        run.start()
        draft = run.forward(run.last[:, None], "draft")
        target = run.forward(run.last[:, None], "verify")
    assert 0.05 < (draft - target).abs().max() < 10
    wide = Generation(
        decoder("llama"), parse(f"{QUANTSPEC},gamma=1,weight_bits=16"), prompts(70), 2
    )
    with torch.inference_mode():
        wide.start()
        packed_alone = wide.forward(run.last[:, None], "draft")
    assert (packed_alone - target).abs().max() > 1e-3
    assert (packed_alone - draft).abs().max() > 1e-3


def pooled(counts: Tensor, shares: Tensor) -> float:
    """p value of a chi-square test; rare outcomes are one."""
    expected = shares.double() / shares.double().sum() * counts.sum()
    common = expected >= 8
    seen, meant = counts[common].tolist(), expected[common].tolist()
    if not common.all():
        seen.append(int(counts[~common].sum()))
        meant.append(float(expected[~common].sum()))
    return float(chisquare(seen, meant).pvalue)


def drawn(text: str, many: int, generate: int, seed: int) -> Tensor:
    """Tokens of many runs of one prompt, (many, generate)."""
    given = prompts(37) * many
    run = Generation(decoder("llama"), parse(text), given, generate, temperature=0.4, seed=seed)
    return run.complete()


def alike(a: Tensor, b: Tensor) -> float:
    """p value of a chi-square test that two samples of tokens are of one distribution."""
    vocab = decoder("llama").arch.model.vocab
    table = torch.stack([torch.bincount(x, minlength=vocab) for x in (a, b)])
    common = table.sum(0) >= 16
    rare = table[:, ~common].sum(1, keepdim=True)
    held = torch.cat([table[:, common], rare], 1) if rare.sum() else table
    return float(chi2_contingency(held.numpy()).pvalue)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (f"{QUANTSPEC},gamma=2", f"{QUANTSPEC},gamma=0"),
        ("magicdec:draft=streamingllm,budget=8,gamma=2", "full"),
    ],
)
def test_sampled_tokens_are_distributed_as_the_targets_to_the_end(
    text: str, target: str, monkeypatch: Any
) -> None:
    """Behind rejections, rounds that are cut short, and a flush after 48 tokens."""
    many, generate = 1200, 13
    found, meant = drawn(text, many, generate, seed=5), drawn(target, many, generate, seed=6)
    assert min(map(alike, found.T, meant.T)) > 1e-4

    def gullible(drafts: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        _, extra = verify_drawn(drafts, *rest)
        return torch.full_like(extra, drafts.shape[1]), extra

    monkeypatch.setattr(drafting, "verify_drawn", gullible)
    careless = drawn(text, many, generate, seed=5)
    assert min(map(alike, careless.T, meant.T)) < 1e-6, "no power"


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_verification_keeps_the_targets_distribution(gamma: int) -> None:
    generator = torch.Generator().manual_seed(3)
    vocab, batch = 7, 20000
    q = torch.rand(gamma, vocab, generator=generator).square().softmax(-1)
    p = (4 * torch.rand(gamma + 1, vocab, generator=generator)).softmax(-1)
    drafts = torch.zeros(batch, 0, dtype=torch.long)
    if gamma:
        drafts = torch.stack([d.multinomial(batch, True, generator=generator) for d in q], 1)
    many = q.expand(batch, -1, -1), p.expand(batch, -1, -1)
    kept, extra = verify_drawn(drafts, *many, generator)
    given = torch.cat([drafts, extra[:, None]], 1).scatter(1, kept[:, None], extra[:, None])
    for place in range(gamma + 1):
        reached = kept >= place
        counts = torch.bincount(given[reached, place], minlength=vocab)
        assert pooled(counts, p[place]) > 1e-3
        if place < gamma:
            assert pooled(counts, q[place]) < 1e-6
    if gamma:  # a share of min(p, q) is kept
        overlap = float(torch.minimum(p[0], q[0]).sum())
        assert float((kept > 0).float().mean()) == pytest.approx(overlap, abs=0.015)


def test_greedy_verification_by_hand() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 9, 4]])
    kept, extra = verify_likeliest(drafts, target)
    assert kept.tolist() == [3, 0, 1, 2]
    assert extra.tolist() == [4, 9, 9, 9]


MAGICDEC = [
    "draft=streamingllm,budget=20,gamma=3", "draft=snapkv,budget=40,gamma=3",
    "draft=streamingllm,budget=200,gamma=2", "draft=snapkv,budget=200,gamma=1", "gamma=0",
]  # fmt: skip
DRAFTED = few(
    [(s, model) for s in MAGICDEC for model in ("llama", "llama-mha", "opt", "mistral")],
    [*((s, "llama") for s in MAGICDEC), (MAGICDEC[0], "opt"), (MAGICDEC[1], "mistral")],
)


@pytest.mark.parametrize(("settings", "model"), DRAFTED)
def test_magicdec_is_full(settings: str, model: str) -> None:
    given = prompts(90, 90, 90)
    full = Generation(decoder(model), parse("full"), given, 60, keep=True)
    run = Generation(decoder(model), parse(f"magicdec:{settings}"), given, 60, keep=True)
    run.complete(), full.complete()
    assert_same_run(run, full)


def test_a_small_draft_is_mostly_wrong_where_a_large_one_is_right() -> None:
    rates = []
    for budget in (8, 40, 80):
        text = f"magicdec:draft=streamingllm,budget={budget},gamma=2"
        run = Generation(decoder("llama"), parse(text), prompts(90, 90, 90, 90), 40)
        run.complete()
        rates.append(sum(map(sum, run.yielded)) / len(run.yielded) / 4)
    assert rates[0] < rates[2]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([7, 1, 2, 3, 9, 8, 1, 2, 3], [9, 8]),
        ([5, 1, 2, 6, 4, 1, 2, 3, 7, 1, 2], [3, 7]),  # the latest place
        ([4, 1, 2], [2, 2]),  # nowhere
        ([3, 3], [3, 3]),
        ([5], [5, 5]),
    ],
)
def test_drafts_are_what_followed_before(text: list[int], drafts: list[int]) -> None:
    assert continued(np.array(text), 2) == drafts


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    """The tiny model soon repeats itself; then every draft is right."""
    run = Generation(decoder("llama"), parse("ngram:gamma=3,acceptance=0.5"), prompts(20), 80)
    run.complete()
    full = Generation(decoder("llama"), parse("full"), prompts(20), 80).complete().tolist()[0]
    drafted, own, done = [], [*prompts(20)[0]], 1
    for (given,) in run.yielded:
        drafted.append(continued(np.array([*own, *full[:done]]), 3))
        kept = next((i for i in range(3) if [*full[done:], *[-1] * 3][i] != drafted[-1][i]), 3)
        assert given == kept + 1 or done + given >= 80
        done += given
    assert len(drafted) == len(run.yielded)
