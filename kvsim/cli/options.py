"""Options that several commands share, and the deployment they describe."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.arguments import count, gib, option

if TYPE_CHECKING:
    from kvsim.machines.deployment import Deployment

ModelOption = Annotated[
    str, option("--model", "NAME|PATH", "From `kvsim models`, or a config.json or its folder.")
]
GpuOption = Annotated[str, option("--gpu", "NAME|PATH", "From `kvsim gpus`, or a TOML profile.")]
StackOption = Annotated[str, option("--stack", "NAME|PATH", "From `kvsim stacks`, or a TOML file.")]
TpOption = Annotated[str, option("--tp", "N", "Tensor-parallel GPUs: 1, 2, 4 or 8.")]
PpOption = Annotated[
    str,
    option(
        "--pp",
        "N",
        "Pipeline-parallel stages; `plan` compares several.",
        also=("--pipeline-parallel-size",),
    ),
]
DpOption = Annotated[
    str,
    option(
        "--dp", "N", "Copies of attention that share the experts.", also=("--data-parallel-size",)
    ),
]
EpOption = Annotated[
    str,
    option("--ep", "N", "Groups of whole experts, up to --tp times --dp.", also=("--ep-size",)),
]
WeightsOption = Annotated[
    str,
    option(
        "--weights", "FORMAT",
        "fp16, fp8, fp8-dynamic, fp8-block, int8, int4, int4-g32, mxfp4 or nvfp4; released is the "
        "published checkpoint's.",
    ),
]  # fmt: skip
HostOption = Annotated[
    str | None, option("--host-memory", "GIB", "Host memory; the profile's if not given.")
]
MaxSeqsOption = Annotated[str, option("--max-seqs", "N", "Sequences in a pass at most.")]
MaxTokensOption = Annotated[str, option("--max-tokens", "N", "Tokens in a pass at most.")]
ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="F.html", help="Write an HTML page there.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


def deployment(
    model: str, gpu: str, stack: str, tp: str, weights: str, host_memory: str | None,
    spread: tuple[str, str, str] = ("1", "1", "1"),
) -> "Deployment":  # fmt: skip
    """A model on hardware with a stack, as the options say.

    Parameters
    ----------
    spread : what ``--pp``, ``--dp`` and ``--ep`` say.
    """
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.models.configs import load_model

    hardware = load_hardware(gpu)
    if host_memory is not None:
        given = {**hardware.sources, "memory.host_capacity_B": "given as --host-memory"}
        host = gib("--host-memory", host_memory)
        hardware = replace(hardware, host_memory=host, sources=given)
    gpus = count("--tp", tp)
    pp, dp, ep = map(count, ("--pp", "--dp", "--ep"), spread)
    return Deployment(load_model(model), hardware, load_stack(stack), weights, gpus, pp, dp, ep)


def say_written(place: Path) -> None:
    """Tell on standard error that a file is there."""
    print(f"kvsim: wrote {place}", file=sys.stderr)


def command_line(place: str = "--report") -> str:
    """What was typed, for the foot of a page; the option that names the page is left out of it."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == place:
            next(words, None)
        elif not word.startswith(f"{place}="):
            kept.append(shlex.quote(word))
    return " ".join(["kvsim", *kept])
