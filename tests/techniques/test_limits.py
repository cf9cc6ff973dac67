"""Settings at which one technique must turn into another, exactly."""

from dataclasses import replace

import numpy as np
import pytest

from kvsim.engine import attention
from kvsim.engine import ops as blocks
from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.graph import Number, Op, Point
from kvsim.machines.profiles import load_stack
from kvsim.models.model import LayerShape
from kvsim.prediction.generate import round_seconds
from kvsim.techniques import compose, parse
from kvsim.techniques.axes.base import LayerPass, Storage
from kvsim.techniques.papers.kivi import Kivi
from tests.support.steps import (
    AS_STATED,
    BATCH,
    CLEAN,
    CONTEXT,
    DECODE,
    PHASES,
    assert_same_memory,
    assert_same_time,
    deployment,
    moving,
    step_of,
    total,
)

# An engine whose plain attention alone makes further passes is slower without InfLLM than with, and
# engines that are known by their operators tell one kernel for all tokens from InfLLM's two.
SAME_ATTENTION = [
    name
    for name in AS_STATED
    if load_stack(name).packed_cache.plain_passes == load_stack(name).kernel("attention").split == 0
]
COLUMNS = "schedule=column,parts=4,bits=8"
PACKED, WIDER = "bits=2,group=64,residual=64", "bits=4,group=64,residual=128"
LIMITS: list[tuple[str, str, list[str], str]] = [
    ("kvpr:split=0", "offload:host_share=1", [*CLEAN], ""),
    ("kvpr:split=0,bits=4", "offload:host_share=1,bits=4", [*CLEAN], ""),
    (f"kvpr:split=0,{COLUMNS}", f"offload:host_share=1,{COLUMNS}", [*CLEAN], ""),
    ("offload:host_share=0", "full", AS_STATED, ""),
    ("flexgen:weights_gpu=100,cache_gpu=100,parts=1", "full", AS_STATED, ""),
    ("infllm:local=30050", "full", SAME_ATTENTION, ""),
    (f"gear:{PACKED},rank=0,outliers=0", f"kivi:{PACKED}", AS_STATED, ""),
    (f"gear:{WIDER},rank=0,outliers=0", f"kivi:{WIDER}", AS_STATED, ""),
    ("zipcache:salient=1,high=16", "full", [*CLEAN], "probe saliency"),
    ("mikv:salient=1,high=16", "full", [*CLEAN], "scores lowest|rank"),
    ("h2o:heavy=20000,recent=10050", "full", [*CLEAN], ""),
    ("snapkv:budget=30050", "full", [*CLEAN], ""),
    ("streamingllm:sink=50,recent=30000", "full", [*CLEAN], ""),
]
"""A setting, what it must be, on which stacks, and ops that it has besides.

Budgets are the longest generation's 30050 tokens.
"""
RANKED = ("mikv", "h2o", "snapkv", "streamingllm")  # prompts hold scores, or one layer apart


@pytest.mark.parametrize(
    ("text", "other", "stack", "besides"),
    [(text, other, stack, ops) for text, other, stacks, ops in LIMITS for stack in stacks],
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_limit_is_another_technique(
    text: str, other: str, stack: str, besides: str, phase: str
) -> None:
    p, t, plain = PHASES[phase], parse(text), parse(other)
    for model in ("llama2-7b", "llama3-8b", "gemma-2-2b", "deepseek-v2-lite", "mixtral-8x7b"):
        d = deployment(model, stack)
        step = step_of(t, d, p)
        for name in besides.split():
            assert (total(step, d, *name.split("|")) > 0).all(), name
        more = total(step, d, *besides.replace("|", " ").split())
        assert_same_time(step, step_of(plain, d, p), d, more)
        if not (p.prefill and t.name in RANKED):
            assert_same_memory(t, plain, d, p, but="scores" if t.name == "mikv" else "")


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "falcon-7b", "gemma-2-2b"])
def test_kcache_that_fetches_nothing_is_full_and_its_selection(
    model: str, phase: str, stack: str
) -> None:
    """And reads the weights of the chosen values, which a fused kernel has on chip."""
    d, p = deployment(model, stack), PHASES[phase]
    kcache, full = parse("kcache:n=100000,gpu_layers=1000"), parse("full")

    def weights(shape: LayerShape) -> Number:
        return 0.0 if p.prefill else 2 * BATCH * d.model.heads * attention.cached(d, p, shape)

    step = step_of(kcache, d, p)
    selection = total(step, d, "topk")
    assert (selection > 0).all() != p.prefill
    assert_same_time(step, moving(step_of(full, d, p), d, weights), d, selection)
    assert_same_memory(kcache, full, d, p, but="value buffers")


@frozen
class LateKivi(Kivi):
    """KIVI that packs after attention, as SpeCache's algorithm 3 does; KIVI packs before."""

    @property
    def stored(self) -> Format:
        return replace(super().stored, late=True)


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "gemma-2-2b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("bits", "residual"), [(2, 64), (1, 0), (4, 128)])
def test_specache_without_pairs_is_kivi_at_two_new_tokens(
    bits: int, residual: int, model: str, stack: str
) -> None:
    """But the speculative token's keys and values are dropped, so one of the two is packed.

    Both new tokens attend in fp16 (algorithm 3) and take room of their own while they do.
    """
    d, one = deployment(model, stack), replace(DECODE, new=1.0)
    specache = parse(f"specache:bits={bits},group=64,k=0,residual={residual}")
    kivi = compose(LateKivi(bits, 64, residual))
    kivi_step = kivi.forward(d, replace(one, new=2.0))
    packs_one = total(kivi.forward(d, one), d, "quantise")
    dropped = packs_one - total(kivi_step, d, "quantise")
    assert_same_time(step_of(specache, d, one), kivi_step, d, dropped)
    assert_same_memory(specache, kivi, d, one, but="new tokens")


@frozen
class Int8Cache(Storage):
    """An 8-bit cache in groups of 128, packed in halves of 256 tokens."""

    name = "int8"

    @property
    def stored(self) -> Format:
        return Format(8, 128, k_tail=128, v_tail=128, k_block=128, v_block=128)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Half of the buffer is packed at once, every 128 steps."""
        return blocks.quantise(at.d, at.p.tokens, self.stored, every=128.0)


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_quantspec_without_drafts_is_an_int8_cache(model: str, stack: str) -> None:
    d, quantspec, plain = deployment(model, stack), parse("quantspec:gamma=0"), compose(Int8Cache())
    assert quantspec.cycle(d, DECODE).tokens == 1
    assert_same_time(step_of(quantspec, d, DECODE), step_of(plain, d, DECODE), d)
    assert_same_memory(quantspec, plain, d, DECODE)


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("draft", ["streamingllm", "snapkv"])
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b", "gemma-2-2b", "deepseek-v2-lite"])
def test_magicdec_with_the_whole_cache_drafts_like_full(model: str, draft: str, stack: str) -> None:
    d, full = deployment(model, stack), parse("full")
    t = parse(f"magicdec:budget=40000,gamma=3,draft={draft}")
    *drafts, verify = t.cycle(d, DECODE).steps
    assert len(drafts) == 3
    for i, step in enumerate(drafts):
        later = replace(DECODE, context=CONTEXT + i)
        assert_same_time(step, step_of(full, d, later), d)
    added = blocks.kv_bytes(d.model, 4 * BATCH)  # verification writes them into both caches
    whole = full.forward(d, replace(DECODE, new=4.0))
    assert_same_time(verify, moving(whole, d, lambda shape: added), d)
    alone = parse("magicdec:gamma=0")
    assert_same_time(step_of(alone, d, DECODE), step_of(full, d, DECODE), d)
    assert_same_memory(alone, full, d, DECODE)


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize("gpu", ["a6000", "rtx5000", "h100"])
@pytest.mark.parametrize("model", ["llama2-7b", "opt-6.7b", "opt-1.3b"])
@pytest.mark.parametrize("settings", ["", ",schedule=column", ",bits=4"])
def test_kvpr_balances_as_well_as_any_split(
    settings: str, model: str, gpu: str, stack: str
) -> None:
    """Within 1 % of the best of 33 splits."""
    d = deployment(model, stack, gpu)
    batch, context = np.array([[8.0], [64.0]]), np.array([[256.0, 1024.0, 8192.0]])
    p = Point(batch, context, 1.0, context, context + 1)
    auto = round_seconds(parse(f"kvpr:split=auto{settings}"), d, p)
    splits = np.floor(context * np.linspace(0, 1, 33)[:, None, None])
    fixed = round_seconds(parse(f"kvpr:split=0{settings}").changed(split=splits), d, p)
    assert np.shape(fixed) == (33, 2, 3)
    assert (auto <= 1.01 * np.min(fixed, axis=0)).all()


@pytest.mark.parametrize("overlap", [0.0, 0.54, 0.9])
@pytest.mark.parametrize("stack", ["fused", "flexgen", "hf-specache"])
@pytest.mark.parametrize("settings", ["", ",schedule=column", ",bits=4"])
def test_kvpr_finds_the_best_split_where_copies_hold_up_the_gpu(
    settings: str, stack: str, overlap: float
) -> None:
    """Within 0.2 % of the best of 65 splits, by the timeline itself."""
    for model, gpu in (("llama2-7b", "a6000"), ("opt-1.3b", "h100")):
        d = deployment(model, stack, gpu)
        runtime = replace(d.stack.offload, overlap=overlap, split_prompt=0.0)
        d = replace(d, stack=replace(d.stack, offload=runtime))
        batch, context = np.array([[8.0], [64.0]]), np.array([[256.0, 1024.0, 8192.0]])
        p = Point(batch, context, 1.0, context, context + 1)
        auto = round_seconds(parse(f"kvpr:split=auto{settings}"), d, p)
        splits = np.floor(context * np.linspace(0, 1, 65)[:, None, None])
        fixed = round_seconds(parse(f"kvpr:split=0{settings}").changed(split=splits), d, p)
        assert (auto <= 1.002 * np.min(fixed, axis=0)).all()


@pytest.mark.parametrize("stack", CLEAN)
@pytest.mark.parametrize(
    "model", ["llama3-8b", "llama2-70b", "mixtral-8x7b", "falcon-7b", "qwen2.5-0.5b", "gemma-2-2b"]
)
def test_kvpr_recomputes_nothing_for_grouped_queries(model: str, stack: str) -> None:
    """With two query heads per KV head or more, a layer input is no smaller than its KV."""
    d = deployment(model, stack)
    assert d.model.queries_per_kv >= 2
    auto, zero = (parse(f"kvpr:split={split}") for split in ("auto", 0))
    assert_same_time(
        step_of(auto, d, DECODE), step_of(zero, d, DECODE), d, rule=np.testing.assert_equal
    )
    assert (total(step_of(auto, d, DECODE), d, "recompute", "load_inputs") == 0).all()
    (note,) = auto.notes(d, DECODE)
    assert f"{d.model.queries_per_kv} query heads per KV head" in note
