"""Settings to paste: only flags of the list, and what no engine has is said."""

import re
import shlex
from dataclasses import replace

import pytest
import yaml

from kvsim.emit.engines import WRITERS, annotate, emit
from kvsim.emit.flags import MANUALS, find_flag, read_flags
from kvsim.emit.served import Served
from kvsim.errors import InputError
from kvsim.machines.deployment import HostLayers
from kvsim.machines.hardware import GIB
from kvsim.machines.parallel import Parallelism
from kvsim.techniques import TECHNIQUES, parse
from kvsim.techniques.released import ENGINES
from tests.support.commands import check, line, run
from tests.support.envelope import answer_in

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
RUN_BY = {
    "fp8": {"vllm", "k8s", "sglang", "trtllm", "lmcache"},
    "offload": {"hf"},
    "turboquant": {"vllm", "k8s", "lmcache"},
    "kivi": {"hf"},
    "eagle": {"vllm", "k8s", "sglang", "trtllm", "lmcache", "llamacpp"},
    "eagle2": {"sglang"},
    "eagle3": {"vllm", "k8s", "sglang", "trtllm", "lmcache", "llamacpp"},
    "p-eagle": {"vllm", "k8s", "lmcache"},
    "dflash": {"vllm", "k8s", "sglang", "lmcache", "llamacpp"},
    "suffix": {"vllm", "k8s", "lmcache"},
    "mtp": {"vllm", "k8s", "sglang", "trtllm", "lmcache", "llamacpp"},
    "ngram": {"vllm", "k8s", "sglang", "trtllm", "lmcache", "hf", "llamacpp"},
    "draft": {"vllm", "k8s", "sglang", "trtllm", "lmcache", "hf", "llamacpp"},
}
"""Which engines have a setting for a technique; those that are not here have none anywhere."""


def served(technique: str = "full", **changed: object) -> Served:
    plain = Served(
        model="meta-llama/Meta-Llama-3-8B", technique=parse(technique), weights="fp16",
        spread=Parallelism(2), max_model_len=8192, max_seqs=64, max_tokens=2048,
        block_tokens=16, utilisation=0.9,
        weights_bytes=8 * GIB, cache_bytes=24 * GIB, gpu_bytes=48 * GIB, prefix_caching=True,
    )  # fmt: skip
    return replace(plain, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("columns", "cut"), [(192, True), (384, False), (0, False)])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_cut_within_a_block_of_fp8_are_told(engine: str, columns: int, cut: bool) -> None:
    own = emit(engine, served(weights="fp8-block", released=True, expert_columns=columns))
    assert [f"{columns} columns" in x and "--ep 2" in x for x in own.missing] == [True] * cut


def test_every_flag_has_a_meaning_and_a_source() -> None:
    assert MANUALS.keys() == WRITERS.keys()
    for engine, flags in read_flags().items():
        assert flags and all(f.meaning and f.source for f in flags.values()), engine
        assert MANUALS[engine].version and MANUALS[engine].source.startswith("github.com/")


@pytest.mark.parametrize("engine", WRITERS)
@pytest.mark.parametrize("technique", [name for name in TECHNIQUES if name != "full"])
def test_only_flags_of_the_list_are_written(engine: str, technique: str) -> None:
    found = emit(engine, served(technique, host_cache=32 * GIB, draft_model=(technique, "me/head")))
    known = {f.name for name in (engine, "vllm") for f in read_flags()[name].values()}
    assert set(OPTION.findall(found.text)) <= known
    assert {f.name for f in found.flags} <= known
    missing = any(technique in what or "formats" in what for what in found.missing)
    assert missing == (engine not in RUN_BY.get(technique, set())), found


def test_a_plan_for_an_engine_takes_what_the_engine_has_a_setting_for() -> None:
    # vLLM's TurboQuant has some combinations of bits only, so a plan does not choose it unasked
    written = {name: {"full"} for name in WRITERS}
    for technique, engines in RUN_BY.items():
        for engine in engines if technique != "turboquant" else ():
            written[engine].add(technique)
    for engine in WRITERS.keys() & ENGINES.keys():
        assert set(ENGINES[engine]) == written[engine], engine


def test_drafting_is_written_for_tensorrt_llm_and_transformers() -> None:
    assert emit("trtllm", served("draft:gamma=3")).text.startswith(
        "# kv.yaml\nkv_cache_config:\n  enable_block_reuse: true\n"
        "  free_gpu_memory_fraction: 0.83\nspeculative_config:\n"
        "  decoding_type: Draft_Target\n  max_draft_len: 3\n"
        "  speculative_model: meta-llama/Llama-3.2-1B\n"
        "disable_overlap_scheduler: true\n"
    )
    found = emit("hf", served("draft:gamma=3")).text
    # read from the draft model's settings, not from the call
    assert "\ndraft_model.generation_config.num_assistant_tokens = 3\n" in found
    assert "\ndraft_model.generation_config.assistant_confidence_threshold = 0\n" in found
    assert found.endswith("generate(**inputs, max_length=8192, assistant_model=draft_model)")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_heads_are_named_where_one_is_published(engine: str) -> None:
    named = emit(engine, served("eagle3", model="Qwen/Qwen3-8B"))
    assert "AngelSlim/Qwen3-8B_eagle3" in named.text and not named.missing
    other = emit(engine, served("eagle3", model="meta-llama/Llama-3.1-8B"))
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in other.text
    assert any("one is of meta-llama/Llama-3.1-8B-Instruct" in what for what in other.missing)
    unknown = emit(engine, served("eagle3"))  # an engine does not start without one
    assert "spec" not in unknown.text
    assert any("--draft-model eagle3=NAME" in what for what in unknown.missing)
    own = emit(engine, served("eagle3", draft_model=("eagle3", "me/head")))
    assert "me/head" in own.text and not own.missing


@pytest.mark.parametrize(
    ("engine", "technique", "model", "head"),
    [
        ("vllm", "dflash", "openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
        ("sglang", "dflash", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("vllm", "p-eagle", "openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle"),
        ("sglang", "eagle2", "Qwen/Qwen2-7B-Instruct", "yuhuili/EAGLE-Qwen2-7B-Instruct"),
    ],
)
def test_heads_of_other_methods_are_named(
    engine: str, technique: str, model: str, head: str
) -> None:
    found = emit(engine, served(technique, model=model))
    assert head in found.text
    assert not [what for what in found.missing if "--draft-model" in what]
    assert "spec" not in emit(engine, served(technique, model="Qwen/Qwen3-0.6B")).text


def test_looked_up_drafts_match_one_token_or_more() -> None:
    text = emit("vllm", served("ngram:gamma=3,acceptance=0.5")).text
    assert '"prompt_lookup_max": 3, "prompt_lookup_min": 1' in text
    assert "disable_overlap_scheduler: true" in emit("trtllm", served("ngram:gamma=3")).text


def test_trees_of_drafts_are_written_where_an_engine_has_them() -> None:
    tree = served("eagle3:width=4,verify=16", draft_model=("eagle3", "me/head"))
    assert "--speculative-eagle-topk 4 " in emit("sglang", tree).text.replace("\n", "")
    assert "--speculative-num-draft-tokens 16" in emit("sglang", tree).text
    assert "--speculative-eagle-topk 1 --spec" in emit("sglang", served("mtp")).line  # a chain
    for engine in ("vllm", "trtllm"):
        assert any("trees of drafts" in what for what in emit(engine, tree).missing), engine
    assert (
        '"parallel_drafting": true'
        in emit("vllm", served("p-eagle", model="openai/gpt-oss-20b")).text
    )


def test_vllm_is_the_golden_one() -> None:
    found = emit("vllm", served("fp8", weights="fp8", host_cache=32.126 * GIB))
    assert found.text == (
        "vllm serve meta-llama/Meta-Llama-3-8B \\\n"
        "  --tensor-parallel-size 2 \\\n"
        "  --max-model-len 8192 \\\n"
        "  --max-num-seqs 64 \\\n"
        "  --max-num-batched-tokens 2048 \\\n"
        "  --gpu-memory-utilization 0.9 \\\n"
        "  --enable-prefix-caching \\\n"
        "  --kv-cache-dtype fp8 \\\n"
        "  --quantization fp8 \\\n"
        "  --kv-offloading-size 32.13 \\\n"
        "  --kv-offloading-backend native"
    )
    assert not found.missing


def test_memory_shares_leave_what_else_is_in_memory() -> None:
    s = served()
    assert s.static_share == 0.66  # 8 + 24 of 48 GiB
    assert s.free_share == 0.83  # 24 of the 28.8 GiB that the other 19.2 leave
    assert "--mem-fraction-static 0.66" in emit("sglang", s).text
    assert "  free_gpu_memory_fraction: 0.83\n" in emit("trtllm", s).text


def test_lmcache_has_a_file_and_vllm_that_uses_it() -> None:
    text = emit("lmcache", served(host_cache=40 * GIB)).text
    assert "max_local_cpu_size: 20\n" in text  # GiB of each of two GPUs
    assert "PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=lmcache.yaml vllm serve" in text
    assert "--kv-offloading-backend lmcache" in text and "native" not in text
    assert any("no use" in what for what in emit("lmcache", served()).missing)


@pytest.mark.parametrize(
    ("engine", "degrees", "said"),
    [
        ("vllm", (2, 2, 1, 1), "--tensor-parallel-size 2 --pipeline-parallel-size 2"),
        ("vllm", (1, 1, 8, 8), "--data-parallel-size 8 --enable-expert-parallel"),
        ("lmcache", (2, 1, 4, 8), "--data-parallel-size 4 --enable-expert-parallel"),
        ("sglang", (2, 3, 4, 8), "--tp-size 8 --pp-size 3 --dp-size 4 --enable-dp-attention --ep-"),
        ("trtllm", (8, 2, 1, 4), "--tp_size 8 --pp_size 2 --ep_size 4"),
        ("trtllm", (1, 1, 8, 8), "--tp_size 8 --ep_size 8"),
    ],
)
def test_a_replica_is_spread_as_was_asked(
    engine: str, degrees: tuple[int, int, int, int], said: str
) -> None:
    found = emit(engine, served(spread=Parallelism(*degrees)))
    assert said in found.line and not any("experts" in what for what in found.missing)
    if engine == "sglang":  # it divides both by the ranks
        assert f"--max-running-requests {4 * 64} --chunked-prefill-size {4 * 2048}" in found.line
    assert ("enable_attention_dp: true" in found.text) == (engine == "trtllm" and degrees[2] > 1)


@pytest.mark.parametrize(
    ("engine", "degrees", "said"),
    [
        ("vllm", (8, 1, 1, 4), "4 groups of whole experts on 8 GPUs"),
        ("trtllm", (2, 1, 2, 4), "ask for --tp 1 --dp 4"),
        ("hf", (1, 2, 1, 1), "--pp 2: Hugging Face generate"),
        ("llamacpp", (1, 1, 2, 2), "--dp 2 --ep 2: llama.cpp"),
    ],
)
def test_a_spread_that_an_engine_has_not_is_said(
    engine: str, degrees: tuple[int, int, int, int], said: str
) -> None:
    assert any(said in what for what in emit(engine, served(spread=Parallelism(*degrees))).missing)
    far = emit(engine, served(spread=Parallelism(8, 2), nodes=2)).missing
    assert any("on both machines" in what for what in far) == (engine not in ("hf", "llamacpp"))


@pytest.mark.parametrize(
    ("engine", "prefill", "decode"),
    [
        ("vllm", '"kv_role":"kv_producer"', '"kv_role":"kv_consumer"'),
        ("sglang", "--disaggregation-mode prefill", "--disaggregation-mode decode"),
        ("trtllm", "--config prefill.yaml", "--config decode.yaml"),
    ],
)
def test_prefill_apart_is_two_kinds_of_engine(engine: str, prefill: str, decode: str) -> None:
    found = emit(engine, served(apart=(2, 1)))
    first, second = found.text.split("# 1 of these decode")
    assert first.startswith("# 2 of these read prompts")
    assert prefill in first and decode in second
    assert "--enable-prefix-caching" not in second
    known = {f.name for f in read_flags()[engine].values()}
    assert set(OPTION.findall(found.text)) <= known
    assert len({f.name for f in found.flags}) == len(found.flags)
    assert any("proxy" in x or "addresses" in x or "orchestrator" in x for x in found.missing)


def test_sglang_apart_is_as_its_documentation_has_it() -> None:
    """Page pd_disaggregation.md: NIXL on both kinds of engine, and a router that knows them all."""
    found = emit("sglang", served(apart=(2, 1)))
    for role in ("prefill", "decode"):
        assert f"--disaggregation-mode {role} --disaggregation-transfer-backend nixl" in found.line
    assert found.text.endswith(
        "# in front of them\npython -m sglang_router.launch_router \\\n  --pd-disaggregation \\\n"
        "  --prefill http://PREFILL_1:30000 \\\n  --prefill http://PREFILL_2:30000 \\\n"
        "  --decode http://DECODE_1:30000 \\\n  --host 0.0.0.0 \\\n  --port 8000"
    )
    apart = [
        f for f in read_flags()["sglang"].values() if "pd_disaggregation.md at 08edc50" in f.source
    ]
    assert {f.name for f in apart} == {
        "--disaggregation-mode", "--disaggregation-transfer-backend", "--pd-disaggregation",
        "--prefill", "--decode", "--host", "--port",
    }  # fmt: skip
    assert set(apart) <= set(found.flags)
    comments = [x for x in annotate(found).splitlines() if x.startswith("#")]
    assert max(map(len, comments)) <= 100 and any(x.startswith("#   ") for x in comments)
    assert not set(apart) & set(emit("sglang", served()).flags)


def test_drafts_that_sglang_refuses_are_said() -> None:
    stages, copies = Parallelism(2, 2), Parallelism(1, 1, 2, 1)
    for technique, spread, said in (
        ("eagle", stages, True), ("eagle", copies, False), ("ngram", copies, True),
        ("ngram", Parallelism(2), False), ("full", stages, False),
    ):  # fmt: skip
        missing = " ".join(
            emit("sglang", served(technique, spread=spread, model="Qwen/Qwen3-8B")).missing
        )
        assert ("SGLang refuses" in missing) == said, (technique, spread)


@pytest.mark.parametrize("engine", ["lmcache", "hf", "llamacpp"])
def test_an_engine_without_prefill_apart_says_so(engine: str) -> None:
    missing = " ".join(emit(engine, served(apart=(1, 1), host_cache=GIB)).missing)
    assert "prefill and decode on engines of their own" in missing


def test_drives_are_written_where_an_engine_documents_them() -> None:
    large = served(host_cache=32 * GIB, nvme_cache=1000e9)
    assert "max_local_disk_size: 465.66" in emit("lmcache", large).text
    found = emit("sglang", large)
    assert "--hicache-storage-backend file" in found.text
    # of each of two GPUs, and less than the 24 GiB of cache on it
    assert "--hicache-size 17 " in found.text and "starts only" in " ".join(found.missing)
    assert "starts only" not in " ".join(emit("sglang", served(host_cache=64 * GIB)).missing)
    for engine in ("vllm", "trtllm", "hf", "llamacpp"):
        assert any("1000 GB of NVMe" in x for x in emit(engine, large).missing)


def test_hugging_face_has_caches_for_two_techniques() -> None:
    quantised = emit("hf", served("kivi:bits=2")).text
    assert 'cache_implementation="quantized"' in quantised and '"nbits": 2' in quantised
    assert '"q_group_size": 32, "residual_length": 128}' in quantised
    eight = emit("hf", served("kivi:bits=8"))
    assert "cache_config" not in eight.text and "2 and 4 bits" in " ".join(eight.missing)
    share = emit("hf", served("offload:host_share=0.5"))
    assert 'cache_implementation="offloaded"' in share.text
    assert any("host_share" in what for what in share.missing)


def test_each_part_of_a_composition_is_written_or_missing() -> None:
    found = emit("vllm", served("fp8 + eagle:gamma=3", model="Qwen/Qwen3-8B"))
    assert "--kv-cache-dtype fp8" in found.text
    assert '"method": "eagle3"' in found.text and '"num_speculative_tokens": 3' in found.text
    assert not found.missing
    mixed = emit("vllm", served("0-3: full; 4-31: snapkv"))
    assert any("snapkv" in what for what in mixed.missing)
    assert any("layers that differ" in what for what in mixed.missing)
    assert emit("vllm", served("turboquant:bits=2")).missing


@pytest.mark.parametrize(
    ("bits", "named"),
    [
        ("bits=8,value_bits=4", "turboquant_k8v4"),
        ("bits=4", "turboquant_4bit_nc"),
        ("bits=3,value_bits=4", "turboquant_k3v4_nc"),
        ("bits=3", "turboquant_3bit_nc"),
    ],
)
def test_turboquant_has_vllm_s_name_of_its_bits(bits: str, named: str) -> None:
    assert f"--kv-cache-dtype {named} " in f"{emit('vllm', served(f'turboquant:{bits}')).line} "


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g32"])
@pytest.mark.parametrize("engine", WRITERS)
def test_quantised_weights_need_a_checkpoint(engine: str, weights: str) -> None:
    assert emit(engine, served(weights=weights)).missing


@pytest.mark.parametrize("apart", [None, (2, 1)])
def test_kubernetes_runs_the_engine_with_the_flags_of_its_command(
    apart: tuple[int, int] | None,
) -> None:
    asked = served("ngram", gpu="h100", replicas=3, apart=apart)
    found = [x for x in yaml.safe_load_all(emit("k8s", asked).text) if x]
    deployments, services = found[::2], found[1::2]
    assert [x["spec"]["replicas"] for x in deployments] == ([3] if apart is None else [6, 3])
    assert len({x["metadata"]["name"] for x in deployments}) == len(deployments)
    for deployment, service in zip(deployments, services, strict=True):
        assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
        pod = deployment["spec"]["template"]
        assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
        labels = pod["metadata"]["labels"]
        assert labels == deployment["spec"]["selector"]["matchLabels"]
        assert labels == service["spec"]["selector"]
        (container,) = pod["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
        assert all(isinstance(word, str) for word in container["args"])
        started = shlex.join([*container["command"], *container["args"]])
        assert started in emit("vllm", asked).line
        assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"]


def test_a_flag_outside_the_list_is_refused() -> None:
    with pytest.raises(InputError, match="no flag --num-lookahead-slots"):
        find_flag("vllm", "--num-lookahead-slots")
    check(line("plan", "--model", "llama3-8b", "--gpu", "l40s", "--emit", "vlm"), "engine|vllm")


def test_a_plan_ends_with_its_settings() -> None:
    asked = ("plan", "--model", "llama3-8b", "--gpu", "l40s", "--only", "full", "--emit", "vllm")
    found = answer_in(run(*asked, "--json").out)
    text = found["settings"][0]["text"]
    assert f"--max-num-seqs {found['choice']['max_seqs']}" in text
    shown, command = (x.replace("\\\n", "").split() for x in (run(*asked).out, text))
    assert shown[-len(command) :] == command
    assert annotate(emit("vllm", served())).startswith("# vLLM")


def test_llamacpp_is_told_what_stays_in_host_memory() -> None:
    some = HostLayers(experts=frozenset(range(23)))
    found = emit("llamacpp", served(weights="q4_k_m", host=some, layers=36))
    assert "--n-gpu-layers all --n-cpu-moe 23 " in found.line and "-Q4_K_M.gguf" in found.line
    whole = emit("llamacpp", served(host=HostLayers(layers=frozenset(range(5))), layers=32))
    assert "--n-gpu-layers 27" in whole.line
    apart = HostLayers(experts=frozenset({3, 5}), mlps=frozenset({7}))
    text = emit("llamacpp", served(host=apart, layers=36)).line
    assert r"blk\.(3|5)\.ffn_.*exps=CPU" in text and r"blk\.(7)\.ffn_.*=CPU" in text
    packed = emit("llamacpp", served("cache:format=q8_0"))
    assert "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0" in packed.line
    assert not any("code of its own" in x for x in packed.missing)
    mtp = emit("llamacpp", served("mtp:gamma=2,acceptance=0.8", model="Qwen/Qwen3.6-27B")).line
    assert "--spec-type draft-mtp --spec-draft-n-max 2" in mtp
    small = emit("llamacpp", served("draft:model=llama3.2-1b,gamma=5,acceptance=0.5"))
    assert "--spec-type draft-simple --spec-draft-n-max 5 --spec-draft-model" in small.line
    assert any("Llama-3.2-1B" in x for x in small.missing)
    assert "ngram-simple-size-m 4" in emit("llamacpp", served("ngram:gamma=4")).line
    stages = emit("llamacpp", served(spread=Parallelism(1, 4)))
    assert "--split-mode layer" in stages.line and not any("--pp" in x for x in stages.missing)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_seqs": 256, "fitting": 30}, "--ctx-size 40000 --kv-unified --parallel 120 "),
        ({"max_seqs": 1024}, "--ctx-size 40000 --kv-unified --parallel 256 "),
        ({"max_seqs": 64, "state_tokens": 100.0}, "--ctx-size 33600 --kv-unified --parallel 64 "),
    ],
)
def test_llamacpp_starts_with_its_slots(changed: dict[str, object], words: str) -> None:
    own = served(cache_tokens=40_000, spread=Parallelism(1), **changed)  # type: ignore[arg-type]
    found = emit("llamacpp", own)
    assert words in found.line
    assert any("256 slots" in x for x in found.missing) == (changed["max_seqs"] == 1024)


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "--block-size"), ("sglang", "--page-size")]
)
def test_blocks_are_the_engines_unless_asked(engine: str, option: str) -> None:
    assert option not in emit(engine, served()).line
    assert f"{option} 64" in emit(engine, served(block_tokens=64)).line
