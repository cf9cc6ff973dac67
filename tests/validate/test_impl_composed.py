"""Compositions run for real: counted against what they state, lossless ones against full KV."""

from itertools import cycle

import pytest
import torch

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.validate.counts.compare import Line
from kvsim.validate.parts.drafting import PACKED_EARLY
from kvsim.validate.parts.place import SENT_LATE
from kvsim.validate.parts.rows import PACKED_AT_ONCE
from kvsim.validate.run import Generation
from kvsim.validate.techniques.quantspec import BY_HALVES
from kvsim.validate.techniques.turboquant import READ_TWICE
from kvsim.validate.techniques.zipcache import DRAWN_PROBES
from tests.support.decoders import decoder, prompts
from tests.support.runs import assert_same, complete
from tests.support.sampled import few
from tests.validate.test_impl_counts import STACK_WIDE, counted, counted_of, short

BATCH, PROMPT, GENERATE = 2, 31, 9
MODELS = ("llama", "opt")
SNAPKV, STREAMING, H2O = (
    "snapkv:budget=16,window=8",
    "streamingllm:sink=4,recent=12",
    "h2o:heavy=6,recent=8",
)
MAGICDEC, NARROW = (
    "magicdec:draft=snapkv,budget=40,gamma=2",
    "selfdraft:reads=all,weight_bits=4,acceptance=0.5",
)
UPPER = (
    "hierarchical:group=8,residual=32 + selfdraft:reads=upper,weight_bits=16,gamma=2,acceptance=0.5"
)
DUO = "duoattention:retrieval=0.5,sink=4,recent=12"
QUEST = "quest:budget=12,page=4,dense=0"
GROUPED = "grouped:bits=4,group=8"
KIVI = "kivi:bits=2,group=8,residual=8"
SPECACHE = "specache:bits=2,group=8,residual=8,k=6"
PAIRS = [
    f"{SNAPKV} + kivi:bits=4,group=8,residual=8", f"{SNAPKV} + {GROUPED}", f"{SNAPKV} + fp8",
    f"{STREAMING} + {GROUPED}", f"{STREAMING} + fp8",
    f"{H2O} + grouped:bits=8,group=8", f"{H2O} + fp8",
    f"values:n=6 + {GROUPED}", "values:n=6 + fp8",
    f"kcache:n=6 + {GROUPED}", "kcache:n=6 + fp8",
    "grouped:bits=4,value_bits=2,group=8", "grouped:bits=3,group=8",
    f"pyramidkv:budget=16,window=8,beta=4 + {KIVI}",
    f"{QUEST} + {GROUPED}", f"{QUEST} + fp8",
    f"{DUO} + {GROUPED}", f"{DUO} + fp8", f"{DUO} + turboquant:bits=4,group=8",
    f"{SNAPKV} + {UPPER}", f"ngram:gamma=2,acceptance=0.5 + {GROUPED}",
    f"{MAGICDEC} + fp8", f"{MAGICDEC} + {GROUPED}", f"{NARROW} + fp8", f"{SNAPKV} + {NARROW}",
    "offload + fp8", f"offload:host_share=0.5 + {GROUPED}", f"offload + {KIVI}",
    "offload:host_share=0.5 + turboquant:bits=4,group=8", f"{SNAPKV} + offload:host_share=0.5",
    f"{SNAPKV} + {KIVI} + offload:host_share=0.5",
    "place:cpu_share=1",
    f"{SNAPKV} + {KIVI} + place:weights_host=0.5",
    f"{GROUPED} + offload:schedule=column,parts=1",
    f"{SNAPKV} + offload:bits=4", f"{SNAPKV} + {KIVI} + offload:schedule=column,parts=2",
    "flexgen:weights_gpu=50,cache_gpu=50,parts=2 + fp8", f"{QUEST} + place:weights_host=1,parts=2",
    "place:cpu_share=0.5", "place:cpu_share=0.25,host_share=0.5,parts=1",
    f"{SNAPKV} + place:cpu_share=0.5,parts=2", f"{SNAPKV} + fastdecode",
    f"{MAGICDEC} + offload", "ngram:gamma=2,acceptance=0.5 + kvpr:split=10",
    "ngram:gamma=2,acceptance=0.5 + place:weights_host=1,cpu_share=0.5",
    "fp8 + mtp:gamma=2,acceptance=0.5", f"{GROUPED} + mtp:gamma=2,acceptance=0.5",
    f"{SNAPKV} + turboquant:bits=3,group=8", f"{H2O} + turboquant:bits=4,value_bits=2,group=8",
]  # fmt: skip
LAYERED = [
    f"0: full; 1: kcache:n=6 + {GROUPED}",
    "0: kcache:n=4; 1: kcache:n=9",
    f"0: {KIVI}; 1: {SNAPKV} + fp8",
    "0: grouped:bits=8,group=8; 1: grouped:bits=2,group=8",
    f"0: {STREAMING}; 1: {H2O} + fp8",
    f"0: full; 1: {SNAPKV} + {GROUPED}",
    f"0: fp8; 1: values:n=6 + {GROUPED}",
    f"0: turboquant:bits=4,group=8; 1: {QUEST}",
    f"0: offload:host_share=0.5; 1: {KIVI}",
    f"0: full; 1: offload + {SNAPKV}",
    f"0: full; 1: fp8; {MAGICDEC}",
    "0: kvquant:bits=3,outliers=0.125; 1: kvquant:bits=2,outliers=0.0625",
    "0: zipcache:window=4; 1: fp8",
    f"0: {SNAPKV}; 1: zipcache:window=8,low=4",
    f"0: full; 1: {SPECACHE}",
    f"0: {SPECACHE},speculative=false; 1: {GROUPED}",
    "0: fastdecode; 1: offload:host_share=0.5",
    f"0: {SNAPKV} + offload; 1: kvpr:split=10",
    f"0: offload:bits=8; 1: {SNAPKV} + place:parts=2",
    "0: full; 1: place:host_share=0.5,parts=2",
]


NAMED = {SENT_LATE, READ_TWICE, PACKED_EARLY, BY_HALVES, DRAWN_PROBES}
"""Differences of what is sent home late, and of rows in two places."""


EVERY = [*PAIRS, *LAYERED]
RUNS = few(
    [(text, model) for text in EVERY for model in MODELS],
    list(zip(EVERY, cycle(MODELS))),
)


@pytest.mark.parametrize(("text", "model"), RUNS)
def test_compositions_are_as_stated(text: str, model: str) -> None:
    """FLOPs, bytes and memory are equal, but for writes of packed storages and H2O's moves."""
    rounds = (1, 60, 7) if MAGICDEC in text else (1, PROMPT, GENERATE)
    drafts = "gamma" in text or "draft" in text
    shape = rounds if drafts else (BATCH, PROMPT, GENERATE)
    result = counted(text, model, *shape)
    for line in result.lines:
        assert line.same_flops, (line.phase, line.op)
        if line.reason == PACKED_AT_ONCE["attn"] and line.phase == "decode":
            assert line.equal or drafts or _unwritten(line, model), line
        elif line.reason in NAMED:
            assert line.holds
        elif line.op not in {*STACK_WIDE, "graduate"}:
            assert line.equal, line
    for buffer in result.buffers:
        assert buffer.equal, buffer


def _unwritten(line: Line, model: str) -> bool:
    """Whether an op is charged for writing new keys and values in fp16, and nothing else."""
    missing = line.predicted.bytes["hbm"] - line.counted.bytes["hbm"]
    m = short(model).arch.model
    layer = 2.0 * BATCH * (GENERATE - 1) * (m.k_width if line.op == "scores" else m.kv_width)
    return missing in (layer, 2 * layer)  # of one layer, or of both


@pytest.mark.parametrize("lengths", [(40, 40), (5,)])
@pytest.mark.parametrize(
    "text",
    [
        "0: full; 1-2: values:n=1000", "0-1: kcache:n=1000; 2: full",
        "0: snapkv:budget=500,window=8; 1-2: h2o:heavy=100,recent=100",
        "0: streamingllm:sink=4,recent=500; 1: full; 2: snapkv:budget=400,window=4",
        "0: quest:budget=800,page=4,dense=0; 1-2: full", "quest:budget=16,page=4,dense=3",
        "0-1: place:host_share=0.5; 2: full", "0: kcache:n=1000; 1-2: place:host_share=1",
        "snapkv:budget=500,window=8 + offload:host_share=0.5",
        f"0-1: full; 2: snapkv:budget=500,window=8; {MAGICDEC}", NARROW,
        "snapkv:budget=500,window=8 + selfdraft:reads=all,weight_bits=4,gamma=3,acceptance=0.5",
        "duoattention:retrieval=0.5,sink=4,recent=500",
        "place:weights_host=0.25", "place:weights_host=1,host_share=0.5", "values:n=1000",
        "place:cpu_share=1", "0: full; 1-: place:cpu_share=1",
        "0: offload; 1-: place:cpu_share=0.5",
        "ngram:gamma=3,acceptance=0.5 + offload", f"{NARROW} + offload:host_share=0.5",
        "magicdec:draft=streamingllm,budget=20,gamma=2 + kvpr:split=3",
        "0: full; 1-: specache:k=500,group=16,residual=16",
        "pyramidkv:budget=500,window=8,beta=2", "ngram:gamma=3,acceptance=0.5",
    ],
)  # fmt: skip
def test_lossless_compositions_give_full_kvs_tokens(text: str, lengths: tuple[int, ...]) -> None:
    assert_same(text, "full", prompts(*lengths), 12)


@pytest.mark.parametrize(
    ("packed", "plain", "within"),
    [
        (f"{SNAPKV} + grouped:bits=8,group=8", SNAPKV, 0.1),
        (f"{STREAMING} + grouped:bits=8,group=8", STREAMING, 0.1),
        ("kcache:n=12 + grouped:bits=8,group=8", "kcache:n=12", 0.1),
        (f"{H2O} + grouped:bits=8,group=8", H2O, 0.1),
        (f"{SNAPKV} + fp8", SNAPKV, 0.5),
        ("grouped:bits=8,group=8", "full", 0.1),
        (f"{SNAPKV} + kivi:bits=8,group=8,residual=8", SNAPKV, 0.1),
    ],
)
def test_eight_bits_are_close_to_what_they_store(packed: str, plain: str, within: float) -> None:
    """Logits differ by no more than rounding to 8 bits does; 2 bits differ by far more."""

    def logits(text: str) -> torch.Tensor:
        run = complete(text, prompts(26, 26), 2)
        return torch.stack([rows[1] for rows in run.logits])

    exact = logits(plain)
    off = (logits(packed) - exact).abs().max()
    assert 0 < off < within
    if "bits=8" in packed:
        assert (logits(packed.replace("bits=8", "bits=2")) - exact).abs().max() > 4 * off


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{STREAMING} + {KIVI}", "packs them together"),
        (f"values:n=4 + {KIVI}", "use grouped"),
        (f"{QUEST} + turboquant:bits=4,group=8", "use grouped"),
        (f"{SNAPKV} + kvquant", "follows from its position"),
        ("offload:host_share=0.5 + kvquant", "whole tokens"),
        (f"{SNAPKV} + zipcache", "follows from its position"),
        (f"zipcache + {NARROW}", "cannot remove rejected drafts"),
        ("zipcache + offload", "whole tokens"),
        (f"0: {KIVI}; 1-: {SPECACHE}", "drop a guessed token"),
        (f"pairs:k=6 + {KIVI}", "single tokens of kivi"),
        (f"{SPECACHE},speculative=false + {NARROW}", "cannot remove rejected drafts"),
        (f"{QUEST} + {MAGICDEC}", "for one query"),
        (f"values:n=4 + {MAGICDEC}", "for one query"),
        (f"{KIVI} + {MAGICDEC}", "cannot remove rejected drafts"),
        (f"{H2O} + offload", "cache in host memory"),
        ("kvpr + fp8", "recomputed is fp16"),
        ("0: full; 1-: place:weights_host=1", "all layers alike"),
        (f"place:weights_host=0.5 + {NARROW}", "drafts with streamed weights"),
        (f"{SNAPKV} + flexgen", "choose a multiple of 8"),
        ("flexgen:states_gpu=0,parts=1", "hidden states on the GPU"),
        ("place:host_share=0.5,split=4", "of all heads"),
        ("place:cpu_share=0.3", "multiple of 1/2"),
        ("grouped:bits=4,group=32", "does not divide the head dim 16"),
        ("0: full; 1: kivi", "layers"),
    ],
)
def test_what_cannot_run_is_said_in_a_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Generation(decoder("llama"), parse(text), prompts(20), 4)


def test_shares_of_a_head_are_named() -> None:
    result = counted("offload:host_share=0.3", "llama", BATCH, PROMPT, GENERATE)
    assert result.holds
    assert {line.op for line in result.lines if not line.equal} >= {"load_kv", "store_kv"}


def test_drafts_that_are_accepted_unevenly_are_named() -> None:
    result = counted_of("offload + ngram:gamma=2,acceptance=0.5", "llama", prompts(40, 40, 40), 30)
    assert [line for line in result.lines if not line.holds] == []
