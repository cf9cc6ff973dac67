"""What `kvsim plan` and `kvsim capacity` answer to some questions, as numbers and names.

``python -m tests.frozen.plans [PART of a name]`` writes ``plans.json`` anew. A change of it is
meant to be seen: say in the commit which answers moved and why. Sentences are not kept.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvsim.report.json import COMMON
from tests.frozen.keeping import renewed
from tests.support.commands import run

PLACE = Path(__file__).with_name("plans.json")
SMALL = ("--model", "llama2-7b", "--gpu", "a6000")
LARGE = ("--model", "llama3-8b", "--gpu", "rtx4090")
CHAT = ("--trace", "sample:chat")
QUESTIONS: dict[str, tuple[str, ...]] = {
    "defaults": ("plan", *SMALL, "--explain", "--pareto"),
    "offline, cache beyond the GPU": (
        "plan", *LARGE, "--stack", "flexgen", "--prompt", "16k", "--batch", "4", "--offline",
    ),
    "weights beyond the GPU": (
        "plan", "--model", "llama2-13b", "--gpu", "rtx4090", "--stack", "fused", "--offline",
        "--only", "full,offload,flexgen,kvpr", "--prompt", "512", "--generate", "32",
    ),
    "latency with drafts": (
        "plan", *LARGE, "--objective", "latency", "--acceptance", "0.8", "--stack", "fused",
        "--pareto",
    ),
    "cost of several": (
        "plan", "--model", "qwen2.5-7b", "--gpu", "l4,h100", "--objective", "cost", "--weights",
        "fp16,fp8", "--ttft", "1s",
    ),
    "loss allowed": (
        "plan", *SMALL, "--prompt", "8k", "--lossy", "--stack", "fused", "--ttft", "none",
        "--tpot", "none", "--without", "h2o",
    ),
    "loss measured": ("plan", *LARGE, "--prompt", "8k", "--max-loss", "0.02", "--tpot", "30ms"),
    "an engine": ("plan", *LARGE, "--engine", "vllm", "--tp", "1,2", "--explain"),
    "windows": ("plan", "--model", "gemma-2-2b", "--gpu", "t4", "--prompt", "6k", "--offline"),
    "latent": ("plan", "--model", "deepseek-v2-lite", "--gpu", "l40s", "--generate", "512"),
    "no plan: time": ("plan", *SMALL, "--prompt", "32k", "--ttft", "100ms"),
    "no plan: memory": ("plan", "--model", "llama2-70b", "--gpu", "t4", "--host-memory", "64"),
    "little host memory": (
        "plan", *LARGE, "--prompt", "8k", "--batch", "16", "--offline", "--host-memory", "20",
        "--stack", "fused",
    ),
    "a trace": (
        "plan", *LARGE, *CHAT, "--rate", "0.1", "--stack", "vllm", "--only", "full,fp8,kivi",
    ),
    "a trace by classes": (
        "plan", *LARGE, *CHAT, "--rate", "0.2", "--per-class", "--only", "full,fp8", "--stack",
        "fused",
    ),
    "a fleet": (
        "capacity", "--model", "llama3-8b", "--gpus", "l40s,h100", "--ttft", "2s", "--tpot",
        "80ms", *CHAT, "--only", "full", "--rate", "4",
    ),
}  # fmt: skip
TEXTS = ("answer", "command", "seconds", "version", "date", "advice", "why", "reason")
"""Parts of a document that are sentences, or differ from run to run."""


def answered(name: str) -> dict[str, Any]:
    """Exit code, and the numbers and names of what is printed."""
    ended = run(*QUESTIONS[name], "--json")
    if ended.code:
        return {"code": ended.code, "says": ended.err}
    own = {k: v for k, v in json.loads(ended.out).items() if k not in COMMON}
    return {"code": 0, "answer": _numbers(own)}


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items() if not any(t in k for t in TEXTS)}
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return "a sentence" if isinstance(value, str) and value.count(" ") > 6 else value


def write(part: str) -> None:
    """Write what is answered now."""
    now = renewed(PLACE, QUESTIONS, answered, part)
    PLACE.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "")
