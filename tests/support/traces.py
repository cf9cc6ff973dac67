"""The same four requests in every trace format."""

import json
from typing import Any

ARRIVAL, PROMPT, GENERATE = [0.0, 0.5, 0.5, 2.25], [374, 1024, 7, 90000], [44, 1, 512, 9]
BLOCKS = [[5, 6], [5, 6, 9], [], [4]]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def csv(header: str, *columns: list[Any]) -> bytes:
    body = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    return "\n".join([header, *body]).encode()


DATES = ["46.6805900", "47.1805900", "47.1805900", "48.9305900"]
MODEL = ["ChatGPT"] * 4
TRACE_FILES: dict[str, tuple[str, bytes]] = {
    "azure 2023": (
        "azure",
        csv("TIMESTAMP,ContextTokens,GeneratedTokens",
            [f"2023-11-16 18:15:{s}" for s in DATES], PROMPT, GENERATE).replace(b"\n", b"\r\n"),
    ),
    "azure 2024": (
        "azure",
        csv("TIMESTAMP,ContextTokens,GeneratedTokens",
            ["2024-05-10 00:00:00+00:00", *["2024-05-10 00:00:00.500000+00:00"] * 2,
             "2024-05-10 00:00:02.250000+00:00"], PROMPT, GENERATE),
    ),
    "burstgpt": (
        "burstgpt",
        csv("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            [5.0, 5.5, 5.5, 7.25], MODEL, PROMPT, GENERATE, PROMPT, MODEL),
    ),
    "burstgpt with sessions": (
        "burstgpt",
        csv("Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
            "Total tokens,Log Type",
            [5.0, 5.5, 5.5, 7.25], MODEL, MODEL, MODEL, PROMPT, GENERATE, PROMPT, MODEL),
    ),
    "mooncake": (
        "mooncake",
        jsonl(rows(timestamp=[0, 500, 500, 2250], input_length=[1000, 1500, 7, 90000],
                   output_length=GENERATE, hash_ids=BLOCKS)),
    ),
    "bailian": (
        "bailian",
        jsonl(rows(chat_id=[1, 2, 3, 4], parent_chat_id=[-1] * 4, timestamp=ARRIVAL,
                   input_length=PROMPT, output_length=GENERATE, type=MODEL, turn=[1] * 4,
                   hash_ids=BLOCKS)),
    ),
    "vllm json": (
        "vllm",
        json.dumps({"date": "20260101", "request_rate": "inf", "input_lens": PROMPT,
                    "output_lens": GENERATE, "start_times": [9.0, 9.5, 9.5, 11.25],
                    "itls": [[0.1]] * 4}).encode(),
    ),
    "vllm pretty json": (
        "vllm",
        json.dumps({"input_lens": PROMPT, "output_lens": GENERATE,
                    "start_times": [9.0, 9.5, 9.5, 11.25]}, indent=2).encode(),
    ),
    "sglang jsonl, two runs": (
        "vllm",
        jsonl([{"input_lens": PROMPT[:2], "output_lens": GENERATE[:2], "start_times": [9, 9.5]},
               {"input_lens": PROMPT[2:], "output_lens": GENERATE[2:],
                "start_times": [9.5, 11.25]}]),
    ),
    "llmservingsim workload": (
        "llmservingsim",
        jsonl(rows(input_toks=PROMPT, output_toks=GENERATE,
                   arrival_time_ns=[10**9, 15 * 10**8, 15 * 10**8, 325 * 10**7],
                   input_tok_ids=[[1, 2]] * 4)),
    ),
    "llmservingsim run": (
        "llmservingsim",
        jsonl(rows(request_id=["a", "b", "c", "d"], input_toks=PROMPT, output_toks=GENERATE,
                   arrival_time=[1787267980.0, 1787267980.5, 1787267980.5, 1787267982.25])),
    ),
    "llmservingsim csv": (
        "llmservingsim", csv("arrival_time_s,input_toks,output_toks", ARRIVAL, PROMPT, GENERATE)
    ),
    "vidur": (
        "vidur",
        csv("arrived_at,num_prefill_tokens,num_decode_tokens",
            ARRIVAL, [f"{n}.0" for n in PROMPT], GENERATE),
    ),
    "a json list": (
        "llmservingsim",
        json.dumps(rows(arrival_time_s=ARRIVAL, input_toks=PROMPT, output_toks=GENERATE)).encode(),
    ),
    "semicolons, blanks and a byte-order mark": (
        "vidur",
        b"\xef\xbb\xbf" + csv(" arrived_at , num_prefill_tokens,num_decode_tokens ",
                              ARRIVAL, PROMPT, [f" {n} " for n in GENERATE])
        .replace(b",", b";").replace(b"\n", b"\n\n"),
    ),
}  # fmt: skip
