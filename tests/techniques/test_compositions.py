"""Compositions: pairs of axes, layers, limits, and the notation with its errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compositions import document
from kvsim.engine.timeline import makespan, steady_seconds
from kvsim.errors import InputError
from kvsim.graph import Number
from kvsim.machines.profiles import load_hardware, with_numbers
from kvsim.prediction.generate import Prediction
from kvsim.techniques import TECHNIQUES, parse, parse_several
from tests.support.pairs import MODELS, check, deployment, pairs, passes, point
from tests.support.shipped import SHIPPED
from tests.support.steps import BATCH, CONTEXT

EVERY = pairs()
SAMPLED = [(text, kind) for i, kind in enumerate(MODELS) for text in EVERY[i::23]]


@pytest.mark.parametrize(("text", "kind"), SAMPLED)
def test_pairs_keep_every_promise_or_say_why_not(text: str, kind: str) -> None:
    """All of them on all models: benchmarks/compositions.py."""
    check(text, kind)


def same(one: str, other: str, kind: str = "GQA", exactly: bool = True) -> None:
    d, p = deployment(kind), point(BATCH, CONTEXT)
    a, b = parse(one), parse(other)
    for x, y in zip(passes(a, d, p), passes(b, d, p), strict=True):
        for time in (makespan, steady_seconds):
            assert_equal(time(x, d), time(y, d), exactly)
    for q in (p, point(32.0, 5000.0)):
        total = [
            sum(
                np.asarray(size).sum()
                for tier in t.resident(d, q).values()
                for size in tier.values()
            )
            for t in (a, b)
        ]
        assert_equal(total[0], total[1], exactly)


def assert_equal(one: Number, other: Number, exactly: bool) -> None:
    if exactly:
        assert np.array_equal(one, other)
    else:
        assert np.allclose(one, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("limit", "plain"),
    [
        ("bits=16", "full"),
        ("grouped:bits=16,value_bits=16", "full"),
        ("turboquant:bits=16", "full"),
        ("place:host_share=0", "full"),
        ("offload:host_share=0", "full"),
        ("selfdraft:gamma=0", "full"),
        ("draft:gamma=0", "full"),
        ("mtp:gamma=0", "full"),
        ("quest:dense=1000", "full"),
        ("place:host_share=1", "offload"),
        ("place:host_share=1,split=auto", "kvpr"),
        ("place:cpu_share=1,parts=2", "fastdecode"),
        ("place:host_share=1,weights_host=1,parts=8", "flexgen"),
        ("0-1: kivi; 2-: kivi", "kivi"),
        ("0-1: kivi; 2-: kivi; draft:gamma=0", "kivi"),
        ("kvpr:split=0", "offload"),
    ],
)
def test_degenerate_limits_are_exact(limit: str, plain: str, kind: str) -> None:
    if not parse(plain).refuses(deployment(kind)):
        same(limit, plain, kind)


def test_the_same_terms_in_any_order_are_the_same() -> None:
    same(
        "snapkv + kivi:bits=4 + offload:host_share=0.5",
        "offload:host_share=0.5 + kivi:bits=4 + snapkv",
    )


def test_keys_and_values_have_bits_of_their_own() -> None:
    d, p = deployment("MHA"), point(8.0, 4000.0)

    def kv(text: str) -> float:
        return float(np.ravel(parse(text).resident(d, p)["gpu"]["kv"])[0])

    assert kv("grouped:bits=4,value_bits=8") == pytest.approx((kv("bits=4") + kv("bits=8")) / 2)
    assert kv("grouped:bits=16,value_bits=4") == pytest.approx((kv("full") + kv("bits=4")) / 2)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (12, 6), (16, 8), (7, 7), (11, 1)])
def test_columns_take_as_many_parts_as_divide_the_batch(batch: int, parts: int) -> None:
    d = deployment("MHA")
    found = Prediction(parse("flexgen"), d, np.array([float(batch)]), 500, 4)
    assert found.technique.tiles() == parts
    explicit = Prediction(parse(f"flexgen:parts={parts}"), d, np.array([float(batch)]), 500, 4)
    assert np.array_equal(found.tpot_s, explicit.tpot_s)
    with pytest.raises(InputError, match="does not divide into 8 parts"):
        Prediction(parse("flexgen"), d, np.array([8.0, 9.0]), 500, 4)


def test_unpacking_is_arithmetic_per_number() -> None:
    """A plain kernel's work does not grow with queries per KV head, and packing can cost time."""
    d, p = deployment("GQA"), point(32.0, 30000.0)
    plain = replace(d, stack=with_numbers(d.stack, {"packed_cache.unpack_ops": 60.0}))
    full, kivi = parse("full"), parse("kivi:bits=4")
    tuned = float(np.ravel(steady_seconds(kivi.cycle(d, p).steps[0], d))[0])
    slow = float(np.ravel(steady_seconds(kivi.cycle(plain, p).steps[0], plain))[0])
    whole = float(np.ravel(steady_seconds(full.cycle(plain, p).steps[0], plain))[0])
    assert tuned < whole < slow
    (op,) = (x for x in kivi.attend(plain, p, d.shard.layout[0][0][0]) if x.name == "attn")
    assert float(np.ravel(op.unpacked)[0]) <= 32 * 30001 * d.shard.kv_width
    assert "unpacks in registers" in kivi.notes(d, p)[0]


def test_the_prompts_scores_are_resident_where_h2o_ranks_them() -> None:
    d = deployment("MHA")
    p = point(8.0, 0.0)
    prompt = replace(p, context=0.0, new=4000.0, prompt=4000.0, max_length=4100.0, prefill=True)
    held = parse("h2o").resident(d, prompt)["gpu"]["score matrix"]
    alive = min(8 * 4000, d.stack.memory.prefill_chunk)
    assert float(np.ravel(held)[0]) == 2 * 32 * alive * 4000
    assert (
        float(np.ravel(parse("h2o:heavy=9e6").resident(d, prompt)["gpu"]["score matrix"])[0]) == 0
    )


def test_fp8_is_storage_alone_on_ampere() -> None:
    for gpu, refused in (("a6000", False), ("a100-40g", False), ("t4", True), ("h100", False)):
        d = replace(deployment("MHA"), hardware=load_hardware(gpu))
        assert bool(parse("fp8").refuses(d)) is refused


def test_acceptance_by_position_gives_tokens_per_round() -> None:
    assert parse("selfdraft:gamma=3,acceptance=0.8/0.6/0.4").tokens_per_round == pytest.approx(2.8)
    assert parse("selfdraft:gamma=2,acceptance=0.7").tokens_per_round == pytest.approx(2.4)
    assert parse("selfdraft:gamma=2,acceptance=0.7").pass_width == 3
    assert parse("specache").pass_width == 2


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_called_as_it_is_written(name: str) -> None:
    assert parse(name).name == name


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:budget=1024 + kivi:bits=4 + offload:host_share=0.5",
        "0-1: full; 2-31: kcache:n=64 + bits=4",
        "fp8 + draft:model=llama3.2-1b,gamma=4,acceptance=0.7",
        "0-1:full;2-:kivi;mtp",
    ],
)
def test_notation_is_read_back(text: str) -> None:
    t = parse(text)
    assert parse(str(t)) == t
    assert parse_several(f"full, {text}, h2o")[1] == t


BAD = {
    "": (1, "unknown technique ''"),
    "+": (1, "nothing between"),
    "kivi +": (7, "nothing between"),
    "kvi": (1, "kivi"),
    "snapkv + kvi": (10, "kivi"),
    "snapkv:budget=1024 + kivi:bitz=4": (27, "bits"),
    "snapkv:budgt=4": (8, "budget"),
    "kivi:bits=3": (6, "1, 2, 4, 8 or 16"),
    "kivi:group=64,bits=3": (15, "1, 2, 4, 8 or 16"),
    "kivi:bits=": (6, "key=value"),
    "kivi:=4": (6, "unknown parameter"),
    "kivi:bits=4,,group=32": (13, "key=value"),
    "kivi:bits=4,bits=2": (13, "given twice"),
    "kivi:residual=-1": (6, "from 0"),
    "kivi:residual=0.5": (6, "whole number"),
    "kivi:residual=1e99": (6, "from 0"),
    "h2o:heavy=x": (5, "0 to 1e+07"),
    "offload:host_share=1.5": (9, "from 0 to 1"),
    "offload:schedule=diagonal": (9, "row or column"),
    "bits=5": (1, "1, 2, 3, 4, 8 or 16"),
    "kivi + bitz=4": (8, "bits"),
    "host_shar=0.5": (1, "host_share"),
    "kivi + h2o + snapkv": (14, "h2o and snapkv"),
    "kivi + bits=4": (8, "kivi and grouped"),
    "quantspec + magicdec": (13, "quantspec and magicdec"),
    "full + fulll": (8, "full"),
    "0-1 full": (1, "unknown technique"),
    "0-1: full": (0, ""),
    "0-1:": (5, "no technique after the layers"),
    "0-1: ; 2-: kivi": (5, "no technique after the layers"),
    "1-0: full": (1, "end before they begin"),
    "1-: full": (1, "layers 0 to 0"),
    "0-1: full; 3-: kivi": (12, "layers 2 to 2"),
    "0-5: full; 5-: kivi": (12, "also in"),
    "0-: full; 5-: kivi": (11, "also in"),
    "0-1: full; 2-: kvi": (16, "kivi"),
    "0-1: full; kivi": (12, "only contain drafting"),
    "0-1: full; 2-: kivi + mtp": (12, "whole model"),
    "0-1: quantspec; 2-: full": (1, "whole model"),
    "0-99999999: full": (1, "beyond"),
    "0-1: full;; 2-: kivi": (11, "unknown technique ''"),
    "draft:model=llama9": (1, "llama"),
    "draft:weights=fp5": (7, "fp16"),
    "draft:tp=3": (7, "1"),
    "draft:acceptance=1.5": (7, "from 0 to 1"),
    "draft:acceptance=0.5/0.9": (7, "never rise"),
    "mtp:gamma=33": (5, "from 0 to 32"),
    "selfdraft:reads=nothing": (11, "upper"),
    "selfdraft:gamma=3,acceptance=0.8/0.6": (1, "positions"),
    "selfdraft:reads=all,weight_bits=4": (1, "set acceptance"),
    "quest:budget=0": (7, "from 1"),
    "plan.json": (0, "no such file"),
    "x" * 30_000: (0, "at most 20000"),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_notation_is_one_line_with_its_column(text: str) -> None:
    column, words = BAD[text]
    if text == "0-1: full":
        assert "the model has 32" in parse(text).refuses(deployment("MHA"))
        return
    with pytest.raises(InputError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message and words in message, message
    assert not column or message.endswith(f"(column {column})"), message


def test_the_page_of_techniques_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "techniques.md"
    renew = "renew it: python -m benchmarks.compositions --docs"
    written = page.read_text(encoding="utf-8")
    names, _, _ = written.partition("## Pairs")
    named = re.findall(r"^\| `([a-z0-9-]+)` \|", names, re.MULTILINE)
    assert set(named) >= SHIPPED
    assert written == document(named), renew


def test_a_plan_stands_for_what_it_chose(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    entry = {"technique": "kivi", "params": {"bits": 4}, "first": 0, "count": 32}
    path.write_text(json.dumps({"choice": {"layers": [entry]}}))
    assert parse(str(path)) == parse("kivi:bits=4")
    mixed = [entry | {"count": 8}, {"technique": "full", "params": {}, "first": 8, "count": 24}]
    path.write_text(json.dumps({"choice": {"layers": mixed}}))
    assert parse(str(path)) == parse("0-7: kivi:bits=4; 8-31: full")
    for content in ("[]", "{}", "{", '{"choice": {"layers": [{}]}}', '{"choice": {"layers": []}}'):
        path.write_text(content)
        with pytest.raises(InputError, match=r"plan\.json"):
            parse(str(path))
