"""Ops of real runs as samples: what a technique states, and how long it took.

The points are apart from those that ``kvsim validate`` checks: another batch, other contexts, and
models cut to fewer layers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from kvsim.engine.roofline import all_ops
from kvsim.errors import InputError, first_line
from kvsim.evidence.machine.samples import Sample
from kvsim.evidence.machine.solve import REST
from kvsim.evidence.machine.solve import RUNS_BENCHMARK as NAME
from kvsim.graph import Number, Op, Step
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques.technique import Technique
from kvsim.validate.bench.work import Bench
from kvsim.validate.counts.check import SLACK, RandomPrompts, representative
from kvsim.validate.machine import refusals
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights
from kvsim.validate.times.timed import Timing, issuing, run_timed

SUITE_CPU_MODELS = (("smollm2-135m", 2), ("smollm2-135m", 8), ("smollm2-1.7b", 2))
BATCH, PROMPTS = 2, (192, 640)
SUITE_GPU_MODELS = (("smollm2-135m", 2), ("smollm2-135m", 8), ("llama2-7b", 2))
GPU_BATCH, GPU_PROMPTS = 4, (1536, 6144)  # large enough for kernels to be more than their floors
SUITE_GENERATED = 7
SUITE_REPEATS = 3
UNTIMED = ("h2d", "d2h", "cpu")  # what runs beside compute is seen by who waits for it


def samples(
    place: Bench,
    done: Mapping[str, Sequence[Sample]],
    left: Callable[[], float],
    say: Callable[[str], None],
) -> Iterator[tuple[str, list[Sample]]]:
    """Every op of every technique at a few points, technique by technique.

    Points share the time that is left. Plain attention comes first, as the time of steps and
    layers rests on it; what no time is left for is said.
    """
    # any machine does: it weighs what a technique does, not what an op costs
    cpu = place.on_cpu
    hardware, stack = load_hardware("a6000"), load_stack("kvsim")
    if cpu:  # the kernels that were counted are those that a GPU is given
        stack = replace(stack, time=replace(stack.time, counted_launches=False))
    models = (SUITE_CPU_MODELS if cpu else SUITE_GPU_MODELS)[: place.pick(2, 3)]
    batch = BATCH if cpu else GPU_BATCH
    prompts = (PROMPTS if cpu else GPU_PROMPTS)[: place.pick(1, 2)]
    points = len(models) * len(prompts)
    for model, layers in models:
        arch = load_architecture(model).cut(layers)
        d = Deployment(arch.model, hardware, stack)
        weights = random_weights(arch, place.device, place.half)
        for prompt in prompts:
            work = RandomPrompts(batch, prompt, SUITE_GENERATED)
            decoder = Decoder(arch, weights, prompt + SUITE_GENERATED + SLACK, deployment=d)
            points -= 1
            others = left() * points / (points + 1)  # time of the points behind this one
            where = f"{model} cut to {layers} layers, prompt {prompt}"
            for t in representative(arch.model, work):
                part = f"{t}, {where}"
                if f"{NAME}: {part}" in done:
                    continue
                if left() < others and t.name != "full":
                    say(f"{NAME}: {t.name}, {where}: left out, as time is up")
                    continue
                say(f"{NAME}: {t.name}, {where}")
                try:
                    host, runs = _timed(decoder, t, work, place.pick(2, SUITE_REPEATS))
                except refusals(InputError) as problem:
                    say(f"{NAME}: skipped {t.name}: {first_line(problem, 80)}")
                    yield part, []
                else:
                    yield part, list(of_runs(d, work, runs, host))


def _timed(
    decoder: Decoder, technique: Technique, work: RandomPrompts, repeats: int
) -> tuple[Timing | None, list[Timing]]:
    """A run that tells the host's times, where there is a GPU, and some that tell the ops'.

    The first run warms up: kernels are compiled and chosen in it.
    """
    run_timed(decoder, technique, work, by_op=True)
    if decoder.device.type == "cpu":
        return None, [run_timed(decoder, technique, work, by_op=True) for _ in range(repeats)]
    host = run_timed(decoder, technique, work, by_op=True)
    busy = issuing(host)
    return host, [run_timed(decoder, technique, work, True, busy) for _ in range(repeats)]


def of_runs(
    deployment: Deployment, work: RandomPrompts, runs: list[Timing], host: Timing | None = None
) -> Iterator[Sample]:
    """Samples of one workload's ops: the prompt's pass, and rounds that are one pass each.

    Parameters
    ----------
    host : a run whose ops tell what the host takes to issue them, where there is a GPU.
    """
    t = runs[0].technique
    point = prefill_point(work.batch, work.prompt, work.generate)
    prompts = [run.passes[0].seconds() for run in runs]
    hosts = [host.passes[0].hosts] if host else []
    yield from _samples(
        deployment, t, work, "prefill", t.prefill(deployment, point), [[p] for p in prompts], hosts
    )
    middle = work.generate / 2
    cycle = t.cycle(deployment, decode_point(work.batch, work.prompt, work.generate, middle))
    if len(cycle.steps) > 1 or {p.kind for p in runs[0].passes[1:]} - {"between", "decode"}:
        return
    rounds = [[p.seconds() for p in run.passes if p.kind == "decode"] for run in runs]
    hosts = [p.hosts for p in host.passes if p.kind == "decode"] if host else []
    yield from _samples(deployment, t, work, "decode", cycle.steps[0], rounds, hosts)
    own = [host] if host else runs
    within = [hosts] if host else rounds
    rest = [
        median(took - sum(ops.values()) for took, ops in zip(run.computing, each, strict=True))
        for run, each in zip(own, within, strict=True)
    ]
    if min(rest) > 0:
        case = _case(deployment, t, work, "decode") | {"op": REST}
        issued = median(rest) if host else 0.0
        yield Sample(NAME, case, Op(REST, launches=0.0), tuple(rest), issued)


def _samples(
    deployment: Deployment,
    technique: Technique,
    work: RandomPrompts,
    phase: str,
    step: Step,
    runs: list[list[dict[str, float]]],
    hosts: list[dict[str, float]],
) -> Iterator[Sample]:
    """One sample per op that is stated once per layer or in the head, as it was timed there."""
    for name, (op, times) in ops_by_name(step).items():
        found = [[ops[name] / times for ops in passes if name in ops] for passes in runs]
        if op.stream not in UNTIMED and all(found):
            case = _case(deployment, technique, work, phase) | {"op": name}
            issued = [ops[name] / times for ops in hosts if name in ops]
            host_s = median(issued) if issued else 0.0
            yield Sample(NAME, case, op, tuple(max(median(f), 1e-9) for f in found), host_s)


def ops_by_name(step: Step) -> dict[str, tuple[Op, int]]:
    """Ops with work of a step by name, scalars, with how often they run; equal in all layers.

    Ops that differ between layers are left out, as their times are only known together.
    """
    ops: dict[str, tuple[Op, int]] = {}
    mixed = set()
    for op, times in all_ops(step):
        plain = _scalar(op)
        if not (plain.flops or any(plain.bytes.values())):
            continue
        known, before = ops.get(op.name, (plain, 0))
        mixed |= {op.name} if known != plain else set()
        ops[op.name] = known, before + times
    return {name: pair for name, pair in ops.items() if name not in mixed}


def _scalar(op: Op) -> Op:
    def scalar(n: Number) -> float:
        return float(np.ravel(n)[0])

    moved = {channel: scalar(n) for channel, n in op.bytes.items()}
    return replace(
        op,
        flops=scalar(op.flops),
        bytes=moved,
        rows=scalar(op.rows),
        size=scalar(op.size),
        launches=scalar(op.launches),
        fixed=0.0,
        after=(),
        prefetch=False,
        sync=False,
    )


def _case(
    deployment: Deployment, technique: Technique, work: RandomPrompts, phase: str
) -> dict[str, object]:
    return {
        "technique": str(technique),
        "phase": phase,
        "model": deployment.model.name,
        "layers": deployment.model.layers,
        "batch": work.batch,
        "prompt": work.prompt,
        "graphs": "no",  # ops are timed one by one
    }
