"""The checks of ``kvsim validate``: a technique's tokens, and its counts beside the prediction."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvsim.errors import InputError, first_line
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.models.model import Model
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import OpCounter
from kvsim.validate.counts.compare import Comparison, compare
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.machine import check_memory, refusals
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import (
    TensorSource,
    build,
    cached_bytes,
    find_tensors,
    load_weights,
    random_weights,
    weight_bytes,
)
from kvsim.validate.registry import IMPLEMENTATIONS, SmallRun, small_settings
from kvsim.validate.run import Generation
from kvsim.validate.techniques import implement

LOGIT_TOLERANCE = 1e-3  # of fp32 logits, between ways to order the same sums
SLACK = 17  # more tokens than are generated: the longest draft, and one
CACHE_COPIES = 6  # a cache, its copies on both sides, prompt and buffers


@frozen
class CheckedTechnique:
    """Result of checking a technique: its tokens, and its counts against predictions."""

    technique: Technique
    must_agree: bool  # whether it should generate the same tokens as full KV
    same_tokens: float  # share of equal generated tokens
    logit_difference: float  # largest difference up to the first unequal token
    comparison: Comparison

    @property
    def agrees(self) -> bool:
        """Whether tokens agree, or first differ where two logits are equal within rounding."""
        return self.logit_difference <= LOGIT_TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether tokens and counts are as required."""
        return (self.agrees or not self.must_agree) and self.comparison.holds


@frozen
class CannotRun:
    """A technique that cannot run because of the device's memory or its kernels."""

    technique: Technique
    reason: str  # the reason, in one line


def representative(model: Model, work: RandomPrompts) -> list[Technique]:
    """List all techniques that can be run, with settings that take effect in a workload."""
    group = max(g for g in (8, 16, 32) if model.head_dim % g == 0 or g == 8)
    narrow = 4 if model.hidden % 128 == 0 and model.ffn % 128 == 0 else 16
    small = SmallRun(work.batch, work.prompt, group, narrow, model.kv_heads)
    return [
        parse(f"{name}:{text}") for name in IMPLEMENTATIONS for text in small_settings(name, small)
    ]


def check_workload(
    arch: Architecture, source: TensorSource | None, work: RandomPrompts, device: torch.device
) -> None:
    """Check that a workload can run, before anything is loaded.

    Parameters
    ----------
    source
        Checkpoint of the model; None for random weights.

    Raises
    ------
    InputError
        If the checkpoint is not this model's, the model has too few positions, or memory is short.
    """
    if source:
        find_tensors(arch, source)
    m, length = arch.model, work.prompt + work.generate
    if length > m.max_context:
        raise InputError(
            f"--prompt: {work.prompt} tokens and {work.generate} generated ones are more than the "
            f"{m.max_context} positions of {m.name}; ask for fewer"
        )
    tokens = work.batch * (length + SLACK)
    cache = CACHE_COPIES * cached_bytes(m, tokens, torch.float32)
    logits = 3 * 4 * work.batch * work.generate * m.vocab
    hidden = 4 * tokens * (4 * m.hidden + 3 * m.ffn + 2 * m.heads * m.head_dim)
    check_memory(device, 1.2 * weight_bytes(arch, torch.float32) + cache + logits + hidden)


def rehearse(
    arch: Architecture, technique: Technique, work: RandomPrompts, deployment: Deployment
) -> None:
    """Set up a technique without allocating memory, to check that it can run.

    Raises
    ------
    InputError
        If it cannot run with the model, the batch or its settings.
    """
    weights = build(arch, lambda name, shape: torch.empty(shape, device="meta"))
    decoder = Decoder(arch, weights, work.prompt + work.generate + SLACK, deployment=deployment)
    implement(technique, decoder, (work.batch, work.prompt), work.generate).shutdown()


def sort_runnable(
    arch: Architecture,
    techniques: Iterable[Technique],
    run: Callable[[Technique], tuple[Technique, RandomPrompts]],
    deployment: Deployment,
) -> tuple[list[Technique], list[InputError]]:
    """Divide techniques into those that can run and those that cannot, before weights are loaded.

    Parameters
    ----------
    run
        Returns the settings and the workload with which a technique is run.

    Returns
    -------
    able
        Techniques that can run.
    refused
        Reasons why the others cannot.
    """
    able, refused = [], []
    for technique in techniques:
        try:
            rehearse(arch, *run(technique), deployment)
            able.append(technique)
        except InputError as error:
            refused.append(error)
    return able, refused


@torch.inference_mode()
def check(
    arch: Architecture,
    source: TensorSource | None,
    techniques: list[Technique],
    work: RandomPrompts,
    device: torch.device,
    deployment: Deployment,
) -> Iterator[CheckedTechnique | CannotRun | str]:
    """Run every technique twice: in fp32 for its tokens, in fp16 for its counts.

    A technique whose kernels cannot run on the device does not affect the others.

    Parameters
    ----------
    source
        Checkpoint of the model; None for random weights.

    Yields
    ------
    CheckedTechnique or CannotRun or str
        A progress line before each run, then the outcome of the technique.
    """
    prompts = work.prompts(arch.model.vocab)
    yield f"loading {arch.model.name}, running full in fp32"
    exact = _decoder(arch, source, torch.float32, device, work, deployment)
    truth = _run(exact, parse("full"), prompts, work)
    agreements: dict[Technique, tuple[float, float]] = {}
    for i, t in enumerate(techniques, 1):
        yield f"tokens {i}/{len(techniques)}: {t}"
        try:
            agreements[t] = _agreement(truth, _run(exact, t, prompts, work))
        except refusals() as problem:
            yield CannotRun(t, first_line(problem, 200))
    del exact
    counting = _decoder(arch, source, torch.float16, device, work, deployment)
    for i, (t, (same, difference)) in enumerate(agreements.items(), 1):
        yield f"counts {i}/{len(agreements)}: {t}"
        counter = OpCounter()
        try:
            run = Generation(replace(counting, counter=counter), t, prompts, work.generate)
            with counter.watch():
                run.complete()
        except refusals() as problem:
            yield CannotRun(t, first_line(problem, 200))
        else:
            yield CheckedTechnique(t, t.exact, same, difference, compare(deployment, run, counter))


def _decoder(
    arch: Architecture,
    source: TensorSource | None,
    dtype: torch.dtype,
    device: torch.device,
    work: RandomPrompts,
    deployment: Deployment,
) -> Decoder:
    if source:
        weights = load_weights(arch, source, device, dtype)
    else:
        weights = random_weights(arch, device, dtype)
    return Decoder(arch, weights, work.prompt + work.generate + SLACK, deployment=deployment)


def _run(
    decoder: Decoder, technique: Technique, prompts: list[list[int]], work: RandomPrompts
) -> Generation:
    run = Generation(decoder, technique, prompts, work.generate, keep=True)
    run.complete()
    return run


def _agreement(truth: Generation, run: Generation) -> tuple[float, float]:
    """Return the share of equal tokens, and the largest logit difference before they differ."""
    same = (truth.tokens == run.tokens).float().mean().item()
    worst = 0.0
    for ours, theirs, equal in zip(
        truth.logits, run.logits, truth.tokens == run.tokens, strict=True
    ):
        until = int(equal.long().cumprod(0).sum()) + 1  # the token that differs included
        pairs = zip(ours[:until], theirs[:until], strict=True)
        worst = max([worst, *(_distance(a, b) for a, b in pairs)])
    return same, worst


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; NaN counts as infinite."""
    return float((a - b).abs().nan_to_num(torch.inf).max())
