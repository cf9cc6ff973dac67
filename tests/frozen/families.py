"""The families of rows that questions need, of all their programmes to the last one.

``python -m tests.frozen.families [PART of a name]`` writes ``families.json`` anew.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pulp

from tests.frozen import programmes
from tests.frozen.keeping import renewed
from tests.frozen.plans import CHAT
from tests.support.commands import run

PLACE = Path(__file__).with_name("families.json")
QUESTIONS: dict[str, tuple[str, ...]] = programmes.QUESTIONS | {
    "a fleet with limits": (
        "capacity", "--model", "llama3-8b", "--gpus", "l40s,h100", "--ttft", "2s", "--tpot",
        "80ms", *CHAT, "--only", "full", "--rate", "4", "--tp", "1", "--max-gpus", "30",
        "--max-power", "20", "--max-host", "900", "--configurations", "1", "--failures", "1",
    ),
    "a fleet over the day": (
        "capacity", "--model", "llama3-8b", "--gpus", "l40s,h100", "--ttft", "2s", "--tpot",
        "80ms", *CHAT, "--only", "full", "--rate", "4", "--tp", "1", "--max-gpus", "h100=8",
        "--schedule",
    ),
}  # fmt: skip


def of(name: str | None) -> str:
    """The family of a row: its name without numbers."""
    return programmes.family(name)


def answered(name: str) -> list[str]:
    """The families of all programmes of a question."""
    found: set[str] = set()
    solve = pulp.LpProblem.solve

    def noted(problem: pulp.LpProblem, *args: Any, **options: Any) -> Any:
        found.update(of(row["name"]) for row in problem.toDict()["constraints"])
        return solve(problem, *args, **options)

    with patch.object(pulp.LpProblem, "solve", noted):
        answer = run(*QUESTIONS[name])  # which may be that there is no plan
    assert found, answer
    return sorted(found)


def write(part: str) -> None:
    """Write what holds now."""
    now = renewed(PLACE, QUESTIONS, answered, part)
    lines = [f"{json.dumps(name)}: {json.dumps(now[name])}" for name in now]
    PLACE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "")
