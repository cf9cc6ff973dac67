"""Single statements of techniques, each by hand at a point where nothing else hides it."""

from dataclasses import replace

import pytest

from kvsim.graph import Point
from kvsim.prediction.memory import prefill_point
from kvsim.techniques import parse, technique
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.axes.drafting import SINK
from kvsim.techniques.papers.shadowkv import Landmarks
from tests.support.arithmetic import B, decoding, deployment, last_layer, moved, number


@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_several_new_tokens_see_what_snapkv_kept_and_each_other(new: int) -> None:
    """500 of 2,000 prompt tokens are kept; the i-th new token sees them and the i before it."""
    d = deployment("llama2-7b")
    step = parse("snapkv:budget=500").forward(d, decoding(2000, new, 2000, 2100))
    layer = {op.name: op for op in step.groups[-1].layers[-1]}
    pairs = sum(500 + i + 1 for i in range(new))
    assert number(layer["attn"].flops) == 4 * B * d.model.heads * d.model.head_dim * pairs


@pytest.mark.parametrize(("passes", "copies"), [(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1)])
def test_concatenating_holds_the_grown_copy_of_a_layer(passes: float, copies: int) -> None:
    """torch.cat reads and writes the cache, two passes; a caller that keeps the old one has both.

    Repeated heads make the copies of one layer the largest thing in the workspace.
    """
    d = deployment("llama3-8b")

    def workspace(append: float, keeps_old: bool = False, cut: str = "full") -> float:
        cache = replace(d.stack.cache, append_passes=append, keeps_old=keeps_old)
        attention = replace(d.stack.attention, repeat_kv=True)
        grown = replace(d, stack=replace(d.stack, cache=cache, attention=attention))
        buffers = parse(cut).resident(grown, decoding(50000, 1, 50000, 50100))
        return number(buffers["gpu"]["workspace"])

    layer = 2 * B * 50001 * d.model.kv_width
    assert workspace(passes) - workspace(0.0) == pytest.approx(copies * layer, rel=1e-12)
    assert workspace(passes, keeps_old=True) == workspace(0.0)
    evicted = workspace(passes, cut="r-kv:kept=20000,buffer=128")
    assert evicted == pytest.approx(workspace(passes) * 20128 / 50001, rel=0.02)


@pytest.mark.parametrize(
    ("text", "one_pass"),
    [("full", True), ("place:parts=2", False), ("place:parts=1", True), ("fastdecode", False),
     ("place:host_share=0.5", False), ("place:values_host=1", True)],
)  # fmt: skip
def test_a_prompt_joins_a_round_where_nothing_is_streamed(text: str, one_pass: bool) -> None:
    """Columns of a batch are passes of their own, even with everything on the GPU."""
    assert parse(text).mixes is one_pass


def test_a_low_rank_cache_reads_its_prompt_with_whole_keys() -> None:
    """One layer's fp16 keys of all prompt tokens, until they are factored."""
    d = deployment("llama3-8b")
    t = parse("lowrank:rank=64")
    reading = t.resident(d, prefill_point(B, 1000, 10))["gpu"]["prompt keys"]
    assert number(reading) == 2 * d.model.kv_heads * d.model.head_dim * B * 1000
    assert number(t.resident(d, decoding(1000, 1, 1000, 1010))["gpu"]["prompt keys"]) == 0


@pytest.mark.parametrize(("prompt", "pages"), [(64, 8), (65, 9), (1, 1), (8, 1)])
def test_a_prompt_has_a_landmark_for_each_chunk_that_it_begins(prompt: int, pages: int) -> None:
    d, selection = deployment("llama3-8b"), Landmarks(chunk=8)
    p = Point(B, float(prompt), 1.0, float(prompt), prompt + 9.0)
    at = LayerPass(d, p, d.shard.layout[0][0][0], parse("full").parts[0])
    assert number(selection.pages(at)) == pages


def test_a_technique_forgets_what_it_knew_of_a_deployment_once_it_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(technique, "MAX_CACHED", 2)
    t, d, asked = parse("full"), deployment("llama2-7b"), []

    def ask(what: str) -> str:
        return t.cached(d, what, lambda: asked.append(what) or what)  # type: ignore[func-returns-value]

    assert [ask(what) for what in "abab"] == [*"abab"]
    assert asked == [*"ab"]
    assert [ask(what) for what in "cac"] == [*"cac"]
    assert asked == [*"abca"]


@pytest.mark.parametrize(("blocks", "scored"), [(0, 0), (3, 0), (4, 0), (5, 5), (9, 9)])
def test_infllm_scores_blocks_once_there_are_more_than_it_attends_to(
    blocks: int, scored: int
) -> None:
    """64 first and 256 latest tokens are attended to anyway; blocks of 32 are what is between."""
    text = "infllm:k=4,block=32,local=256,initial=64,representatives=2,cached=4"
    cached = 64 + 256 + 32 * blocks
    d = deployment("llama2-7b")
    layer = last_layer(text, d, decoding(cached - 1, 1, 600, 900))
    assert moved(layer["topk"]) == 4 * B * scored
    assert moved(layer["relevance"]) == 2 * d.model.kv_width / 2 * B * scored * 2
    pairs = number(layer["attn"].flops) / (4 * B * d.model.heads * d.model.head_dim)
    assert pairs == 64 + 32 * min(blocks, 4)  # the local ones are an op of their own


def test_a_streamingllm_draft_keeps_the_sinks_that_streamingllm_keeps() -> None:
    """Four of them: Xiao et al., ICLR 2024, table 2."""
    draft = parse("selfdraft:reads=streamingllm,gamma=3")
    assert draft.drafts == 3 and draft.settings["reads"] == "streamingllm"
    assert parse("streamingllm").settings["sink"] == SINK == 4
