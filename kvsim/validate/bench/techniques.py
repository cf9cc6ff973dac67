"""Ops of real runs as samples: what a technique states, and how long it took.

The points are apart from those that ``kvsim validate`` checks: another batch, other contexts, and
models cut to fewer layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from statistics import median

import torch

from kvsim.evidence.machine.samples import Sample
from kvsim.evidence.machine.solve import REST, with_rates
from kvsim.evidence.machine.solve import RUNS_BENCHMARK as NAME
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.prediction.memory import decode_point, prefill_point
from kvsim.techniques.technique import Technique
from kvsim.validate.bench.work import Bench
from kvsim.validate.counts.check import SLACK, RandomPrompts, representative
from kvsim.validate.counts.expected import ops_by_name, predict
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import Weights, random_weights
from kvsim.validate.runner import BY_USE, Unit
from kvsim.validate.times.clock import TimedPass
from kvsim.validate.times.timed import Timing, issuing, run_timed

SUITE_CPU_MODELS = (("smollm2-135m", 4), ("smollm2-135m", 12), ("smollm2-1.7b", 2))
BATCH, PROMPTS = 2, (192, 640)
SUITE_GPU_MODELS = (("llama2-7b", 1), ("llama2-7b", 3), ("smollm2-135m", 4))
GPU_BATCH, GPU_PROMPTS = 4, (1536, 6144)  # large enough for kernels to be more than their floors
SUITE_GENERATED = 7
SUITE_REPEATS = 3
UNTIMED = ("h2d", "d2h", "cpu")  # what runs beside compute is seen by who waits for it


@frozen
class TechniqueRun:
    """A technique with a model that is cut to a few layers, and with a prompt."""

    technique: Technique
    model: str
    layers: int
    prompt: int
    rank: int  # among the techniques; those of lower ranks come first
    place: Bench
    required: bool = False  # whether numbers of the profile rest on it alone

    @property
    def name(self) -> str:
        """What tells it from others."""
        cut = f"{self.model} cut to {self.layers} layers"
        return f"{NAME} {self.technique}, {cut}, prompt {self.prompt}"

    @property
    def work(self) -> RandomPrompts:
        """Prompts and tokens of a run."""
        return _work(self.place, self.prompt)

    def unit(self, moved: float, flops: float) -> Unit:
        """Estimate what its runs take.

        Parameters
        ----------
        moved, flops
            Rough rates of the machine. [B/s], [FLOP/s]
        """
        d = _deployment(self.model, self.layers, self.place.on_cpu)
        rates = {f"{link}.bandwidth_Bps": moved for link in d.hardware.links}
        rough = replace(d, hardware=with_rates(d.hardware, rates | {"compute.fp16_FLOPps": flops}))
        p = predict(rough, self.technique, self.work)
        once = float(p.ttft_s[0] + p.tpot_s[0] * SUITE_GENERATED)
        seconds = once * (self._repeats + 2)
        return Unit(self.name, seconds, required=self.required, rank=self.rank)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Classes of the kernels that its timed ops are of, and whether a cache is moved."""
        d, work = _deployment(self.model, self.layers, self.place.on_cpu), self.work
        sizes = (work.batch, work.prompt, work.generate)
        steps = [self.technique.prefill(d, prefill_point(*sizes))]
        rounds = self.technique.cycle(d, decode_point(*sizes, work.generate / 2)).steps
        steps += rounds if len(rounds) == 1 else ()  # drafts have passes of their own
        timed = [op for step in steps for op, _ in ops_by_name(step).values()]
        found = {op.kernel for op in timed if op.stream not in UNTIMED}
        return frozenset(found | ({"moved"} if self.technique.uses_host(d) else set()))

    def samples(self) -> list[Sample]:
        """Time every op of its runs."""
        d = _deployment(self.model, self.layers, self.place.on_cpu)
        weights = _weights(self.model, self.layers, self.place.device, self.place.half)
        arch = load_architecture(self.model).cut(self.layers)
        decoder = Decoder(arch, weights, self.prompt + SUITE_GENERATED + SLACK, deployment=d)
        return list(
            of_runs(d, self.work, _timed(decoder, self.technique, self.work, self._repeats))
        )

    @property
    def _repeats(self) -> int:
        return self.place.pick(2, SUITE_REPEATS)


def list_runs(place: Bench) -> list[TechniqueRun]:
    """List every technique at a few points, point by point.

    Required are plain attention at two depths, as the time of steps and layers rests on it, and the
    first technique with ops of each kernel class, whose floor rests on it.
    """
    models = (SUITE_CPU_MODELS if place.on_cpu else SUITE_GPU_MODELS)[: place.pick(2, 3)]
    prompts = (PROMPTS if place.on_cpu else GPU_PROMPTS)[: place.pick(1, 2)]
    found: list[TechniqueRun] = []
    known: set[str] = set()
    for model, layers in models:
        for prompt in prompts:
            work = _work(place, prompt)
            asked = representative(load_architecture(model).cut(layers).model, work)
            ranks = {name: rank for rank, name in enumerate(BY_USE)}
            asked.sort(key=lambda t: ranks.get(t.name, len(ranks)))
            deep = (model, prompt) == (models[0][0], prompts[0])
            for rank, t in enumerate(asked):
                run = TechniqueRun(t, model, layers, prompt, rank, place)
                first = bool(run.kinds - known)
                known |= run.kinds
                found.append(replace(run, required=first or (deep and t.name == "full")))
    return found


def _work(place: Bench, prompt: int) -> RandomPrompts:
    return RandomPrompts(BATCH if place.on_cpu else GPU_BATCH, prompt, SUITE_GENERATED)


@lru_cache(maxsize=1)
def _weights(model: str, layers: int, device: torch.device, dtype: torch.dtype) -> Weights:
    return random_weights(load_architecture(model).cut(layers), device, dtype)


@cache
def _deployment(model: str, layers: int, on_cpu: bool) -> Deployment:
    """Any machine does: it weighs what a technique does, not what an op costs."""
    stack = load_stack("kvsim")
    if on_cpu:  # the kernels that were counted are those that a GPU is given
        stack = replace(stack, time=replace(stack.time, counted_launches=False))
    return Deployment(load_architecture(model).cut(layers).model, load_hardware("a6000"), stack)


@frozen
class Runs:
    """Runs of one workload whose ops are timed, and one that tells the rest."""

    by_op: list[Timing]
    whole: Timing  # whose ops a CPU does not time, as that takes time; a GPU's tell the host's
    plain: Timing | None = None  # on a GPU: a run that nothing but its rounds is timed of

    @property
    def host_share(self) -> float:
        """What the host takes for a round over what it takes where every op is timed."""
        if self.plain is None:
            return 1.0
        return min(1.0, median(self.plain.computing) / median(self.whole.computing))

    def rests(self, stated: Mapping[str, tuple[Op, int]]) -> tuple[list[float], float]:
        """What rounds take, and what of it ops take if each takes what it does in most layers. [s]

        A GPU's are those of the host, and what ops do not take of them.
        """
        decoding = [
            [p for p in run.passes if p.kind == "decode"] for run in (*self.by_op, self.whole)
        ]
        if self.plain:
            each = zip(self.whole.computing, decoding[-1], strict=True)
            rest = median(took - sum(p.hosts.values()) for took, p in each)
            return [self.host_share * rest], 0.0

        def accounted(one: TimedPass) -> float:
            known = {name: times for name, (_, times) in stated.items() if name in one.ops}
            return sum(
                known[name] * one.steady(name, known[name]) if name in known else took
                for name, took in one.seconds().items()
            )

        return list(self.whole.computing), median(accounted(p) for some in decoding for p in some)


def _timed(decoder: Decoder, technique: Technique, work: RandomPrompts, repeats: int) -> Runs:
    """Runs of one workload; the first warms up: kernels are compiled and chosen in it."""
    run_timed(decoder, technique, work, by_op=True)
    if decoder.device.type == "cpu":
        whole = run_timed(decoder, technique, work)
        return Runs(
            [run_timed(decoder, technique, work, by_op=True) for _ in range(repeats)], whole
        )
    host = run_timed(decoder, technique, work, by_op=True)
    busy = issuing(host)
    runs = [run_timed(decoder, technique, work, True, busy) for _ in range(repeats)]
    return Runs(runs, host, run_timed(decoder, technique, work))


def of_runs(deployment: Deployment, work: RandomPrompts, runs: Runs) -> Iterator[Sample]:
    """Samples of one workload's ops: the prompt's pass, and rounds that are one pass each."""
    t, every = runs.whole.technique, runs.by_op
    point = prefill_point(work.batch, work.prompt, work.generate)
    hosts = runs.whole.passes if runs.plain else ()
    share = runs.host_share
    yield from _samples(
        deployment, t, work, "prefill", ops_by_name(t.prefill(deployment, point)),
        [run.passes[:1] for run in every], [p.hosts for p in hosts[:1]], share,
    )  # fmt: skip
    middle = work.generate / 2
    cycle = t.cycle(deployment, decode_point(work.batch, work.prompt, work.generate, middle))
    if len(cycle.steps) > 1 or {p.kind for p in every[0].passes[1:]} - {"between", "decode"}:
        return
    stated = ops_by_name(cycle.steps[0])
    rounds = [[p for p in run.passes if p.kind == "decode"] for run in every]
    issued = [p.hosts for p in hosts if p.kind == "decode"]
    yield from _samples(deployment, t, work, "decode", stated, rounds, issued, share)
    took, ops_s = runs.rests(stated)
    if min(took) > 0:
        case = _case(deployment, t, work, "decode") | {"op": REST, "ops_s": ops_s}
        host_s = median(took) if runs.plain else 0.0
        yield Sample(NAME, case, Op(REST, launches=0.0), tuple(took), host_s)


def _samples(
    deployment: Deployment,
    technique: Technique,
    work: RandomPrompts,
    phase: str,
    stated: Mapping[str, tuple[Op, int]],
    runs: Sequence[Sequence[TimedPass]],
    hosts: Sequence[Mapping[str, float]],
    share: float,
) -> Iterator[Sample]:
    """One sample per op that is stated once per layer or in the head, as it was timed there."""
    for name, (op, times) in stated.items():
        found = [[p.steady(name, times) for p in passes if name in p.ops] for passes in runs]
        if op.stream not in UNTIMED and all(found):
            case = _case(deployment, technique, work, phase) | {"op": name}
            issued = [share * ops[name] / times for ops in hosts if name in ops]
            host_s = median(issued) if issued else 0.0
            yield Sample(NAME, case, op, tuple(max(median(f), 1e-9) for f in found), host_s)


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
