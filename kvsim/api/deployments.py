"""What the options of a inputs describe: models on machines, and techniques to consider."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import InputError
from kvsim.options import TP_CHOICES, Inputs

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment
    from kvsim.planner.question import Admission

LOSSY = 0.1
"""Relative loss of quality that --lossy admits at most where the loss is known."""


def build_deployment(inputs: Inputs, **instead: Any) -> "Deployment":
    """Build the deployment that the options describe: a model on hardware with a stack.

    Parameters
    ----------
    inputs
        The options of a command.
    **instead
        Values that stand in for those of the inputs, as ``gpu`` or ``tp``.

    Returns
    -------
    Deployment
        The model, hardware and stack.
    """
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.models.configs import load_model

    def value(name: str, usual: Any) -> Any:
        return instead.get(name, getattr(inputs, name, usual))

    hardware = load_hardware(value("gpu", None))
    host = value("host_memory", None)
    if host is not None:
        given = {**hardware.sources, "memory.host_capacity_B": "given as --host-memory"}
        hardware = replace(hardware, host_memory=host, sources=given)
    spread = (value(name, 1) for name in ("tp", "pp", "dp", "ep"))
    model, stack = load_model(value("model", None)), load_stack(value("stack", None))
    return Deployment(model, hardware, stack, value("weights", None), *spread)


def build_deployments(inputs: Inputs) -> "list[Deployment]":
    """Build every combination that a plan compares.

    Wide weights, few GPUs and cards as given come first.

    Parameters
    ----------
    inputs
        The options of a command that compares cards, weights and degrees of parallelism.

    Returns
    -------
    list of Deployment
        The combinations that the model allows.

    Raises
    ------
    InputError
        If the model cannot be spread so, or by none of the combinations of several degrees.
    """
    from kvsim.machines.deployment import WEIGHT_FORMATS
    from kvsim.machines.hardware import RELEASED

    one = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "weights": RELEASED}
    bases = [build_deployment(inputs, gpu=name, **one) for name in inputs.gpu]
    formats = inputs.weights
    if formats == ["auto"]:
        formats = _released_and_narrower(bases)
    for name in formats:
        if name not in (RELEASED, *WEIGHT_FORMATS):
            known = ", ".join((RELEASED, *WEIGHT_FORMATS, "auto"))
            raise InputError(f"--weights: got {name[:40]!r}; expected one of {known}")
    sizes = [int(n) for n in inputs.tp if n != "auto"]
    if inputs.tp == ["auto"]:
        sizes = [int(n) for n in TP_CHOICES if bases[0].model.heads % int(n) == 0]
    degrees = list(product(inputs.pp, inputs.dp, inputs.ep))
    found, problem = [], None
    for base, form, n, (pp, dp, ep) in product(bases, formats, sizes, degrees):
        try:
            found.append(replace(base, weights=form, tp=n, pp=pp, dp=dp, ep=ep))
        except InputError as error:
            if len(degrees) == 1:
                raise
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return sorted(found, key=lambda d: d.gpus) if len(degrees) > 1 else found


def _released_and_narrower(bases: "list[Deployment]") -> list[str]:
    """The released format of a model, and those to compare with it that every card can run."""
    released = bases[0].weights
    fp8 = all("fp8" in base.hardware.flops for base in bases)
    below = {"fp16": ["fp8", "int8", "int4"] if fp8 else ["int8", "int4"]}
    return [released, *below.get(released, ["int4"] if released.startswith("fp8") else [])]


def build_admission(inputs: Inputs) -> "Admission":
    """Collect the techniques that a plan may consider, and the evidence of their quality.

    Parameters
    ----------
    inputs
        The options of a command that chooses techniques.

    Returns
    -------
    Admission
        What the planner admits.
    """
    from kvsim.planner.question import Admission, read_acceptance

    given = inputs.acceptance
    rate, seen_at, accepted = (None, 0, ()) if given is None else read_acceptance(given)
    return Admission(
        only=tuple(inputs.only or ()),
        without=tuple(inputs.without or ()),
        engine=(inputs.engine or "").strip().lower(),
        unmeasured=inputs.lossy,
        rate=rate,
        seen_at=seen_at,
        accepted=accepted,
        **({} if inputs.quality is None else _read_quality(inputs.quality)),
    )


def _read_quality(files: list[str]) -> dict[str, Any]:
    """Runs of whole techniques, and what widths of single layers lose.

    Raises
    ------
    InputError
        If a file is neither, or two are of layers.
    """
    from kvsim.files import ATTENTION_FILE, read_json
    from kvsim.planner.bits import offered
    from kvsim.quality import layers
    from kvsim.quality.measured import with_own
    from kvsim.traces import attention

    contents = {file: read_json(Path(file), ATTENTION_FILE) for file in files}
    single = [file for file in files if layers.is_one(contents[file])]
    if len(single) > 1:
        raise InputError(f"--quality: {single[0]} and {single[1]} both hold layers; give one")
    found: dict[str, Any] = {}
    if len(files) > len(single):
        own = [file for file in files if file not in single]
        found["runs"] = with_own(
            [attention.parse_record(contents[file], Path(file)) for file in own]
        )
    if single:
        losses = layers.parse_losses(contents[single[0]], Path(single[0]))
        found |= {"layered": offered(losses), "layered_for": losses.model}
    return found


def largest_loss(inputs: Inputs) -> float:
    """Return the largest known loss of quality that a setting may have.

    Parameters
    ----------
    inputs
        The options of a command that chooses techniques.

    Returns
    -------
    float
        Relative loss.
    """
    if inputs.max_loss is not None:
        return float(inputs.max_loss)
    return LOSSY if inputs.lossy else 0.0
