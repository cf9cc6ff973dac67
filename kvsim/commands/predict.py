"""`kvsim predict`: latency, throughput and memory of techniques at given points."""

import sys
from typing import Annotated

import typer

from kvsim.commands.arguments import counts, option, token_counts
from kvsim.commands.options import (
    GpuOption,
    HostOption,
    JsonOption,
    ModelOption,
    StackOption,
    TpOption,
    WeightsOption,
    deployment,
)
from kvsim.errors import InputError


def predict(
    model: ModelOption,
    gpu: GpuOption,
    technique: Annotated[
        list[str],
        option("--technique", "SPEC,...", "NAME or NAME:KEY=VALUE,... Several, or repeated."),
    ],
    batch: Annotated[str, option("--batch", "N,...", "Batch sizes, as 1,8.")] = "1",
    prompt: Annotated[str, option("--prompt", "N,...", "Prompt tokens, as 2048,32k.")] = "2048",
    generate: Annotated[str, option("--generate", "N,...", "Tokens to generate.")] = "128",
    stack: StackOption = "fused",
    tp: TpOption = "1",
    weights: WeightsOption = "fp16",
    host_memory: HostOption = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output.")] = False,
) -> None:
    """Predict latency, throughput and memory of techniques."""
    import numpy as np

    from kvsim.prediction.generate import Prediction
    from kvsim.report import predict as report
    from kvsim.report.json import print_json
    from kvsim.techniques import parse, parse_several

    if json and csv:
        raise InputError("--json and --csv: both are given; expected at most one of them")
    where = deployment(model, gpu, stack, tp, weights, host_memory)
    asked = parse_several(",".join(technique)) or [parse("")]
    batches = np.array(counts("--batch", batch), dtype=float)
    prompts, lengths = token_counts("--prompt", prompt), token_counts("--generate", generate)
    points = [(p, g) for p in prompts for g in lengths]
    found, left_out = [], []
    for t in asked:
        reason = t.refuses(where) if len(asked) > 1 else ""
        if reason:
            left_out.append(f"{t.name} cannot run here: {reason}")
        else:
            predictions = [Prediction(t, where, batches, p, g) for p, g in points]
            found += [row for prediction in predictions for row in report.predictions(prediction)]
    for reason in left_out:
        print(f"kvsim: left out: {reason}", file=sys.stderr)
    if not found:
        raise InputError(f"--technique: none can run there; {left_out[0]}")
    if json:
        print_json(found)
    elif csv:
        typer.echo(report.csv(found), nl=False)
    else:
        report.show(found)
