"""Rows of public measurements of whole runs, read from a folder of tables: for truth.py."""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import ceil
from pathlib import Path

FASTER = ("output_tok_s", "decode_tok_s", "prefill_tok_s", "speedup")  # more is better
DRAWN = 0.8
"""Shortest over largest length of InferenceMAX, which draws them between 0.8 of isl and osl and the
whole (its README, "Benchmark Client Configuration": RANDOM_RANGE_RATIO 0.8)."""
ALIASES = {
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
}
FORMATS = {
    "bf16": ("fp16", ""), "fp16": ("fp16", ""), "fp8": ("fp8", "fp8"), "fp4": ("nvfp4", "fp8"),
}  # fmt: skip
"""Weights and cache by a load test's precision."""
STREAMED = 20
"""Tokens that TensorRT-LLM's server sends together (stream_interval) in InferenceMAX's load tests
of 1,024 tokens in and out on up to 4 GPUs. It is not said; in 42 runs on two cards, in two formats,
the first token comes 16 to 27 passes later than with other lengths, 20 at the median. Servers that
only decode do the same."""
CROWD = 1.2  # clients over what servers take at once, in some tests of pools
LARGER_GRAPHS = "--cuda-graph-sizes 2048"
"""What InferenceMAX's public scripts give vLLM for gpt-oss on an H100, so that short prompts are
replayed as CUDA graphs, too (512 tokens by default). The H200 is assumed to have run alike."""
REPEATED = {"rocm-vllm-mi300x"}
"""Sources whose tool times the same prompts again and again, so that vLLM's prefix cache has them.

It is not said, but 405B reads 1,920 more tokens of each of 8 to 128 prompts in 0.4 to 0.9 of the
time that the cards' peak rate would take."""
ENGINES = {
    "vllm": "vLLM", "trtllm": "TensorRT-LLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM",
    "deepspeed-mii": "DeepSpeed-MII",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured number, and the run it is of."""

    file: str
    line: int
    source: str
    engine: str
    version: str
    card: str
    model: str
    weights: str
    metric: str
    value: float
    mode: str = "static batch"
    table: str = "speed"
    technique: str = "full"
    baseline: str = ""
    kv: str = ""
    of: str = ""
    gpus: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1
    batch: int = 1
    baseline_batch: int = 1
    concurrency: int = 0
    prompt: float = 0.0
    generate: float = 0.0
    streamed: int = 1  # tokens that a server sends together; the first one waits for the others
    spread: float = 1.0  # shortest length over the longest, between which they were drawn
    readers: int = 0  # replicas that read prompts alone, and those that decode alone
    decoders: int = 0
    cached: int = 0
    requests: int = 0
    trace: str = ""
    max_seqs: int = 0
    max_tokens: int = 0
    note: str = field(default="", compare=False)
    asked: str = ""  # the group that something is asked of
    listed: bool = False  # shown, not counted

    @property
    def faster(self) -> bool:
        """Whether a larger value is a faster run, or a larger speed-up or memory."""
        return self.metric in FASTER or self.table == "memory"

    @property
    def served(self) -> bool:
        """Whether clients sent requests to a server."""
        return self.mode == "closed loop" or self.source.startswith("gpustack")

    @property
    def load(self) -> str:
        """How requests came, as the ledger calls it."""
        if self.served or self.file == "serving_disaggregated":
            return "served"
        return "offline" if self.mode.startswith("offline") else "batch"

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.technique.partition(":")[0] in ("eagle", "mtp", "draft", "ngram", "medusa")

    def key(self, free: tuple[str, ...]) -> str:
        """What two rows must share that differ in some fields alone."""
        skipped = {"file", "line", "value", "note", "listed", "asked", *free}
        said = ", ".join(
            f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in skipped
        )
        return f"{said} {self.settings}"

    @property
    def settings(self) -> str:
        """The flags of a run, as its note says them, without formats."""
        return self.note if "flags" in self.note or "setting" in self.note else ""

    def compared(self, other: "Row", free: tuple[str, ...]) -> bool:
        """Whether two rows differ in what is compared."""
        return any(getattr(self, name) != getattr(other, name) for name in free)

    def as_ratio(self, value: float) -> "Row":
        """The row of a ratio to another run."""
        return replace(self, value=value, table="ratio", metric="speedup")


def read_rows(folder: Path) -> list[Row]:
    """Read every row of the folder's tables of whole runs."""
    found: list[Row] = []
    for name, read in READERS.items():
        path = folder / (
            f"ops/{name}.csv" if name.startswith("serving") else f"measured/{name}.csv"
        )
        with path.open(newline="") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                found += read(row, line)
    return found


def _engines(r: Mapping[str, str], line: int) -> Iterator[Row]:
    whole = {
        k: int(r[k] or 1)
        for k in ("gpus", "tp", "pp", "dp", "ep", "replicas", "batch", "baseline_batch")
    }
    listed = r["engine"] == "SGLang" and r["model"] == "gpt-oss-20b" and r["card"] == "a100-80g"
    yield Row(
        "engines", line, r["source"], r["engine"], r["engine_version"], r["card"], r["model"],
        _format_of(r), r["metric"], float(r["value"]), r["mode"], r["table"], r["technique"],
        r["baseline"], r["kv"], r["of"], **whole, concurrency=int(r["concurrency"] or 0),
        prompt=float(r["prompt"]), generate=float(r["generate"]),
        cached=int(r["cached_prefix"] or (r["prompt"] if r["source"] in REPEATED else 0)),
        requests=int(r["requests"] or 0), trace=r["trace"],
        max_seqs=int(r["max_num_seqs"] or 0), max_tokens=int(r["max_batched_tokens"] or 0),
        note=r["note"], listed=listed,
    )  # fmt: skip


def _format_of(r: Mapping[str, str]) -> str:
    """Weights of a run; AWQ's kernels differ from GPTQ's where an engine has both."""
    return "awq" if r["weights"] == "int4" and "AWQ" in r["note"] else r["weights"]


def _splitwise(r: Mapping[str, str], line: int) -> Iterator[Row]:
    card = r["hardware"].replace("80gb", "80g")
    for metric, column, asked in (
        ("ttft_s", "prompt_time", "prefill"),
        ("tpot_s", "token_time", "decode"),
    ):
        yield Row(
            "splitwise_a100", line, "splitwise", "Splitwise", "2023", card, r["model"], "fp16",
            metric, float(r[column]) / 1000, tp=int(r["tensor_parallel"]),
            gpus=int(r["tensor_parallel"]), batch=int(r["batch_size"]),
            prompt=float(r["prompt_size"]), generate=float(r["token_size"]), asked=asked,
        )  # fmt: skip


def _argonne(r: Mapping[str, str], line: int) -> Iterator[Row]:
    yield Row(
        "argonne_a100", line, "argonne", ENGINES[r["engine"]], "2024", r["hardware"], r["model"],
        "fp16", "e2e_s", float(r["request_s"]), gpus=int(r["gpus"]), tp=int(r["gpus"]),
        batch=int(r["batch"]), prompt=float(r["prompt"]), generate=float(r["generate"]),
        asked=ENGINES[r["engine"]],
    )  # fmt: skip


def _formats(r: Mapping[str, str]) -> tuple[str, str, str]:
    """Model, weights and cache of a load test.

    vLLM keeps a cache in 16 bits unless told otherwise or the checkpoint holds scales of a cache,
    as released ones in blocks of fp8 do not: MiniMax-M2.5's guide counts 240 KB per token.
    """
    model = ALIASES.get(r["model"], r["model"].removesuffix("-Instruct"))
    weights, kv = FORMATS[r["precision"]]
    if "gpt-oss" in model:
        return model, "released", ""
    if model != r["model"] and "Llama" not in model and weights == "fp8":
        return model, "fp8-block", "" if r["engine"] == "vllm" else kv
    return model, weights, kv


def _serving(file: str, r: Mapping[str, str], line: int) -> Iterator[Row]:
    model, weights, kv = _formats(r)
    tp, dp, ep = (int(float(r[k])) for k in ("tp", "dp", "ep"))
    clients = int(float(r["concurrency"]))
    if dp > 1 and ep == tp * dp:  # read as nested: the same times stand in another table of the
        dp, ep, clients = 1, tp, clients * dp  # source with so many clients on tp GPUs
    spread = DRAWN if r["src"].startswith(("2026", "db-dump")) else 1.0
    share = (1 + spread) / 2
    prompt, generate = share * float(r["isl"]), share * float(r["osl"])
    larger = r["engine"] == "vllm" and spread == DRAWN and "gpt-oss" in model
    together = r["engine"] == "trtllm" and spread == DRAWN and r["isl"] == r["osl"] and tp < 8
    common = Row(
        file, line, f"{file} {r['src'].rpartition('/')[2]}", ENGINES[r["engine"]],
        r["version"], r["device"], model, weights, "e2e_s", 1.0, "closed loop", kv=kv, tp=tp, dp=dp,
        ep=ep, gpus=tp * dp, technique="fp8" if kv else "full",
        concurrency=clients, prompt=prompt, generate=generate,
        spread=spread, streamed=STREAMED if together else 1, note=LARGER_GRAPHS if larger else "",
    )  # fmt: skip
    ttft, tpot = float(r["ttft_ms"]) / 1000, float(r["tpot_ms"]) / 1000
    for metric, value, asked in (("e2e_s", ttft + (generate - 1) * tpot, "latency"),
                                 ("tpot_s", tpot, "tpot"), ("ttft_s", ttft, "ttft")):  # fmt: skip
        yield replace(common, metric=metric, value=value, asked=asked)


def _slots(clients: float) -> int:
    """Sequences that a server takes at once, of which a test's clients are as many or CROWD times.

    The table does not say it. Its clients per decoding server are 2^k or 1.2 times as many (2, 3,
    10, 20, 39, 77, 154 and 615 on H100), and the time to the first token is then the wait for a
    place: one, a half and a quarter of a request's time for 2 on 1, 3 on 2 and 10 on 8.
    """
    return next(1 << k for k in range(16) if ceil(CROWD * (1 << k)) >= clients)


def _disaggregated(r: Mapping[str, str], line: int) -> Iterator[Row]:
    model, weights, kv = _formats(r)
    spread = DRAWN if r["src"].startswith(("2026", "db-dump")) else 1.0
    share, clients = (1 + spread) / 2, int(r["concurrency"] or 1)
    readers, decoders = (int(float(r[f"{k}_workers"] or 0)) for k in ("prefill", "decode"))
    said = readers and r["concurrency"]
    # both pools are laid out as the one that decodes, where requests spend most of their time
    tp, dp, ep = (int(float(r[f"decode_{k}"])) or 1 for k in ("tp", "dp", "ep"))
    own = said and r["engine"] == "trtllm"
    for metric, column, side in (("ttft_s", "ttft_ms", "prefill"), ("tpot_s", "tpot_ms", "decode")):
        yield Row(
            "serving_disaggregated", line, "serving_disaggregated", ENGINES[r["engine"]],
            r["version"], r["device"], model, weights, metric, float(r[column]) / 1000,
            "closed loop", kv=kv, tp=tp, dp=dp, ep=ep, gpus=tp * dp,
            technique="fp8" if kv else "full", prompt=share * float(r["isl"]),
            generate=share * float(r["osl"]), spread=spread, streamed=STREAMED if own else 1,
            concurrency=clients, readers=readers, decoders=decoders,
            max_seqs=_slots(clients / decoders / dp) if own else 0,
            asked=side if said else "", listed=not said,
            note="" if said else "replicas of a pool or clients are not said",
        )  # fmt: skip


READERS: dict[str, Callable[[Mapping[str, str], int], Iterator[Row]]] = {
    "engines": _engines,
    "splitwise_a100": _splitwise,
    "argonne_a100": _argonne,
    "serving": partial(_serving, "serving"),
    "serving_experts": partial(_serving, "serving_experts"),
    "serving_fp4": partial(_serving, "serving_fp4"),
    "serving_disaggregated": _disaggregated,
}
