"""Real runs over a grid of batch and context, interleaved, with a prediction of each.

No point of this grid is one that a stack was fitted to: batches, contexts and depths differ from
those of ``kvsim.validate.bench.suite``.
"""

from collections.abc import Iterator, Sequence

import torch

from kvsim.engine.timeline import op_spans
from kvsim.errors import InputError, first_line
from kvsim.frozen import frozen
from kvsim.journal import Journal
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.prediction.memory import decode_point
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.check import SLACK, representative
from kvsim.validate.counts.expected import (
    TIMED_GENERATED,
    RandomPrompts,
    ops_by_name,
    phase_steps,
    predict,
    predictions,
)
from kvsim.validate.machine import refusals
from kvsim.validate.model.architecture import Architecture, load_architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights
from kvsim.validate.processor import available_memory
from kvsim.validate.runner import Runner, Unit
from kvsim.validate.times.compared import Compared, Measured, Round, SkippedPoint, point_name
from kvsim.validate.times.timed import (
    Counted,
    Timing,
    run_by_op,
    run_counted,
    run_timed,
)

TIMED_CPU_MODELS = (("smollm2-135m", 0), ("smollm2-1.7b", 3))
"""A whole small model, and larger shapes cut to a few layers (0: all)."""
TIMED_GPU_MODELS = (("smollm2-135m", 0), ("llama2-7b", 4))
BATCHES, PROMPTS = (1, 4), (128, 384, 1024)
GPU_BATCHES, GPU_PROMPTS = (1, 8, 64), (1024, 8192, 65536)
MOST_TOKENS = {"cpu": 2048, "cuda": 524288}  # of a batch's prompts [tokens]
USABLE_MEMORY = 0.8  # of the free memory may be taken
TIMED_REPEATS = 5
CPU_REPEATS = 3  # a run takes seconds there
EXTRA_TURNS = 3  # one that warms up, one that times ops and one that counts
TOGETHER = 5  # techniques that take turns; what is lost where a run is stopped


@frozen
class Grid:
    """Points at which techniques are timed.

    Attributes
    ----------
    models
        Names of models, and the number of layers that each is cut to.
    batches
        Batch sizes. [sequences]
    prompts
        Lengths of prompts. [tokens]
    repeats
        Number of runs per point.
    generate
        Tokens to generate. [tokens]
    """

    models: tuple[tuple[str, int], ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int = TIMED_REPEATS
    generate: int = TIMED_GENERATED

    @classmethod
    def for_device(cls, device: torch.device) -> "Grid":
        """Choose the points that suit a device."""
        if device.type == "cuda":
            return cls(TIMED_GPU_MODELS, GPU_BATCHES, GPU_PROMPTS)
        return cls(TIMED_CPU_MODELS, BATCHES, PROMPTS, CPU_REPEATS)

    def reduced(self, points: str) -> "Grid":
        """Reduce the grid.

        Parameters
        ----------
        points
            ``all``, or ``few`` for the smallest points, twice each.

        Raises
        ------
        InputError
            If it is neither of these.
        """
        if points == "all":
            return self
        if points != "few":
            raise InputError(f"--points: got {points[:40]!r}; expected all or few")
        return Grid(self.models[:1], self.batches[:1], self.prompts[:1], 2, self.generate)

    def works(self, device: torch.device) -> Iterator[RandomPrompts]:
        """List the workloads that do not take too long on a device."""
        for batch in self.batches:
            for prompt in self.prompts:
                if batch * prompt <= MOST_TOKENS[device.type]:
                    yield RandomPrompts(batch, prompt, self.generate)


@frozen
class _Turns:
    """Techniques that take turns at a point, so that a machine that slows down slows all."""

    deployment: Deployment
    arch: Architecture
    work: RandomPrompts
    techniques: tuple[Technique, ...]

    @property
    def label(self) -> str:
        """The point, for people."""
        return f"{self.arch.model.name}, batch {self.work.batch}, prompt {self.work.prompt}"

    def unit(self, turns: int) -> Unit:
        """Estimate what their runs take by what is predicted for them."""
        found = [predict(self.deployment, t, self.work) for t in self.techniques]
        once = sum(float(p.ttft_s[0] + p.tpot_s[0] * self.work.generate) for p in found)
        return Unit(f"{self.label}: {', '.join(map(str, self.techniques))}", turns * once)


@torch.inference_mode()
def compare_times(
    grid: Grid,
    asked: Sequence[Technique],
    device: torch.device,
    dtype: torch.dtype,
    hardware: Hardware,
    stack: Stack,
    kept: Journal[Compared] | None = None,
) -> Iterator[Compared | SkippedPoint | str]:
    """Time techniques over a grid, and predict their times.

    A few techniques take turns at each point, so that a machine that slows down slows all of them.
    One that cannot run at a point is left out there.

    Parameters
    ----------
    asked
        Techniques to run; if empty, all that can be run.
    kept
        Journal of earlier measurements, which are not repeated; new ones are added.

    Yields
    ------
    Compared or SkippedPoint or str
        A progress line before each run, then its outcome.
    """
    groups: list[_Turns] = []
    for name, layers in grid.models:
        arch = load_architecture(name)
        arch = arch.cut(layers) if layers else arch
        d = Deployment(arch.model, hardware, stack)
        for work in grid.works(device):
            able = []
            for t in asked or representative(arch.model, work):
                known = kept.done.get(point_name(arch.model.name, work, t)) if kept else None
                if known:
                    yield from known
                    continue
                try:
                    _check_room(d, t, work, device)
                    able.append(t)
                except InputError as problem:
                    yield _left_out(d, name, work, t, problem)
            parts = (able[i : i + TOGETHER] for i in range(0, len(able), TOGETHER))
            groups += [_Turns(d, arch, work, tuple(some)) for some in parts]
    units = {group.unit(grid.repeats + EXTRA_TURNS): group for group in groups}
    runner, before, weights = Runner(list(units)), "", None
    for chosen in runner:
        group = units[chosen.unit]
        if weights is None or group.arch.model.name != before:
            del weights  # before the next model's are made
            before, weights = group.arch.model.name, random_weights(group.arch, device, dtype)
        work, d = group.work, group.deployment
        length = work.prompt + work.generate + SLACK
        decoder = Decoder(group.arch, weights, length, deployment=d)
        for step in _take_turns(grid, group, decoder, runner):
            if kept and isinstance(step, tuple):
                kept.append(point_name(group.arch.model.name, work, step[0]), [step[1]])
            yield step[1] if isinstance(step, tuple) else step


def _take_turns(
    grid: Grid, group: _Turns, decoder: Decoder, runner: Runner
) -> Iterator[tuple[Technique, Compared] | SkippedPoint | str]:
    """Yield techniques with their results, or the reasons why they could not run."""
    work, d, name = group.work, group.deployment, group.deployment.model.name
    runs: dict[Technique, list[Timing]] = {t: [] for t in group.techniques}
    turns = grid.repeats + 2
    # the first warms up: kernels are compiled and chosen in it; the last times ops
    for turn in range(turns):
        yield f"{group.label}: turn {turn + 1} of {turns}{runner.remaining}"
        for t in list(runs):
            try:
                if turn > grid.repeats:
                    runs[t].append(run_by_op(decoder, t, work))
                else:
                    graphs = decoder.device.type == "cuda"
                    runs[t].append(run_timed(decoder, t, work, graphs=graphs))
            except refusals(InputError) as problem:
                del runs[t]
                yield _left_out(d, name, work, t, problem)
    for t, found in runs.items():
        try:
            counted = run_counted(decoder, t, work)
        except refusals(InputError) as problem:
            yield _left_out(d, name, work, t, problem)
        else:
            yield t, _compared(d, name, work, counted, found[-1], found[1:-1])


def _check_room(
    deployment: Deployment, technique: Technique, work: RandomPrompts, device: torch.device
) -> None:
    """Refuse a run that does not fit in memory, as a killed process cannot report it.

    Raises
    ------
    InputError
        Saying what is needed and what is free.
    """
    p = predict(deployment, technique, work)
    on_gpu, on_host = float(p.gpu_bytes[0]), float(p.host_bytes[0])
    if device.type == "cpu":
        on_host += on_gpu
    free = available_memory()
    if on_host > USABLE_MEMORY * free:
        raise InputError(
            f"{on_host / 2**30:.1f} GiB of host memory are needed, {free / 2**30:.1f} are free"
        )


def _left_out(
    deployment: Deployment, name: str, work: RandomPrompts, technique: Technique, why: Exception
) -> SkippedPoint:
    return SkippedPoint(
        name, deployment.model.layers, work.batch, work.prompt, technique, first_line(why, 200)
    )


def _compared(
    deployment: Deployment,
    name: str,
    work: RandomPrompts,
    counted: Counted,
    timed: Timing,
    runs: Sequence[Timing],
) -> Compared:
    t = runs[0].technique
    eager = next((run.eager for run in runs if run.eager is not None), None)
    replays = runs[0].replays if eager is None else ()
    predicted = predictions(deployment, t, work, counted.on_gpu, replays)
    measured = {
        "ttft_s": [run.ttft for run in runs],
        "tpot_s": [run.tpot for run in runs],
        "resident_B": [float(run.resident) for run in runs],
        "peak_B": [float(counted.peak)],
        **{f"{way}_B": [float(moved)] for way, moved in counted.copied.items() if moved},
    }
    if torch.get_num_threads() == 1 and not counted.on_gpu:  # a clock that others leave alone
        measured["computing_s"] = [sum(run.computing) / run.tokens for run in runs]
    return Compared(
        name,
        deployment.model.layers,
        work.batch,
        work.prompt,
        t,
        tuple(Measured.from_runs(key, predicted[key], some) for key, some in measured.items()),
        tuple(
            Measured.from_runs(f"{key}_s", predicted[f"{key}_s"], some)
            for key, some in _measured_ops(deployment, t, work, timed)
            if f"{key}_s" in predicted
        ),
        _rounds(deployment, t, work, timed),
        eager,
        replays,
    )


def _measured_ops(
    deployment: Deployment, technique: Technique, work: RandomPrompts, timed: Timing
) -> Iterator[tuple[str, list[float]]]:
    """Yield measured ops of prefill, and of rounds with a single pass."""
    passes = {"prefill": timed.passes[:1]}
    passes["decode"] = tuple(p for p in timed.passes if p.kind == "decode")
    for phase, step in phase_steps(deployment, technique, work).items():
        for name, (_, times) in ops_by_name(step).items():
            found = [times * p.steady(name, times) for p in passes[phase] if name in p.ops]
            if found:
                yield f"{phase} {name}", found


def _rounds(
    deployment: Deployment, technique: Technique, work: RandomPrompts, timed: Timing
) -> tuple[Round, ...]:
    """Return the predicted and the measured round in the middle of the generation."""
    measured = [p for p in timed.passes if p.kind != "prefill"]
    middle = len(measured) // 2
    point = decode_point(work.batch, work.prompt, work.generate, float(middle))
    cycle = technique.cycle(deployment, point)
    if len(cycle.steps) > 1 or not measured or {p.kind for p in measured} != {"decode"}:
        return ()
    found = measured[middle].spans()
    return Round(tuple(op_spans(cycle.steps[0], deployment))), Round(tuple(found))
