"""Quest, PyramidKV, DuoAttention, ShadowKV, TurboQuant, KVQuant, EAGLE, MTP and draft by hand.

One point: Llama-3-8B (32 query and 8 KV heads of 128, hidden 4096, MLP 14336, 32 layers), four
sequences with 10,000 tokens after the pass, of which 9,000 are the prompt. A token's keys are 1024
numbers, its values too; four sequences' queries 16,384 numbers.
"""

from functools import cache

import pytest

from kvsim.graph import Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.techniques import parse
from tests.support.arithmetic import deployment, moved, number

P = Point(4, 9999, 1.0, 9000, 10100)
KV = 2 * 2048  # fp16 keys and values of a token in one layer [B]
ENDS = 2 * 2 * 16384  # queries and outputs in fp16 [B]
NEW = 4 * KV  # what the pass adds [B]


@cache
def d() -> Deployment:
    return deployment("llama3-8b")


def layer(text: str, index: int = -1) -> dict[str, Op]:
    step = parse(text).cycle(d(), P).steps[-1]
    every = [ops for group in step.groups for ops in group.layers * group.count]
    assert len(every) == 32
    return {op.name: op for op in every[index]}


def held(text: str, tier: str = "gpu") -> dict[str, float]:
    buffers = parse(text).resident(d(), P)
    return {name: number(size) for name, size in buffers[tier].items()}  # type: ignore[index]


def test_quest() -> None:
    """625 pages of 16: two keys bound each. 1,024 tokens are attended to, in 30 layers of 32."""
    ops = layer("quest")
    bounds = 2 * 2 * 1024 * 4 * 625
    assert moved(ops["bounds"]) == bounds + 2 * 16384 + 4 * 4 * 32 * 625  # and the queries
    assert number(ops["bounds"].flops) == 2 * 2 * 16384 * 625
    assert moved(ops["topk"]) == 4 * (4 * 8 * 625)
    assert moved(ops["attn"]) == 4 * 1024 * KV + NEW + ENDS
    assert number(ops["attn"].flops) == 2 * 16384 * (1024 + 1024)
    updated = 2 * 2 * 1024 * 4  # one page's, read and written
    assert moved(ops["page_bounds"]) == 4 * 2 * 1024 + 2 * updated
    dense = layer("quest", 1)
    assert "bounds" not in dense
    assert moved(dense["attn"]) == 4 * 10000 * KV + NEW + ENDS
    memory = held("quest")
    assert memory["page bounds"] == 30 * bounds
    assert memory["kv"] == 32 * 4 * 10000 * KV


def test_pyramidkv() -> None:
    """From 2 x 1024 - 51.2 down to 1024 / 20 = 51.2, whole tokens; 1,000 generated ones stay."""
    first, last = 1997 + 1000, 51 + 1000
    for index, kept in ((0, first), (-1, last)):
        ops = layer("pyramidkv", index)
        assert moved(ops["attn"]) == 4 * kept * KV + NEW + ENDS
        assert number(ops["attn"].flops) == 2 * 16384 * 2 * kept
    budgets = [round(1996.8 - i / 31 * (1996.8 - 51.2)) for i in range(32)]
    assert held("pyramidkv")["kv"] == 4 * KV * (sum(budgets) + 32 * 1000)
    assert sum(budgets) / 32 == pytest.approx(1024, abs=0.5)


def test_duoattention() -> None:
    """Half of the heads keep 10,000 tokens, half 64 + 256: 5,160 on average."""
    ops = layer("duoattention")
    assert moved(ops["attn"]) == 4 * 5160 * KV + NEW + ENDS
    assert number(ops["attn"].flops) == 2 * 16384 * 2 * 5160
    assert held("duoattention")["kv"] == 32 * 4 * 5160 * KV


def test_shadowkv() -> None:
    """The prompt's 1,125 chunks of 8 by their means; 1,024 tokens' keys are products of rank 160.

    Attended to are these, 384 tokens of 48 outlier chunks and 1,000 generated ones, which stay on
    the GPU; the values of the 1,024 are fetched, chunk by chunk and KV head.
    """
    ops = layer("shadowkv")
    assert number(ops["landmarks"].flops) == 2 * 16384 * 1125
    assert moved(ops["landmarks"]) == 2 * 1024 * 4 * 1125 + 4 * 4 * 32 * 1125 + ENDS / 2
    assert moved(ops["fetch"], "h2d") == 4 * 1024 * 2 * 1024
    assert number(ops["fetch"].rows) == 4 * 8 * 1024 / 8
    keys = 4 * 8 * 1024
    assert number(ops["restore_keys"].flops) == 2 * keys * 160 * 128
    assert moved(ops["restore_keys"]) == 2 * keys * (160 + 128) + 2 * 160 * 1024 * 4
    assert number(ops["attn"].flops) == 2 * 16384 * 2 * (1024 + 384 + 1000)
    memory = held("shadowkv")
    assert memory["landmarks"] == 32 * 2 * 1024 * 4 * 1125
    assert memory["outlier chunks"] == 32 * 4 * (384 * KV + 48 * 8 * 4)
    factors = 2 * 160 * (9000 + 1024) * 4
    assert memory["kv"] == 32 * (factors + 2 * 1024 * 4 * 1000)
    assert memory["generated values"] == 32 * 2 * 1024 * 4 * 1000
    assert held("shadowkv", "host")["kv"] == 32 * 2 * 1024 * 4 * 10000


def test_turboquant() -> None:
    """Three bits and a 16-bit norm per 128 numbers: 3.125 bits. Rotations are 128 x 128."""
    each = 3.125 / 8
    ops = layer("turboquant:bits=3")
    assert moved(ops["attn"]) == 4 * 10000 * 2048 * each + NEW + ENDS
    turned = 16384 + 4 * 2048
    assert number(ops["rotate"].flops) == 2 * 128 * turned
    assert moved(ops["rotate"]) == 2 * 2 * turned + 2 * 128 * 128
    assert number(ops["rotate_back"].flops) == 2 * 128 * 16384
    assert moved(ops["quantise"]) == 4 * 2048 * (2 + each)
    assert held("turboquant:bits=3")["kv"] == 32 * 4 * 10000 * 2048 * each


def test_kvquant() -> None:
    """Half a byte per number, four for each of 1 % of them, and four per token."""
    beside = 0.01 * 2048 * 4 + 4
    ops = layer("kvquant")
    expected = 4 * 10000 * (2048 / 2 + beside) + NEW + ENDS
    assert moved(ops["attn"]) == pytest.approx(expected, rel=1e-12)
    assert moved(ops["outliers"]) == pytest.approx(4 * (2 * 2048 + beside), rel=1e-12)
    memory = held("kvquant")
    assert memory["kv"] == pytest.approx(32 * 4 * 10000 * 1024, rel=1e-12)
    assert memory["outliers"] == pytest.approx(32 * 4 * 10000 * beside, rel=1e-12)


LAYER = 4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("text", "drafts", "inputs", "vocabulary", "own_head", "tokens"),
    [
        ("eagle:gamma=4,acceptance=0.7", 4, 5, 32000, True, 1 + 4 * 0.7),
        ("eagle:gamma=2,acceptance=0.8/0.6", 2, 5, 32000, True, 1 + 0.8 + 0.6),
        ("mtp", 1, 2, 128256, False, 1.875),
    ],
)
def test_draft_heads(
    text: str, drafts: int, inputs: int, vocabulary: int, own_head: bool, tokens: float
) -> None:
    """A layer of the model behind a product that joins its inputs, and logits of a vocabulary."""
    t = parse(text)
    round_ = t.cycle(d(), P)
    assert round_.tokens == pytest.approx(tokens) and len(round_.steps) == drafts + 1
    for i, step in enumerate(round_.steps[:-1]):
        ops = {op.name: op for op in (*step.groups[0].layers[0], *step.head)}
        new = 1 if i else tokens  # the first pass reads what the round before has settled
        products = [number(op.flops) for name, op in ops.items() if name.endswith(("puts", "tes"))]
        assert sum(products) == pytest.approx(2 * 4 * new * (2 if i else inputs) * 4096 * 4096)
        assert number(ops["draft_head"].flops) == 2 * 4 * 4096 * vocabulary
        assert moved(ops["attn"]) == pytest.approx(4 * (9999 + i) * KV + new * (NEW + ENDS))
    (verified,) = {
        number(op.size) for op in round_.steps[-1].groups[0].layers[0] if op.name == "attn"
    }
    assert verified == drafts + 1
    memory = held(text)
    head = 4096 * vocabulary if own_head else 0
    assert memory["draft weights"] == 2 * (LAYER + inputs * 4096 * 4096 + head)
    assert memory["draft kv"] == 4 * (10000 + drafts) * KV


def test_a_draft_model() -> None:
    """Llama-3.2-1B: 16 layers, hidden 2048, 8 KV heads of 64, MLP 8192, a tied embedding."""
    text = "draft:model=llama3.2-1b,gamma=4,acceptance=0.7"
    round_ = parse(text).cycle(d(), P)
    assert len(round_.steps) == 5 and round_.tokens == pytest.approx(3.8)
    first = round_.steps[0]
    assert sum(group.count * len(group.layers) for group in first.groups) == 16
    ops = {op.name: op for op in (*first.groups[0].layers[0], *first.head)}
    assert number(ops["lm_head"].flops) == 2 * 4 * 2048 * 128256
    assert moved(ops["attn"]) == 4 * 10001 * 2 * 1024 + 2 * 2 * 4 * 2048
    memory = held(text)
    assert memory["draft kv"] == 16 * 4 * (10000 + 4) * 2 * 1024
    each = 2048 * (2048 + 1024) + 2048 * 2048 + 3 * 2048 * 8192
    assert memory["draft weights"] == 16 * 2 * each
    assert memory["draft embedding"] == 2 * 2048 * 128256


def test_dms_and_medusa_memories() -> None:
    """All of the latest 256 and an eighth of 9,744 others; five residual products and heads."""
    assert held("dms")["kv"] == 32 * 4 * (256 + 9744 / 8) * KV
    assert held("medusa")["draft weights"] == 5 * 2 * 4096 * (4096 + 128256)


@pytest.mark.parametrize(
    ("text", "name", "read", "scores"),
    [
        # keys and queries in fp16, and a number per block
        ("xattention:block=128,stride=8", "antidiagonals", (1024 + 4096) * 8192, 32 * 64 * 64 / 2),
        # twice the keys, for the last block's queries and for means; fp32 scores, twice
        (
            "flexprefill:block=128", "last_block", 2 * 1024 * 8192 + 4096 * (128 + 8192),
            4 * 32 * (128 * 8192 + 64 * 64) / 2,
        ),
    ],
)  # fmt: skip
def test_estimates_of_a_prompt(text: str, name: str, read: float, scores: float) -> None:
    step = parse(text).cycle(d(), Point(2, 0, 8192, 8192, 8300, prefill=True)).steps[-1]
    ops = {op.name: op for group in step.groups for layer in group.layers for op in layer}
    assert moved(ops[name]) == 2 * 2 * (read + 2 * scores)
