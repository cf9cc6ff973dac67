"""`kvsim explore`: a page with sliders."""

from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.arguments import option, tokens
from kvsim.cli.options import (
    GpuOption,
    HostOption,
    ModelOption,
    StackOption,
    TpOption,
    WeightsOption,
    command_line,
    deployment,
    say_written,
)
from kvsim.errors import InputError
from kvsim.files import check_target
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED


def explore(
    model: ModelOption,
    gpu: GpuOption,
    out: Annotated[
        Path, typer.Option("--out", metavar="F.html", help="Where to write the page.")
    ] = Path("explore.html"),
    technique: Annotated[
        str, option("--technique", "SPEC,...", "Techniques to compare; all that can run if none.")
    ] = "",
    generate: Annotated[str, option("--generate", "N", "Tokens to generate.")] = "128",
    stack: StackOption = DEFAULT_STACK,
    tp: TpOption = "1",
    weights: WeightsOption = RELEASED,
    host_memory: HostOption = None,
) -> None:
    """Write a page with sliders: batch, prompt, bits, drafts, link."""
    from kvsim.machines.basis import basis
    from kvsim.report import explore as pages
    from kvsim.report import names
    from kvsim.techniques import TECHNIQUES, parse, parse_several

    check_target(out, "--out")
    tokens_out = tokens("--generate", generate)
    if tokens_out < 2:
        raise InputError("--generate: got 1; the page compares times per token after the first")
    where = deployment(model, gpu, stack, tp, weights, host_memory)
    some = parse_several(technique) or [parse(name) for name in TECHNIQUES]
    title = f"{names.deployment(where)}: explore"
    pages.write_page(out, where, some, tokens_out, title, command_line("--out"), basis(where))
    say_written(out)
