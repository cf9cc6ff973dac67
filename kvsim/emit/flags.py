"""Every flag that is ever emitted, with the documentation it was read in.

A flag that is not here cannot be emitted. The documentation is that of the engines' own
repositories at the commit named; `since` is the first release known to have it, where it is known.
"""

from kvsim.errors import InputError
from kvsim.frozen import frozen


@frozen
class EngineManual:
    """An engine, and where its flags were read.

    Attributes
    ----------
    title
        How the engine is called.
    version
        What the flags are those of.
    source
        Where they are documented.
    """

    title: str
    version: str
    source: str


@frozen
class Flag:
    """One setting of an engine.

    Attributes
    ----------
    name
        As it is written: an option of the command line, an argument, or a key of a file.
    meaning
        What it sets.
    source
        The page or file of the documentation, at its commit.
    """

    name: str
    meaning: str
    source: str


VLLM_CACHE = "vllm/config/cache.py at 002f10e"
VLLM_SPECULATION = "docs/features/speculative_decoding/README.md at 01ed47b"
VLLM_SPREAD = "docs/serving/data_parallel_deployment.md and expert_parallel_deployment.md of 0.12"
VLLM_LOOKUP = "vllm/config/speculative.py at 002e77c"
VLLM_APART = "docs/features/nixl_connector_usage.md at 026c83f"
SGLANG_APART = (
    "docs/advanced_features/pd_disaggregation.md at 08edc50, and server_arguments.md at 004813e"
)
SGLANG_ROUTER = (
    "docs/advanced_features/pd_disaggregation.md at 08edc50, and sgl_model_gateway.md at 0f4513c; "
    "that --prefill and --decode may come several times: sglang_router/router_args.py at 05e589a"
)
SGLANG_HOST = "python/sglang/srt/mem_cache/memory_pool_host.py of 2026"
SGLANG_STORE = "docs/advanced_features/hicache_best_practices.md at 0d57f2c"
TRTLLM_SPREAD = "docs/source/features/parallel-strategy.md of 2026"
TRTLLM_APART = "docs/source/features/disagg-serving.md at 0434b98"
SGLANG = "docs/advanced_features/server_arguments.md at 004813e"
TRTLLM = "tensorrt_llm/commands/serve.py at 00209af"
TRTLLM_KV = "docs/source/features/kvcache.md at 0076e93"
TRTLLM_SPECULATION = "docs/source/features/speculative-decoding.md at 04c8822"
TRTLLM_HOST = (
    "KvCacheConfig in the LLM API reference; that it is each rank's is not found there, but in "
    "TensorRT-LLM pull requests 16106 and 17717"
)
LMCACHE = "docs/source/api_reference/configurations.rst at 0223da8"
LMCACHE_SIZES = f"{LMCACHE}; that it is each rank's: issue 2901; GiB: lmcache/v1/storage_backend"
LMCACHE_HASHES = "not found in that page: LMCache issues 1739 and 2581"
TRANSFORMERS = "docs/source/en/kv_cache.md at 04d5adf"
TRANSFORMERS_ASSISTED = "docs/source/en/assisted_decoding.md at aa4cc07"
TRANSFORMERS_CACHE = "src/transformers/cache_utils.py of 4.48 to 4.57"
TRANSFORMERS_LENGTH = "GenerationConfig in the API reference"
TRANSFORMERS_DRAFTS = "src/transformers/generation/candidate_generator.py"
LLAMACPP = "tools/server/README.md at 00dc805"

MANUALS = {
    "vllm": EngineManual(
        "vLLM", "0.19 and later, documentation of 2026", "github.com/vllm-project/vllm"
    ),
    "sglang": EngineManual("SGLang", "documentation of 2026", "github.com/sgl-project/sglang"),
    "trtllm": EngineManual(
        "TensorRT-LLM", "1.x, documentation of 2026", "github.com/NVIDIA/TensorRT-LLM"
    ),
    "lmcache": EngineManual(
        "LMCache under vLLM", "documentation of 2026", "github.com/LMCache/LMCache"
    ),
    "hf": EngineManual(
        "Hugging Face generate",
        "transformers 4.48 and later",
        "github.com/huggingface/transformers",
    ),
    "llamacpp": EngineManual(
        "llama.cpp server", "documentation of 2026", "github.com/ggml-org/llama.cpp"
    ),
}

FLAGS: dict[str, tuple[Flag, ...]] = {
    "vllm": (
        Flag("--tensor-parallel-size", "GPUs per replica", "vLLM engine arguments"),
        Flag("--pipeline-parallel-size", "stages of layers", "vLLM engine arguments"),
        Flag("--data-parallel-size", "copies of attention", VLLM_SPREAD),
        Flag("--enable-expert-parallel", "whole experts on every GPU", VLLM_SPREAD),
        Flag("--max-model-len", "longest sequence [tokens]", "vLLM engine arguments"),
        Flag("--max-num-seqs", "sequences in a batch at most", "vLLM engine arguments"),
        Flag("--max-num-batched-tokens", "tokens in a pass at most", "vLLM engine arguments"),
        Flag("--gpu-memory-utilization", "share of GPU memory that is used", VLLM_CACHE),
        Flag("--block-size", "tokens per KV block", VLLM_CACHE),
        Flag("--kv-cache-dtype", "number format of the KV cache", VLLM_CACHE),
        Flag("--enable-prefix-caching", "prompts share blocks", VLLM_CACHE),
        Flag("--kv-offloading-size", "host memory for evicted blocks [GiB]", VLLM_CACHE),
        Flag("--kv-offloading-backend", "native, or lmcache", VLLM_CACHE),
        Flag("--quantization", "format of the weights", "vLLM engine arguments"),
        Flag("--speculative-config", "drafting, as JSON", f"{VLLM_SPECULATION}; {VLLM_LOOKUP}"),
        Flag("--kv-transfer-config", "how caches leave and come, as JSON", VLLM_APART),
    ),
    "sglang": (
        Flag("--model-path", "the model", SGLANG),
        Flag("--tp-size", "GPUs per stage", SGLANG),
        Flag("--pp-size", "stages of layers", SGLANG),
        Flag("--dp-size", "copies of attention", SGLANG),
        Flag("--enable-dp-attention", "they share experts and GPUs", SGLANG),
        Flag("--ep-size", "groups of whole experts", SGLANG),
        Flag("--context-length", "longest sequence [tokens]", SGLANG),
        Flag("--max-running-requests", "sequences in a batch at most", SGLANG),
        Flag("--chunked-prefill-size", "tokens of prompts in a pass at most", SGLANG),
        Flag("--mem-fraction-static", "share of GPU memory for weights and KV cache", SGLANG),
        Flag("--page-size", "tokens per KV block", SGLANG),
        Flag("--kv-cache-dtype", "number format of the KV cache", SGLANG),
        Flag("--quantization", "format of the weights", SGLANG),
        Flag("--enable-hierarchical-cache", "evicted blocks go to host memory", SGLANG),
        Flag("--hicache-size", "host memory for them, of each GPU [GB]", SGLANG_HOST),
        Flag("--hicache-storage-backend", "where they go from there", SGLANG_STORE),
        Flag("--disaggregation-mode", "prefill or decode only", SGLANG_APART),
        Flag("--disaggregation-transfer-backend", "what moves caches", SGLANG_APART),
        Flag("--pd-disaggregation", "the router sends requests to both kinds", SGLANG_ROUTER),
        Flag("--prefill", "address of an engine that reads prompts", SGLANG_ROUTER),
        Flag("--decode", "address of an engine that decodes", SGLANG_ROUTER),
        Flag("--host", "where the router listens", SGLANG_ROUTER),
        Flag("--port", "its port; 30000 if not set, as of engines", SGLANG_ROUTER),
        Flag("--speculative-algorithm", "EAGLE3, NEXTN (MTP), STANDALONE, NGRAM", SGLANG),
        Flag("--speculative-draft-model-path", "the draft model", SGLANG),
        Flag("--speculative-num-steps", "drafted tokens in a row", SGLANG),
        Flag("--speculative-eagle-topk", "tokens drafted per step", SGLANG),
        Flag("--speculative-num-draft-tokens", "tokens verified per round", SGLANG),
    ),
    "trtllm": (
        Flag("--tp_size", "GPUs per stage", TRTLLM),
        Flag("--pp_size", "stages of layers", TRTLLM),
        Flag("--ep_size", "groups of whole experts", TRTLLM),
        Flag("enable_attention_dp", "a copy of attention on every GPU", TRTLLM_SPREAD),
        Flag("--max_seq_len", "longest sequence [tokens]", TRTLLM),
        Flag("--max_batch_size", "sequences in a batch at most", TRTLLM),
        Flag("--max_num_tokens", "tokens in a pass at most", TRTLLM),
        Flag("--enable_chunked_prefill", "prompts are read in parts", TRTLLM),
        Flag("--config", "the YAML file with the rest", TRTLLM),
        Flag("kv_cache_config.free_gpu_memory_fraction",
             "share of what weights leave for the KV cache", TRTLLM_KV),
        Flag("kv_cache_config.dtype", "number format of the KV cache", TRTLLM_KV),
        Flag("kv_cache_config.enable_block_reuse", "prompts share blocks", TRTLLM_KV),
        Flag("kv_cache_config.host_cache_size", "host memory for evicted blocks, of each GPU [B]",
             TRTLLM_HOST),
        Flag("speculative_config.decoding_type", "Eagle3, MTP, DraftTarget or NGram",
             TRTLLM_SPECULATION),
        Flag("speculative_config.max_draft_len", "drafted tokens per round", TRTLLM_SPECULATION),
        Flag("speculative_config.max_matching_ngram_size", "last tokens that are looked up",
             TRTLLM_SPECULATION),
        Flag("speculative_config.speculative_model", "the draft model", TRTLLM_SPECULATION),
        Flag("cache_transceiver_config.backend", "what moves caches", TRTLLM_APART),
        Flag("cache_transceiver_config.max_tokens_in_buffer", "longest prompt [tokens]",
             TRTLLM_APART),
        Flag("disable_overlap_scheduler", "true: draft models, n-grams and prefill alone need it",
             f"{TRTLLM_SPECULATION}; {TRTLLM_APART}"),
    ),
    "lmcache": (
        Flag("chunk_size", "tokens per block of the store", LMCACHE),
        Flag("local_cpu", "host memory is used", LMCACHE),
        Flag("max_local_cpu_size", "how much of it, of each GPU [GiB]", LMCACHE_SIZES),
        Flag("local_disk", "folder on a disk, as file:///...", LMCACHE),
        Flag("max_local_disk_size", "how much of it, of each GPU [GiB]", LMCACHE_SIZES),
        Flag("LMCACHE_CONFIG_FILE", "environment variable that names the file", LMCACHE),
        Flag("PYTHONHASHSEED", "environment variable: all processes name blocks alike",
             LMCACHE_HASHES),
        Flag("--kv-offloading-backend", "native, or lmcache", VLLM_CACHE),
        Flag("--kv-offloading-size", "host memory for evicted blocks [GiB]", VLLM_CACHE),
    ),
    "hf": (
        Flag("cache_implementation", '"offloaded" to host memory, or "quantized"', TRANSFORMERS),
        Flag("cache_config.nbits", "bits per cached number", TRANSFORMERS),
        Flag("cache_config.backend", '"quanto", which has 2 and 4 bits', TRANSFORMERS),
        Flag("cache_config.q_group_size", "numbers that share a scale", TRANSFORMERS_CACHE),
        Flag("cache_config.residual_length", "latest tokens kept as they are", TRANSFORMERS_CACHE),
        Flag("max_length", "prompt and generated tokens; 20 if not set", TRANSFORMERS_LENGTH),
        Flag("assistant_model", "the draft model, loaded beside", TRANSFORMERS_ASSISTED),
        Flag("num_assistant_tokens", "drafted tokens per round, of the draft model's settings",
             TRANSFORMERS_DRAFTS),
        Flag("num_assistant_tokens_schedule", '"constant": as many in every round',
             TRANSFORMERS_DRAFTS),
        Flag("assistant_confidence_threshold", "0: no round ends sooner", TRANSFORMERS_DRAFTS),
        Flag("prompt_lookup_num_tokens", "drafted tokens per round, looked up in the text",
             TRANSFORMERS_ASSISTED),
    ),
    "llamacpp": (
        Flag("--model", "the GGUF file", LLAMACPP),
        Flag("--ctx-size", "tokens of all sequences together", LLAMACPP),
        Flag("--parallel", "sequences in a batch at most", LLAMACPP),
        Flag("--batch-size", "tokens in a pass at most", LLAMACPP),
        Flag("--n-gpu-layers", "layers on the GPU", LLAMACPP),
        Flag("--split-mode", "how several GPUs share the model", LLAMACPP),
        Flag("--cache-type-k", "number format of cached keys", LLAMACPP),
        Flag("--cache-type-v", "number format of cached values", LLAMACPP),
        Flag("--flash-attn", "needed for quantised values", LLAMACPP),
    ),
}  # fmt: skip


def flag(engine: str, name: str) -> Flag:
    """A flag that is known.

    Raises
    ------
    InputError
        If it is not in the list.
    """
    for known in FLAGS[engine]:
        if known.name == name:
            return known
    raise InputError(f"{engine} has no flag {name} in kvsim's list; add it with its source")
