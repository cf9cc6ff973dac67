"""Sound examples of the formats that kvsim reads."""

import json
from pathlib import Path
from typing import Any

import kvsim
from kvsim.models.catalogue import catalogue_config, model_names

SHIPPED = Path(kvsim.__file__).parent
TRACES = (
    "arrival_s,prompt_tokens,generate_tokens\n0,10,5\n1,20,5\n2.5,30,4\n",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,10,5\n"
    "2024-05-10 00:00:01.017335+00:00,20,4\n",
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n",
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]}\n',
)
CHATS = (
    '[{"id": "a", "conversations": [{"from": "human", "value": "hello there"}, '
    '{"from": "gpt", "value": "good day"}]}]\n',
)
RUNS = (
    '{"arrival_time": 10.0, "first_token_ts": 10.2, "last_token_ts": 11.4, "input_toks": 512, '
    '"output_toks": 64}\n{"arrival_time": 10.5, "first_token_ts": 10.7, "last_token_ts": 11.9, '
    '"input_toks": 128, "output_toks": 48, "queued_ts": 10.6}\n',
)
BENCHES: tuple[dict[str, Any], ...] = (
    {
        "model_id": "meta-llama/Llama-3.1-8B-Instruct", "request_rate": 2.0, "completed": 3,
        "input_lens": [512, 480, 300, 256], "output_lens": [3, 2, 0, 1],
        "start_times": [100.0, 100.4, 100.9, 101.1], "ttfts": [0.05, 0.06, 0.0, 0.04],
        "itls": [[0.01, 0.012], [0.011], [], []], "errors": ["", "", "connection reset", ""],
    },
    {
        "backend": "sglang", "request_rate": None, "max_concurrency": 2, "input_lens": [512, 480],
        "output_lens": [3, 2], "ttfts": [0.05, 0.06], "itls": [[0.01, 0.012], [0.011]],
        "errors": ["", ""],
    },
)  # fmt: skip
PLAN = {
    "choice": {
        "layers": [
            {"first": 0, "count": 2, "technique": "full", "params": {}},
            {"first": 2, "count": 28, "technique": "kivi", "params": {"bits": 4, "group": 32}},
        ],
        "whole": None,
    }
}
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False,
              "ignore_merges": False, "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3},
              "merges": ["a b"]},
}  # fmt: skip
SWEEPS = (
    'kind = "predict"\n[grid]\nmodel = ["smollm2-135m"]\ngpu = ["t4"]\ntechnique = ["full"]\n'
    "batch = [1, 2]\ncontext = {from = 16, to = 64, count = 3}\n",
)
SAMPLES = (
    '{"samples": 1, "device": "cpu"}\n'
    '{"benchmark": "gemm", "case": {"m": 1}, "op": {"name": "a", "stream": "gpu", "kernel": "gemm",'
    ' "dtype": "fp32", "flops": 1e6, "bytes": {"hbm": 1e6}, "rows": 1.0, "launches": 1}, '
    '"seconds": 1e-3, "spread": 0.01, "runs": [1e-3, 1.1e-3, 0.9e-3]}\n'
    '{"done": "gemm", "samples": 1}\n',
)
OWN_RUNS = (
    "model,gpu,technique,batch,prompt,generate,tpot_ms\nsmollm2-135m,t4,full,1,64,8,7.1\n"
    'smollm2-135m,t4,"kivi:bits=4,group=32",16,256,8,9.5\n',
)
OPERATORS = (
    "device,engine,version,op,dtype,ms,m,n,k\n"
    + "".join(
        f"t4,vllm,1.0,gemm,fp16,{(m + 40) * n * k * 4e-10:.6g},{m},{n},{k}\n"
        for m in (1, 16, 64, 256)
        for n in (1024, 4096, 8192)
        for k in (2048, 4096, 8192)
    ),
)
LOAD_TESTS = (
    "device,model,precision,tp,isl,osl,concurrency,ttft_ms,tpot_ms,engine\n"
    + "".join(
        f"h100,llama3.1-8b,fp16,1,{isl},128,{n},{20 + isl / 20},{8 + n / 10},vllm\n"
        for isl in (128, 1024)
        for n in (1, 8, 32)
    ),
)
METRICS = (
    json.dumps(
        {
            "status": "success",
            "data": {
                "resultType": "matrix",
                "result": [
                    {
                        "metric": {"__name__": f"vllm:request_{name}_tokens_bucket", "le": le},
                        "values": [[0, "0"], [60, count]],
                    }
                    for name in ("prompt", "generation")
                    for le, count in (("100", "3"), ("+Inf", "5"))
                ],
            },
        }
    ),
)
SPANS = (
    '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1700000000000000000", '
    '"attributes": [{"key": "gen_ai.usage.input_tokens", "value": {"intValue": "10"}}, '
    '{"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}}]}]}]}]}',
)
ACCESS = (
    '10.0.0.1 - - [22/Nov/2026:06:00:00 +0000] "POST /v1/completions HTTP/1.1" 200 512 "-" "x"\n'
    '10.0.0.1 - - [22/Nov/2026:06:00:01 +0000] "POST /v1/completions HTTP/1.1" 200 512 "-" "x"\n',
)
SCRAPES = (
    "".join(
        f'vllm:request_{name}_tokens_bucket{{le="{le}"}} {count}\n'
        for name in ("prompt", "generation")
        for le, count in (("100", 3), ("+Inf", 5))
    ),
)
NOTATIONS = (
    "full", "kivi:bits=4,group=32", "h2o:heavy=64,recent=64", "snapkv+offload",
    "0-3: full; 4-29: kivi:bits=2", "kvpr:split=48", "specache:k=64", "magicdec:gamma=4",
    "full,kivi:bits=4,group=32,kvpr", "streamingllm:sink=4,recent=252", "quantspec",
)  # fmt: skip


CONFIGS: list[Any] = [dict(catalogue_config(name)) for name in model_names()]


def documents(pattern: str) -> list[Any]:
    """Shipped JSON files."""
    return [json.loads(f.read_text(encoding="utf-8")) for f in sorted(SHIPPED.glob(pattern))]


def shipped(pattern: str, most: int = 20_000) -> list[str]:
    """Shipped texts that are not long."""
    found = [path.read_text(encoding="utf-8") for path in sorted(SHIPPED.glob(pattern))]
    return [text for text in found if len(text) < most]
