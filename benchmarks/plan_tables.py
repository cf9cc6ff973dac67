"""Long tables of plans for equal requests, in slices that a later call goes on with.

    python -m benchmarks.plan_tables SECTION [--cases N] [--into FILE.jsonl]

settings  lossless settings by chance, none of which may beat the plan by more than 0.5 %
changes   more memory, bandwidth or time: never worse, and as much better as the price says

Every case is a line of the file; cases that it has already are not run again.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plans import GAPS, deployment, whole
from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import NoPlanError
from kvsim.planner.plan import ChosenPlan, make_plan
from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT, GIB, PlanLimits, Workload
from kvsim.planner.sensitivity import MIN_PRICE, with_faster_links
from kvsim.prediction.generate import Prediction
from kvsim.techniques.axes.base import Term
from kvsim.techniques.papers.fastdecode import Fastdecode
from kvsim.techniques.papers.kvpr import Kvpr, Place
from kvsim.techniques.technique import Layers, Technique

SETTINGS = 10_000  # of each scenario
TOGETHER = 50  # that differ in shares of the cache alone
SCENARIOS = (
    *GAPS,
    ("llama2-13b", "a6000", 96, 512, 128), ("llama3.1-8b", "l4", 16, 8192, 64),
    ("qwen2.5-7b", "rtx4090", None, 16384, 128), ("mistral-7b-v0.2", "a100-40g", 128, 4096, 64),
    ("opt-66b", "h100", 8, 1024, 64), ("llama2-70b", "a100-80g", 16, 2048, 32),
)  # fmt: skip
MODELS = ("llama3.1-8b", "llama2-13b", "opt-30b", "qwen2.5-7b", "gemma-3-4b", "mistral-7b-v0.2")
GPUS = ("rtx4090", "a6000", "t4", "a100-40g", "l4", "h100")
CHANGES = (
    "one more GiB of GPU memory", "16 GiB more host memory", "a 10 % looser TTFT",
    "a 10 % looser TPOT", "10 % more host link bandwidth", "10 % more host memory bandwidth",
    "10 % more GPU memory bandwidth",
)  # fmt: skip

Line = dict[str, Any]


def settings(case: int) -> Line | None:
    """One scenario's random settings beside its plan."""
    if case >= len(SCENARIOS):
        return None
    model, gpu, batch, prompt, generate = SCENARIOS[case]
    d, random = deployment(model, gpu), np.random.default_rng(case)
    w = Workload(prompt, generate, batch)
    plan = make_plan(d, w, "throughput", whole(d), error=0.0)
    best = plan.solver.optimum
    goal, tried, fit, top, which = float(best.output_tok_s[0]), 0, 0, 0.0, ""
    near = int(best.batch[0])
    while tried < SETTINGS:
        by_chance = random.random() < 0.5
        t, at = _setting(random, d, w, near) if by_chance else _beside(random, best, w)
        tried += TOGETHER
        if t.refuses(d):
            continue
        try:
            found = w.predict(t, d, np.array([float(at)]))
        except InputError:
            continue
        speed = np.where(found.fits, found.output_tok_s, 0.0).ravel()
        fit += int((speed > 0).sum())
        if speed.max(initial=0.0) > top:
            top = float(speed.max())
            which = f"{t.rows()[int(speed.argmax())]} batch {at}"
    return {
        "scenario": f"{model} {gpu} {batch} {prompt}/{generate}", "tried": tried, "fit": fit,
        "best": top / goal - 1, "which": which, "given up": plan.solver.given_up,
        "plan": str(best.technique),
    }  # fmt: skip


def _setting(
    random: np.random.Generator, d: Deployment, w: Workload, near: int
) -> tuple[Technique, int]:
    """Settings of one or two ranges of layers, which differ in shares of the cache."""
    parts = int(random.choice([1, 1, 1, 2, 2, 4]))
    batch = w.batch if w.batch is not None else max(1, round(near * random.uniform(0.3, 1.2)))
    batch = batch if w.batch is not None else max(parts, batch // parts * parts)
    parts = parts if batch % parts == 0 else 1
    layers = sum(count * len(block) for block, count in d.model.layout)
    if random.random() < 0.5:
        return Technique((Layers((_place(random, w.prompt, parts),)),)), batch
    first = int(random.integers(1, layers))
    other = int(random.choice([1, parts]))
    every = (
        Layers((_place(random, w.prompt, other),), 0, first - 1),
        Layers((_place(random, w.prompt, parts),), first, layers - 1),
    )
    return Technique(every if random.random() < 0.7 else _turned(every, layers)), batch


def _beside(random: np.random.Generator, best: Prediction, w: Workload) -> tuple[Technique, int]:
    """The plan's own settings, each a little off, its ranges of layers some layers longer."""
    batch, every, first = int(best.batch[0]), [], 0
    if w.batch is None:
        batch = max(2, batch + 2 * int(random.integers(-4, 5)))
    count = sum(n * len(block) for block, n in best.deployment.model.layout)
    ranges = best.technique.layers
    for i, some in enumerate(ranges):
        term = some.terms[0]
        last = count - 1
        if i + 1 < len(ranges):
            assert some.last is not None
            last = min(max(some.last + int(random.integers(-2, 3)), first), count - len(ranges) + i)
        every.append(Layers((_moved(random, term, w.prompt),), first, last))
        first = last + 1
    if len(every) == 1:
        return Technique((Layers(every[0].terms),)), batch
    return Technique(tuple(every)), batch


def _moved(random: np.random.Generator, term: Term, prompt: int) -> Place:
    """A placement near a technique's, in shares of the cache and of the weights."""
    cpu = 1.0 if isinstance(term, Fastdecode) else float(getattr(term, "cpu_share", 0.0))
    low, split = float(getattr(term, "host_share", 0.0)), getattr(term, "split", 0.0)
    low = 1.0 if isinstance(term, Kvpr) else low
    size = 0.05 * float(random.choice([0.1, 1.0]))
    host = low + size * random.standard_normal((TOGETHER, 1, 1))
    host = np.clip(host, 0, 1 - cpu) if low or random.random() < 0.3 else 0.0 * host
    near = float(split) / prompt if not isinstance(split, str) else 0.5
    part = np.clip(near + size * random.standard_normal(host.shape), 0, host) if near else 0 * host
    weights = float(getattr(term, "weights_host", 0.0)) + size * float(random.standard_normal())
    return Place(
        host_share=host if host.any() else 0.0,
        split=np.floor(part * prompt) if part.any() else 0.0,
        cpu_share=cpu, weights_host=min(max(weights, 0.0), 1.0),
        parts=2 if isinstance(term, Fastdecode) else int(getattr(term, "parts", 1)),
    )  # fmt: skip


def _turned(every: tuple[Layers, Layers], layers: int) -> tuple[Layers, Layers]:
    """The same ranges with their places exchanged."""
    one, two = every
    last = layers - 1 - one.last if one.last is not None else 0
    return replace(two, first=0, last=last - 1), replace(one, first=last, last=layers - 1)


def _place(random: np.random.Generator, prompt: int, parts: int) -> Place:
    cpu = float(random.choice([0.0, 0.0, 1.0, random.random()]))
    low = _share(random)
    host = np.clip(low + random.choice([0.0, 0.1]) * random.standard_normal((TOGETHER, 1, 1)), 0, 1)
    host = np.minimum(host, 1 - cpu)
    recomputed = random.random() < 0.4
    split = np.floor(host * random.random(host.shape) * prompt) if recomputed else 0.0
    return Place(
        host_share=host if host.any() else 0.0, split=split if np.any(split) else 0.0,
        cpu_share=cpu, weights_host=_share(random), parts=parts,
        states_host=float(random.choice([0.0, 0.0, 1.0])) if parts > 1 and not cpu else 0.0,
    )  # fmt: skip


def _share(random: np.random.Generator) -> float:
    return float(random.choice([0.0, 0.0, 1.0, *random.random(3), 0.2 * random.random()]))


def changes(case: int) -> Line | None:
    """A random question, asked again with more of something."""
    random = np.random.default_rng(case)
    d = deployment(str(random.choice(MODELS)), str(random.choice(GPUS)))
    service, h = bool(random.random() < 0.5), d.hardware
    batch = None if random.random() < 0.5 else int(random.integers(1, 65))
    w = Workload(int(2 ** random.uniform(7, 14)), int(2 ** random.uniform(2, 8)), batch, service)
    limits = PlanLimits(
        h.gpu_memory * float(random.uniform(0.7, 1)), h.host_memory * float(random.uniform(0.2, 1)),
        *((DEFAULT_TTFT, DEFAULT_TPOT) if service else random.uniform((1, 0.05), (60, 1)).tolist()),
    )  # fmt: skip
    change = CHANGES[case % len(CHANGES)]
    line: Line = {"case": f"{d.model.name} {h.name} {w.batch} {w.prompt}/{w.generate}",
                  "service": service, "change": change}  # fmt: skip
    try:
        before = make_plan(d, w, "throughput", limits, error=0.0)
    except (NoPlanError, InfeasibleError, InputError):
        return line | {"plan": False}
    after = make_plan(*_changed(change, d, w, limits), error=0.0)
    gained = _value(after) / _value(before) - 1
    return line | {"plan": True, "gained": gained, "priced": before.prices.get(change),
                   "before": str(before.solver.optimum.technique),
                   "after": str(after.solver.optimum.technique)}  # fmt: skip


def _value(plan: ChosenPlan) -> float:
    return float(plan.solver.optimum.output_tok_s[0])


def _changed(
    change: str, d: Deployment, w: Workload, limits: PlanLimits
) -> tuple[Deployment, Workload, str, PlanLimits]:
    links = {CHANGES[4]: ("h2d", "d2h"), CHANGES[5]: ("dram",), CHANGES[6]: ("hbm",)}
    more = {
        CHANGES[0]: {"gpu_memory": limits.gpu_memory + GIB},
        CHANGES[1]: {"host_memory": limits.host_memory + 16 * GIB},
        CHANGES[2]: {"ttft": 1.1 * limits.ttft}, CHANGES[3]: {"tpot": 1.1 * limits.tpot},
    }  # fmt: skip
    d = with_faster_links(d, links[change]) if change in links else d
    return d, w, "throughput", replace(limits, **more.get(change, {}))


def summed_settings(lines: list[Line]) -> str:
    beaten = [x for x in lines if x["best"] > 0.005]
    worst = max(lines, key=lambda x: x["best"])
    return (
        f"{len(lines)} scenarios, {sum(x['tried'] for x in lines)} settings, "
        f"{sum(x['fit'] for x in lines)} fit: {len(beaten)} plans beaten by more than 0.5 %, the "
        f"best setting {worst['best']:+.2%} ({worst['scenario']}: {worst['which']})"
    )


def summed_changes(lines: list[Line]) -> str:
    planned = [x for x in lines if x["plan"]]
    gained = np.array([x["gained"] for x in planned])
    priced = np.array([x["priced"] if x["priced"] is not None else np.nan for x in planned])
    off = np.abs(np.maximum(gained, 0.0) - priced)
    known = np.isfinite(off)
    large = known & (gained > MIN_PRICE)
    shares = off[large] / gained[large]
    worst = max(0.0, -float(gained.min()))
    return (
        f"{len(lines)} cases, {len(planned)} with a plan: {np.sum(gained < -1e-9)} worse, by "
        f"{worst:.1e} at most; {known.sum()} prices: {np.sum(off[known] > 0.01)} off by "
        f"more than 1 % of the objective, {off[known].max():.4f} at most; of {large.sum()} gains "
        f"above {MIN_PRICE:.1%} {np.sum(shares > 0.01)} off by more than 1 % of the gain itself"
    )


SECTIONS: dict[str, tuple[Callable[[int], Line | None], Callable[[list[Line]], str]]] = {
    "settings": (settings, summed_settings),
    "changes": (changes, summed_changes),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    run, summed = SECTIONS[given.section]
    file: Path = given.into or Path(f"plan_{given.section}.jsonl")
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    with file.open("a") as kept:
        for case in range(len(lines), given.cases):
            began = time.process_time()
            line = run(case)
            if line is None:
                break
            lines.append(line | {"seconds": round(time.process_time() - began, 2)})
            kept.write(json.dumps(lines[-1]) + "\n")
            kept.flush()
    print(summed(lines))


if __name__ == "__main__":
    main()
