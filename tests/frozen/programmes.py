"""The first programmes that some questions are turned into, family of rows by family.

``python -m tests.frozen.programmes [PART of a name]`` writes ``programmes.json`` anew. A change of
it is meant to be seen: say in the commit which rows moved and why.
"""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pulp

from tests.frozen.keeping import renewed
from tests.frozen.plans import CHAT, LARGE, SMALL
from tests.support.commands import run

PLACE = Path(__file__).with_name("programmes.json")
MOST = 4  # of a question
QUESTIONS: dict[str, tuple[str, ...]] = {
    "cache beyond the GPU": (
        "plan", *LARGE, "--stack", "flexgen", "--prompt", "16k", "--batch", "4", "--offline",
    ),
    "weights beyond the GPU": (
        "plan", "--model", "llama2-13b", "--gpu", "rtx4090", "--stack", "fused", "--offline",
        "--only", "full,offload,flexgen,kvpr", "--prompt", "512", "--generate", "32",
    ),
    "little host memory": (
        "plan", *LARGE, "--prompt", "8k", "--batch", "16", "--offline", "--host-memory", "20",
        "--stack", "fused",
    ),
    "windows": ("plan", "--model", "gemma-2-2b", "--gpu", "t4", "--prompt", "6k", "--offline"),
    "the CPU attends": (
        "plan", *LARGE, "--stack", "fused", "--prompt", "12k", "--batch", "24", "--offline",
        "--only", "full,fastdecode,offload",
    ),
    "loss allowed": (
        "plan", *SMALL, "--prompt", "8k", "--lossy", "--stack", "fused", "--batch", "20",
        "--offline",
    ),
    "a trace": (
        "plan", *LARGE, *CHAT, "--rate", "0.1", "--stack", "vllm", "--only", "full,fp8,kivi",
    ),
    "a trace by classes": (
        "plan", *LARGE, *CHAT, "--rate", "0.2", "--per-class", "--only", "full,fp8", "--stack",
        "fused", "--ttft", "2s", "--objective", "latency",
    ),
    "a fleet": (
        "capacity", "--model", "llama3-8b", "--gpus", "l40s,h100", "--ttft", "2s", "--tpot",
        "80ms", *CHAT, "--only", "full", "--rate", "4",
    ),
}  # fmt: skip


class EnoughError(BaseException):
    """Enough programmes were seen."""


def answered(name: str) -> list[dict[str, Any]]:
    """The first programmes of a question."""
    found: list[dict[str, Any]] = []
    solve = pulp.LpProblem.solve

    def noted(problem: pulp.LpProblem, *args: Any, **options: Any) -> Any:
        found.append(summary(problem))
        if len(found) == MOST:
            raise EnoughError
        return solve(problem, *args, **options)

    with patch.object(pulp.LpProblem, "solve", noted), suppress(EnoughError):
        run(*QUESTIONS[name])
    return found


def summary(problem: pulp.LpProblem) -> dict[str, Any]:
    """Rows and variables by the words of their names, with sums that weigh each coefficient."""
    whole = problem.toDict()
    place = {v["name"]: i for i, v in enumerate(whole["variables"])}
    rows: dict[str, list[float]] = {}
    for row in [*whole["constraints"], whole["objective"] | {"constant": 0.0, "sense": 0}]:
        sums = rows.setdefault(family(row["name"]), [0.0] * 6)
        sums[0] += 1
        for entry in row["coefficients"]:
            value = entry["value"] * (1 + place[entry["name"]] % 7)
            sums[1 if value > 0 else 2] += value
        sums[3 if row["constant"] > 0 else 4] += row["constant"]
        sums[5] += row["sense"]
    columns: dict[str, list[float]] = {}
    for v in whole["variables"]:
        sums = columns.setdefault(family(v["name"]), [0.0] * 4)
        sums[0] += 1
        sums[1] += v["lowBound"] or 0.0
        sums[2] += v["upBound"] or 0.0
        sums[3] += v["cat"] == "Integer"
    return {"rows": rows, "variables": columns}


def family(name: str | None) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "N", name or "objective")


def write(part: str) -> None:
    """Write what holds now."""
    now = renewed(PLACE, QUESTIONS, answered, part)
    lines = [f"{json.dumps(name)}: {json.dumps(now[name])}" for name in now]
    PLACE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "")
