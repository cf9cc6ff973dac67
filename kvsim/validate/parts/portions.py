"""What every layer of a run does, and which sequences pass through it together."""

from dataclasses import replace

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Parts
from kvsim.techniques.technique import Technique
from kvsim.validate.model.attention import Pass


def by_layer(
    technique: Technique, layers: int, deployment: Deployment, lengths: list[int]
) -> list[Parts]:
    """What every layer does for prompts of these lengths; those that do the same share one object.

    Raises
    ------
    InputError
        If a budget is a share of prompts that differ in length.
    """
    found: list[Parts] = []
    for some, parts in zip(technique.layers, technique.parts, strict=True):
        last = layers - 1 if some.last is None else min(some.last, layers - 1)
        found += [parts.at(i, deployment) for i in range(some.first, last + 1)]
    return [parts.for_prompt(_measured(parts, lengths)) for parts in found]


def _measured(parts: Parts, lengths: list[int]) -> float:
    """The length of every prompt, which budgets are a share of. [tokens]"""
    shares = parts.selection.shares + parts.drafting.shares
    if shares and len(set(lengths)) > 1:
        raise InputError(
            f"{parts.selection.name}: {shares[0]} is a share of each prompt, and one run has "
            f"one budget; give prompts of one length, or a number of tokens"
        )
    return float(max(lengths))


def equal_parts(batch: int, parts: int, name: str) -> list[slice]:
    """Sequences of each part of a batch.

    Raises
    ------
    InputError
        If the batch does not divide into so many.
    """
    if batch % parts:
        raise InputError(
            f"{name}: batch {batch} does not divide into {parts} parts; choose a multiple of "
            f"{parts}, or set {name}:parts"
        )
    each = batch // parts
    return [slice(i, i + each) for i in range(0, batch, each)]


def of_part(step: Pass, first: int) -> Pass:
    """A pass as it looks to the part of the batch that begins with the sequence ``first``."""
    rows = step.rows
    return replace(step, rows=slice(rows.start - first, rows.stop - first)) if first else step


def begins(step: Pass) -> bool:
    """Whether this is the first chunk of the prompts of a part of the batch."""
    return not step.starts[0] and not step.rows.start


def ends(step: Pass, prompt: int, sequences: int) -> bool:
    """Whether this is the last chunk of the prompts of so many sequences, (sequences, prompt)."""
    return step.length == prompt and step.rows.stop == sequences
