"""`kvsim predict`: latency, throughput and memory of techniques at given points."""

import sys
from typing import Annotated

import typer

from kvsim import limits
from kvsim.cli.arguments import counts, option, token_counts
from kvsim.cli.options import (
    DpOption,
    EpOption,
    GpuOption,
    HostOption,
    JsonOption,
    ModelOption,
    PpOption,
    ReportOption,
    StackOption,
    TpOption,
    WeightsOption,
    command_line,
    deployment,
    say_written,
)
from kvsim.files import check_target
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED


def predict(
    model: ModelOption,
    gpu: GpuOption,
    technique: Annotated[
        list[str],
        option("--technique", "SPEC,...", "NAME or NAME:KEY=VALUE,... Several, or repeated."),
    ],
    batch: Annotated[str, option("--batch", "N,...", "Batch sizes, as 1,8.")] = "1",
    prompt: Annotated[
        str, option("--prompt", "N,...", "Prompt tokens, as 2048,4k; 4k is 4,000, 4K 4,096.")
    ] = "2048",
    generate: Annotated[str, option("--generate", "N,...", "Tokens to generate.")] = "128",
    stack: StackOption = DEFAULT_STACK,
    tp: TpOption = "1",
    pp: PpOption = "1",
    dp: DpOption = "1",
    ep: EpOption = "1",
    weights: WeightsOption = RELEASED,
    host_memory: HostOption = None,
    page: ReportOption = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output.")] = False,
) -> None:
    """Predict latency, throughput and memory of techniques."""
    from kvsim.report import predict as report
    from kvsim.report.json import print_json
    from kvsim.techniques import parse, parse_several

    if page is not None:
        check_target(page, "--report")
    asked = parse_several(",".join(technique)) or [parse("")]
    batches = counts("--batch", batch)
    prompts, lengths = token_counts("--prompt", prompt), token_counts("--generate", generate)
    rows = len(asked) * len(batches) * len(prompts) * len(lengths)
    limits.check_work(
        f"--technique, --batch, --prompt, --generate: ask for {rows:,} rows together",
        rows,
        limits.MOST_POINTS,
        "ask for fewer, or run kvsim sweep",
    )
    where = deployment(model, gpu, stack, tp, weights, host_memory, (pp, dp, ep))
    result = report.predicted(where, asked, batches, prompts, lengths, command_line())
    for reason in result.answer.left_out:
        print(f"kvsim: left out: {reason}", file=sys.stderr)
    if page is not None:
        result.write(page)
        say_written(page)
    if json:
        print_json(result.envelope())
    elif csv:
        typer.echo(report.csv(result.rows), nl=False)
    else:
        report.show(result)
