"""Plans for equal requests: what was asked of them beside what they give.

    python -m benchmarks.plans [SECTION ...] [--cases N]

tokens    lossless tokens per second of offline batches on the stack `fused`
defaults  default plans of 37 GPUs for four workloads: none with TPOT over 0.5 s or TTFT over 60 s
gamma     drafts per round from QuantSpec's table 6: measured speed beside the best row's
loss      what `--max-loss 0.05` admits on the models of the papers
gaps      lower bound of the chosen plan against its replay, 24 offline cases
bounds    lower bounds of random mixes against their replay
optimum   mixes in the order of their bounds against every assignment replayed, on few layers
fits      a plan wherever some setting fits
size      80 layers, 40 options, 12 batches

`--cases N` sets how many random cases are tried.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations_with_replacement, permutations, product

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import hardware_names, load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.options import ENGINE_SHARE
from kvsim.planner.alternatives import NoPlanError
from kvsim.planner.arrangements import Arrangement, Use
from kvsim.planner.costs import FAMILIES, Option, Shares, placement_options
from kvsim.planner.milp import Programme, Streaming, solve_programme
from kvsim.planner.placement import Coefficients
from kvsim.planner.plan import make_plan
from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT, PlanLimits, Workload
from kvsim.prediction.generate import Prediction
from kvsim.quality.acceptance import from_rates
from kvsim.quality.evidence import evidence
from kvsim.techniques import parse
from tests.support.mixes import bound_over_replay, touched

TOKENS = (
    ("opt-30b", "a6000", 32, 1024, 64, 15.3),
    ("opt-30b", "a100-40g", 64, 1024, 128, 20.7),
    ("opt-66b", "a100-80g", 64, 512, 32, 15.3),
    ("lwm-text-chat-128k", "a6000", 1, 128000, 90, 0.61),
    ("llama2-7b", "a6000", 64, 3500, 500, 57.0),
    ("opt-13b", "a100-40g", 64, 1024, 32, 95.0),
    ("llama3.1-70b", "h100", None, 4000, 256, 31.4),
    ("llama3.1-8b", "rtx4090", 1, 128000, 512, 2.08),
)
GAPS = (  # of one batch from an idle GPU; without a batch it is chosen
    *(case[:5] for case in TOKENS),
    ("llama3.1-8b", "rtx4090", None, 128000, 500),
    ("llama2-7b", "a6000", None, 2048, 128),
    ("llama2-7b", "t4", None, 512, 128),
    ("llama2-7b", "a6000", 128, 1000, 100),
    ("llama2-13b", "rtx4090", 4, 2048, 64),
    ("opt-6.7b", "rtx4090", 48, 1024, 64),
    ("opt-13b", "l4", 16, 512, 64),
    ("opt-30b", "rtx4090", 4, 512, 32),
    ("mistral-7b-v0.2", "l40s", 40, 16000, 128),
    ("qwen2.5-7b", "t4", 8, 8192, 64),
    ("qwen2.5-32b", "a100-40g", None, 4096, 256),
    ("gemma-3-12b", "l4", 8, 8192, 64),
    ("mixtral-8x7b", "rtx4090", 16, 1024, 64),
    ("llama3.1-70b", "rtx4090", 1, 2048, 16),
    ("llama3-8b", "h100", None, 1024, 1),
    ("llama3-8b", "a6000", 2, 100000, 64),
)
WORKLOADS = (
    ("llama3.1-8b", 2048, 128),
    ("llama3.1-8b", 32768, 512),
    ("qwen2.5-32b", 4096, 256),
    ("llama3.1-70b", 4096, 256),
)
TABLE_6 = {  # QuantSpec, table 6: gamma -> accepted [%], tokens/s
    "PG19": {1: (91.88, 41.52), 2: (89.88, 44.51), 4: (83.17, 43.84), 6: (77.07, 41.88)},
    "Multi-LexSum": {1: (96.58, 42.83), 2: (96.61, 47.51), 4: (95.59, 49.47), 6: (91.23, 49.62)},
    "InfiniteBench": {1: (93.83, 42.01), 2: (94.38, 46.74), 4: (90.33, 47.30), 6: (82.13, 45.51)},
    "LexSum, LWM": {1: (95.94, 42.79), 2: (95.06, 47.10), 4: (92.55, 48.15), 6: (87.73, 48.2)},
}  # fmt: skip


def deployment(model: str, gpu: str, stack: str = "fused") -> Deployment:
    return Deployment(load_model(model), load_hardware(gpu), load_stack(stack))


def whole(d: Deployment) -> PlanLimits:
    return PlanLimits(d.hardware.gpu_memory, d.hardware.host_memory)


def tokens(_: int) -> None:
    for model, gpu, batch, prompt, generate, asked in TOKENS:
        d, began = deployment(model, gpu), time.process_time()
        w = Workload(prompt, generate, batch)
        plan = make_plan(d, w, "throughput", whole(d), error=0.0)  # nothing given up
        p, gap = plan.solver.optimum, plan.solver.gap
        print(
            f"{model} {gpu} batch {float(p.batch[0]):.0f} {prompt}/{generate}: asked {asked}, "
            f"{float(p.output_tok_s[0]):.4g} tok/s, TTFT {float(p.ttft_s[0]):.3g} s, gap of the "
            f"choice {gap if gap is None else round(gap, 4)}, "
            f"{time.process_time() - began:.2f} s of CPU; {str(p.technique)[:90]}"
        )


def gaps(_: int) -> None:
    found = []
    for model, gpu, batch, prompt, generate in GAPS:
        d, began = deployment(model, gpu), time.process_time()
        w = Workload(prompt, generate, batch)
        plan = make_plan(d, w, "throughput", whole(d), error=0.0)  # nothing given up
        gap = plan.solver.gap
        if gap is not None:
            found.append(gap)
        batch = float(plan.choice.batch[0])
        print(
            f"{model} {gpu} batch {batch:.0f} {prompt}/{generate}: gap "
            f"{'none' if gap is None else f'{gap:.2%}'}, {plan.solver.given_up:.2%} given up to be "
            f"simple, {time.process_time() - began:.2f} s of "
            f"CPU; {str(plan.choice.technique)[:110]}"
        )
    print(
        f"{len(found)} chosen plans: gap {np.median(found):.2%} at the median, "
        f"{max(found):.2%} at worst (asked: 1 %, 3 %)"
    )


def defaults(cases: int) -> None:
    rows = [(gpu, *w) for gpu in hardware_names() for w in WORKLOADS]
    worst_tpot = worst_ttft = 0.0
    none = helped = planned = 0
    for gpu, model, prompt, generate in rows[:: max(1, len(rows) // cases)]:
        d = deployment(model, gpu)
        h = d.hardware
        limits = PlanLimits(ENGINE_SHARE * h.gpu_memory, h.host_memory, DEFAULT_TTFT, DEFAULT_TPOT)
        try:
            plan = make_plan(d, Workload(prompt, generate, service=True), "throughput", limits)
        except NoPlanError as problem:
            none, helped = none + 1, helped + bool(problem.advice)
            print(f"{gpu} {model} {prompt}/{generate}: {str(problem)[:150]}")
            continue
        planned += 1
        worst_tpot = max(worst_tpot, float(plan.choice.tpot_s[0]))
        worst_ttft = max(worst_ttft, float(plan.choice.ttft_s[0]))
    print(
        f"{planned} plans, TPOT at most {worst_tpot:.3f} s, TTFT at most {worst_ttft:.2f} s; "
        f"{none} without a plan, {helped} of them with a change that would do"
    )


def gamma(_: int) -> None:
    for text, rows in TABLE_6.items():
        model = "lwm-text-chat-128k" if "LWM" in text or "Inf" in text else "llama2-7b-32k-instruct"
        d = deployment(model, "a6000", "quantspec-llama2")
        positions = from_rates({g: share / 100 for g, (share, _) in rows.items()}, text)
        best, speed = 0, 0.0
        for drafts in range(17):
            t = parse("quantspec").with_rounds(drafts, positions.rate(drafts))
            found = Prediction(t, d, np.ones(1), 8192, 90)
            if float(found.decode_tok_s[0]) > speed:
                best, speed = drafts, float(found.decode_tok_s[0])
        known = sorted(rows)
        measured = float(np.interp(best, known, [rows[g][1] for g in known]))
        top = max(rate for _, rate in rows.values())
        print(f"{text}: gamma {best}, measured there {measured:.2f} of {top:.2f}: "
              f"{measured / top - 1:+.1%} (asked: within 2 %)")  # fmt: skip


def loss(_: int) -> None:
    settings = {
        "StreamingLLM at a quarter": "streamingllm:sink=4,recent=2044",
        "InfLLM at a quarter": "infllm:initial=0,local=1024,k=8",
        "H2O at a quarter": "h2o:heavy=1024,recent=1024",
        "SpeCache, 2 bits, k 64": "specache:bits=2,group=64,k=64",
        "KIVI, 2 bits": "kivi:bits=2,group=32",
    }
    for model in ("llama2-7b", "llama2-13b", "mistral-7b-v0.2", "llama3-8b", "qwen3-8b"):
        for name, text in settings.items():
            found = evidence(parse(text), load_model(model), 8192)
            verdict = "admitted" if found.admitted(0.05, unknown=False) else "refused"
            print(f"{model}: {name}: {verdict}; {found}"[:180])


SCENES = (
    ("llama2-7b", "a6000", 64, 3500, 50), ("opt-13b", "a100-40g", 64, 1024, 32),
    ("llama3.1-8b", "rtx4090", 4, 32000, 64), ("gemma-3-4b", "l4", 8, 1000, 64),
    ("llama2-7b", "h100", 2, 16000, 9), ("qwen2.5-7b", "t4", 6, 700, 2),
    ("gemma-3-12b", "l4", 8, 8192, 64), ("llama2-13b", "rtx4090", 4, 2048, 64),
)  # fmt: skip


BOUNDLESS = 1e18  # bytes


def bounds(cases: int) -> None:
    random, ratios = np.random.default_rng(1), []
    for stack in ("fused", "vllm"):
        for model, gpu, batch, prompt, generate in SCENES:
            d, w = deployment(model, gpu, stack), Workload(prompt, generate, batch)
            c = Coefficients(d, w, np.array([float(batch)]), placement_options(d, halves=True))
            for family in FAMILIES:
                p = c.programme(0, PlanLimits(BOUNDLESS, BOUNDLESS), family)
                p = touched(c, p, random, each=2)
                for _ in range(max(1, cases // (2 * len(SCENES) * len(FAMILIES)))):
                    ratios.append(bound_over_replay(c, p, random))
    found = np.array(ratios)
    quantiles = np.round(np.percentile(found[:, 1], [0, 10, 50, 90]), 4)
    print(
        f"{len(found)} mixes of two placements in a random order: {np.sum(found > 1 + 1e-9)} "
        f"bounds above the replay, the highest by {found.max() - 1:.1e} (asked: never above); "
        f"bound over replay of decoding at the quantiles 0, 0.1, 0.5, 0.9: {quantiles}"
    )


def optimum(cases: int) -> None:
    grid = [Option("full", (Shares(),)), Option("copied0", (Shares(0.25),)),
            Option("copied1", (Shares(0.5),)), Option("copied2", (Shares(1.0),)),
            Option("recomputed0", (Shares(1.0, 0.25),)),
            Option("recomputed1", (Shares(1.0, 0.5),))]  # fmt: skip
    worst, seed = 0.0, 0
    for seed in range(cases):
        random = np.random.default_rng(seed)
        layers, options = int(random.integers(2, 5)), int(random.integers(2, 5))
        some = [grid[0], *(grid[i] for i in random.choice(range(1, 6), options - 1, replace=False))]
        m = load_model("llama2-7b")
        m = replace(m, layout=((m.layout[0][0][:1], layers),))
        d = Deployment(m, load_hardware("a6000"), load_stack("fused"))
        batch = float(random.integers(4, 64))
        w = Workload(int(random.integers(256, 8192)), 2, int(batch))
        c = Coefficients(d, w, np.array([batch]), some)
        full = float(w.predict(parse("full"), d, c.batches).gpu_bytes[0])
        limits = PlanLimits(full * float(random.uniform(0.6, 1.1)), d.hardware.host_memory)
        p = c.programme(0, limits, frozenset({"full", "copied", "recomputed"}))
        known: dict[tuple[str, ...], float] = {}
        args = c, d, w, limits, {o.name: o for o in some}, known

        bounds: list[tuple[float, tuple[str, ...]]] = []
        for use in combinations_with_replacement(p.names, layers):
            counts = np.array([[float(use.count(name))] for name in p.names])
            with suppress(InfeasibleError):
                bounds.append((solve_programme(p, counts=counts).bound, use))
        best = np.inf
        for bound, use in sorted(bounds):
            if bound >= best:
                break
            best = min(best, *(replayed(order, *args) for order in set(permutations(use))))
        every = min(replayed(x, *args) for x in product([o.name for o in some], repeat=layers))
        if np.isfinite(every):
            worst = max(worst, abs(best / every - 1))
    print(f"{seed + 1} instances: the programme's optimum is off by {worst:.1e} at worst")


def replayed(
    names: tuple[str, ...],
    c: Coefficients,
    d: Deployment,
    w: Workload,
    limits: PlanLimits,
    options: dict[str, Option],
    known: dict[tuple[str, ...], float],
) -> float:
    if names not in known:
        each = [Use(options[n].corners[0], options[n].parts, 1) for n in names]
        t = Arrangement((tuple(each),)).technique(d, w.prompt)
        found = w.predict(t, d, c.batches)
        seconds = w.batch * w.generate / float(found.output_tok_s[0])  # type: ignore[operator]
        known[names] = seconds if float(found.gpu_bytes[0]) <= limits.gpu_memory else np.inf
    return known[names]


def fits(cases: int) -> None:
    random, false = np.random.default_rng(3), 0
    models = ["llama3.1-8b", "llama2-13b", "opt-30b", "llama3.1-70b", "qwen2.5-32b", "mixtral-8x7b"]
    gpus, found, none = ["rtx4090", "a6000", "t4", "a100-40g", "l4", "h100"], 0, 0
    for _ in range(cases):
        d = deployment(str(random.choice(models)), str(random.choice(gpus)))
        batch = int(random.integers(1, 8)) if random.random() < 0.5 else int(random.integers(8, 65))
        w = Workload(int(random.integers(128, 8192)), int(random.integers(2, 64)), batch)
        try:
            make_plan(d, w, "throughput", whole(d))
            found += 1
        except (InfeasibleError, InputError):
            none += 1
            corners = [
                f"place:host_share={h},weights_host={s}" for h in (0, 1) for s in (0, 0.5, 1)
            ]
            tried = [w.predict(parse(t), d, np.array([float(batch)])) for t in corners]
            false += any(bool(p.fits[0]) for p in tried)
    print(f"{cases} cases: {found} plans, {none} without, {false} of these although a setting fits")


def size(_: int) -> None:
    random = np.random.default_rng(0)
    layers, options, took, worst = 80, 40, 0.0, 0.0
    for _ in range(12):
        gpu = random.uniform(0.1, 1.0, (1, options, 1))
        nothing = Streaming(np.zeros((3, 5, 1)), np.zeros(1), np.zeros(1), 0.0, most=0.0)
        p = Programme(
            names=tuple(f"o{i}" for i in range(options)), option_of=np.arange(options),
            layers=np.array([layers]), resources=("gpu", "h2d", "d2h", "cpu", "chain"),
            phases=("prefill", "round0", "round1"),
            seconds=random.uniform(0.1, 1.0, (3, 5, options, 1)) / gpu[None] ** 0.5,
            head=np.zeros((3, 5)), weight=np.array([1.0, 64.0, 64.0]), gpu=gpu, host=1 - gpu,
            once_gpu=random.uniform(0, 1, (1, 1, options)), once_host=np.zeros((1, 1, options)),
            streaming=nothing, memory=(0.5 * layers, layers),
        )  # fmt: skip
        began = time.process_time()
        mix = solve_programme(p, gap=0.01 / 1.01)  # of the bound; HiGHS counts it of the objective
        took += time.process_time() - began
        worst = max(worst, mix.objective / mix.bound - 1)
    print(f"12 batches of {layers} x {options}: {took:.2f} s of CPU, gap at most {worst:.2%} "
          f"(asked: 1 % in 5 s)")  # fmt: skip


SECTIONS: dict[str, Callable[[int], None]] = {
    "tokens": tokens, "gaps": gaps, "defaults": defaults, "gamma": gamma, "loss": loss,
    "bounds": bounds, "optimum": optimum, "fits": fits, "size": size,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--cases", type=int, default=300)
    given = parser.parse_args()
    for name in given.sections or SECTIONS:
        print(f"== {name}")
        SECTIONS[name](given.cases)


if __name__ == "__main__":
    main()
