"""Fleets of `kvsim capacity --sure 0.9` on days that their search has not seen.

    python -m benchmarks.days FOLDER [TASK ...]

FOLDER holds the traces of Azure and Mooncake; tasks are numbers from 1, all if none is named. The
fleet is played on 200 days that are drawn from its trace as those of the search are, with times as
predicted and with errors of the times drawn as the search draws them. Asked: the targets are kept
on 85 % of the days.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from kvsim.api.fleets import build_question
from kvsim.api.traffic import read_traffic
from kvsim.options import Inputs
from kvsim.planner.fleet.answer import make_capacity
from kvsim.planner.fleet.play import play
from kvsim.planner.fleet.search import FleetSolver

DAYS, FIRST = 200, 1001  # the search draws its days from 1 on
AZURE, MOONCAKE = "azure_conv_2023.csv", "mooncake_conversation_trace.jsonl"
FOUR, QUICK = "a6000,l40s,a100-80g,h100", {"ttft": "2s", "tpot": "100ms"}
TASKS: tuple[dict[str, object], ...] = (
    {"trace": "sample:chat", "model": "llama3.1-8b", "gpus": FOUR, **QUICK},
    {"trace": "sample:code", "model": "llama3.1-8b", "gpus": FOUR, **QUICK},
    {"trace": "sample:conversation", "model": "llama3.1-8b", "gpus": "l40s,h100", **QUICK},
    {"trace": AZURE, "model": "llama3.1-8b", "gpus": FOUR, **QUICK},
    {"trace": AZURE, "model": "llama3.1-8b", "gpus": FOUR, "failures": 1, "headroom": 0.2, **QUICK},
    {"trace": AZURE, "model": "llama3.1-70b", "weights": "fp8", "gpus": "a100-80g,h100,h200",
     **QUICK},
    {"trace": MOONCAKE, "model": "llama3.1-8b", "gpus": "l40s,h100", "ttft": "10s",
     "tpot": "100ms"},
)  # fmt: skip


def check(task: dict[str, object]) -> tuple[str, float, float]:
    """The fleet, and the share of days on which it keeps the targets, also with errors of times."""
    inputs = Inputs("capacity", task)
    question = build_question(inputs, read_traffic(inputs))
    answer = make_capacity(question)
    random = np.random.default_rng(FIRST)
    spread = FleetSolver(question, lambda _: None).spread(answer.fleet)
    kept = np.zeros(2)
    for day in range(FIRST, FIRST + DAYS):
        traffic = question.traffic.varied(answer.load, day)
        slow = spread.slowdown(float(random.uniform(0.001, 0.999)))
        for place, slowdown in enumerate((1.0, slow)):
            kept[place] += play(traffic, answer.fleet, slowdown).meets(answer.targets)
    name = (
        f"{answer.fleet.name}, {answer.fleet.cost:.2f} USD/h{' (short)' * bool(answer.shortfall)}"
    )
    return name, *(kept / DAYS).tolist()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    every = range(1, len(TASKS) + 1)
    options.add_argument("task", type=int, nargs="*", help=f"1 to {len(TASKS)}; all if omitted")
    chosen = options.parse_args()
    if wrong := [x for x in chosen.task if x not in every]:
        options.error(f"task {wrong[0]}: expected 1 to {len(TASKS)}")
    for number in chosen.task or every:
        task, start = dict(TASKS[number - 1]), time.process_time()
        if not str(task["trace"]).startswith("sample:"):
            task["trace"] = str(chosen.folder / str(task["trace"]))
        name, days, both = check(task)
        cpu = time.process_time() - start
        print(f"{number}: {name}: {100 * days:.1f} % of days, {100 * both:.1f} % with errors of "
              f"times, {cpu:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
