"""What `kvsim plan` is asked: deployments, limits and the workload, as its options say."""

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from kvsim.cli.arguments import count, counts, either, gib, seconds, tokens, words
from kvsim.cli.options import deployment
from kvsim.errors import InputError
from kvsim.machines.hardware import RELEASED
from kvsim.options import ENGINE_SHARE

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment
    from kvsim.planner.question import PlanLimits, Workload

COUNTS = ("1", "2", "4", "8")
BARE_TTFT, BARE_TPOT = 60.0, 1.0  # numbers without a unit beyond which milliseconds are likely [s]


def deployments_of(
    model: str, gpu: str, stack: str, tp: str, weights: str, host_memory: str | None,
    spread: tuple[str, str, str] = ("1", "1", "1"),
) -> "list[Deployment]":  # fmt: skip
    """Every combination asked for, the simplest first: wide weights, few GPUs, cards as typed.

    Parameters
    ----------
    spread : what ``--pp``, ``--dp`` and ``--ep`` say.

    Raises
    ------
    InputError
        If the model cannot be spread so, or by none of the combinations of several degrees.
    """
    from kvsim.machines.deployment import WEIGHTS

    sizes = COUNTS if tp == "auto" else words("--tp", tp, (*COUNTS, "auto"))
    machines = [name.strip() for name in gpu.split(",")] if "," in gpu else [gpu]
    bases = [deployment(model, name, stack, "1", RELEASED, host_memory) for name in machines]
    if weights == "auto":
        formats = narrower(bases)
    else:
        formats = words("--weights", weights, (RELEASED, *WEIGHTS, "auto"))
    heads = bases[0].model.heads
    some = [int(n) for n in sizes if tp != "auto" or heads % int(n) == 0]
    given = zip(("--pp", "--dp", "--ep"), spread, strict=True)
    degrees = list(product(*(counts(name, text) for name, text in given)))
    found, problem = [], None
    for base, f, n, (pp, dp, ep) in product(bases, formats, some, degrees):
        try:
            found.append(replace(base, weights=f, tp=n, pp=pp, dp=dp, ep=ep))
        except InputError as error:
            if len(degrees) == 1:
                raise
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return sorted(found, key=lambda d: d.gpus) if len(degrees) > 1 else found


def narrower(bases: "list[Deployment]") -> list[str]:
    """The released format of a model, and those to compare with it that every card can run."""
    released = bases[0].weights
    fp8 = all("fp8" in base.hardware.flops for base in bases)
    below = {"fp16": ["fp8", "int8", "int4"] if fp8 else ["int8", "int4"]}
    return [released, *below.get(released, ["int4"] if released.startswith("fp8") else [])]


def limits_of(
    deployment: "Deployment",
    gpu_memory: str | None,
    ttft: str | None,
    tpot: str | None,
    loss: float,
    offline: bool,
) -> "PlanLimits":
    """What a plan must stay within, as the options and the hardware say."""
    from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT, GIB, PlanLimits

    h, none = deployment.hardware, float("inf")
    usable = h.gpu_memory * (1.0 if offline else ENGINE_SHARE)
    if gpu_memory is not None:
        usable = gib("--gpu-memory", gpu_memory)
        if usable > h.gpu_memory:
            most = f"at most the {h.gpu_memory / GIB:.3f} GiB of {h.name}"
            raise InputError(f"--gpu-memory: got {gpu_memory}; expected {most}")
    return PlanLimits(
        gpu_memory=usable,
        host_memory=h.host_memory,
        ttft=(none if offline else DEFAULT_TTFT)
        if ttft is None
        else seconds("--ttft", ttft, BARE_TTFT),
        tpot=(none if offline else DEFAULT_TPOT)
        if tpot is None
        else seconds("--tpot", tpot, BARE_TPOT),
        loss=loss,
    )


def workload_of(
    prompt: str | None, generate: str | None, batch: str | None, offline: bool
) -> "Workload":
    """The equal requests that the options describe."""
    from kvsim.planner.question import Workload

    return Workload(
        tokens("--prompt", either(prompt, "2048")),
        tokens("--generate", either(generate, "128")),
        None if batch in (None, "auto") else count("--batch", str(batch), ", or auto"),
        service=not offline,
    )
