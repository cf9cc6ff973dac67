"""GPUs that `kvsim capacity` says a described traffic needs, against `kvsim simulate` by bisection.

    python -m benchmarks.sizings [--count 30] [--seed 1] [--reuse]

Each question is drawn: a model, a card, how long prompts and answers are, requests per second, and
targets of TTFT and TPOT that 99 % of the requests must be within. Capacity answers for predicted
times and the drawn traffic itself, not for other days, with the pass budget given. The replicas
with which `simulate` first keeps both targets are bisected with the batch limit and the router that
capacity chose. Asked: GPUs equal in 28 of 30, and one more at most in the others.

With `--reuse` prompts repeat earlier ones, in turn: none of their tokens, half of them, 90 %, or
all of a conversation of four turns; prefixes are kept in GPU memory alone. Asked: equal in all.
"""

import argparse
import contextlib
import io
import time
from collections import Counter
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np

from kvsim.api import simulate
from kvsim.api.fleets import build_question
from kvsim.api.traffic import read_traffic
from kvsim.options import Inputs
from kvsim.planner.fleet.search import FleetSolver

CARDS = {"llama3.1-8b": ("l40s", "a100-80g", "h100"), "qwen2.5-32b": ("h200", "b200"),
         "mistral-7b": ("l40s", "a6000", "h100")}  # fmt: skip
PROMPTS, ANSWERS, RATES = (300, 1000, 3000, 8000), (50, 200, 500), (1, 3, 8, 20)
TTFTS, TPOTS = ("1s", "3s", "10s"), ("60ms", "100ms", "200ms")
REUSE: tuple[dict[str, Any], ...] = (
    {},
    {"hit_rate": 0.5},
    {"hit_rate": 0.9},
    {"turns": 4, "think": "20s", "generate": 50},  # prompts hold the earlier answers
)
"""How prompts repeat earlier ones."""
MOST = 512  # replicas that are tried
BELOW = 0.9  # of what bisection finds, from which every count is played

Question = dict[str, Any]
"""Options that both commands take."""


def draw(random: np.random.Generator) -> Question:
    """One question, by options that both commands take."""
    model = str(random.choice(list(CARDS)))
    drawn = {
        name: random.choice(some).item()
        for name, some in (("prompt", PROMPTS), ("generate", ANSWERS), ("rate", RATES),
                           ("ttft", TTFTS), ("tpot", TPOTS), ("max_tokens", (2048, 8192)))
    }  # fmt: skip
    return {"model": model, "gpu": str(random.choice(CARDS[model])), "tp": 1, **drawn}


def size(question: Question) -> tuple[int, Question]:
    """GPUs of the cheapest fleet, 0 if none keeps the targets, and the settings of its replicas."""
    given = {k: v for k, v in question.items() if k != "gpu"}
    given |= {"gpus": question["gpu"], "percentile": 99, "only": "full"}
    given |= {"host_cache": 0, "pools": "no"} if {"hit_rate", "turns"} & given.keys() else {}
    inputs = Inputs("capacity", given)
    asked = build_question(inputs, read_traffic(inputs))
    asked = replace(asked, sure=0.0)
    fleet = FleetSolver(asked, lambda _: None).solve(asked)
    if fleet is None:
        return 0, {}
    (kind,) = (x for x, n in zip(fleet.kinds, fleet.replicas, strict=True) if n)
    rules = kind.costs.rules
    settings = {"max_seqs": rules.max_seqs, "route": kind.route}
    return int(fleet.total("gpus")), settings | {"prefix_caching": rules.prefix_caching}


def find_fewest(question: Question) -> int:
    """The fewest replicas that keep both targets in `simulate`; 0 if none do.

    Close to the targets one replica more may keep them worse, by chance, so that bisection ends at
    one of several changes from missed to kept: counts up to a tenth below it are played, too.
    """
    tried: dict[int, bool] = {}

    def keeps(count: int) -> bool:
        if count not in tried:
            played = simulate(**question, replicas=count, technique="full", percentile=99)
            tried[count] = 100 * played.rows[0]["good_share"] >= 99
        return tried[count]

    low, high = 0, 1
    while not keeps(high):
        low, high = high, 2 * high
        if high > MOST:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return next((n for n in range(ceil(BELOW * high), high) if keeps(n)), high)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=30)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--reuse", action="store_true")
    chosen = options.parse_args()
    random, differences = np.random.default_rng(chosen.seed), Counter[int]()
    for number in range(chosen.count):
        question = draw(random) | (REUSE[number % len(REUSE)] if chosen.reuse else {})
        began = time.process_time()
        with contextlib.redirect_stderr(io.StringIO()):
            found, settings = size(question)
            played = find_fewest(question | settings)
        differences[found - played] += 1
        words = " ".join(f"{k}={v}" for k, v in (question | settings).items())
        took = time.process_time() - began
        print(f"{number + 1}: {found} {played} {words} ({took:.0f} s)", flush=True)
    said = ", ".join(f"{n} by {more:+d}" for more, n in sorted(differences.items()) if more)
    asked = "all" if chosen.reuse else "28 of 30, and +1"
    print(f"equal in {differences[0]} of {chosen.count}; off: {said or 'none'} (asked: {asked})")


if __name__ == "__main__":
    main()
