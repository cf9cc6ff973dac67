"""`kvsim calibrate`: a machine measured, or a stack fitted to what a serving run measured."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.commands.arguments import count, option
from kvsim.commands.machine import calibrate_machine
from kvsim.commands.options import (
    JsonOption,
    StackOption,
    TpOption,
    WeightsOption,
    command_line,
    deployment,
)
from kvsim.errors import InputError


def calibrate(
    out: Annotated[
        Path, typer.Option("--out", metavar="F.toml", help="The profile or stack, written there.")
    ],
    device: Annotated[
        str | None, option("--device", "DEVICE", "cpu, cuda or cuda:N: measure this machine.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two minutes instead of ten; coarser.")
    ] = False,
    from_run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="LOG", help="Fit to a run's log; see docs/logs.md."),
    ] = None,
    model: Annotated[
        str | None, option("--model", "NAME|PATH", "With --from-run: what was served.")
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME|PATH", "With --from-run: what it ran on.")
    ] = None,
    technique: Annotated[str, option("--technique", "SPEC", "What the run used.")] = "full",
    fit_first: Annotated[
        str, option("--fit-first", "N", "Fit to the first N requests, check on the others.")
    ] = "100",
    max_seqs: Annotated[str, option("--max-seqs", "N", "The engine's limit per pass.")] = "256",
    max_tokens: Annotated[str, option("--max-tokens", "N", "The engine's tokens per pass.")] = (
        "2048"
    ),
    block_tokens: Annotated[str, option("--block-tokens", "N", "Tokens per KV block.")] = "16",
    blocks: Annotated[
        str, option("--blocks", "N", "KV blocks, as the engine prints them; by default derived.")
    ] = "0",
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="The engine keeps computed blocks.")
    ] = False,
    stack: StackOption = "fused",
    tp: TpOption = "1",
    weights: WeightsOption = "fp16",
    json: JsonOption = False,
) -> None:
    """Measure this machine, or fit a stack to a serving run."""
    if (device is None) == (from_run is None):
        raise InputError("calibrate: expected either --device cpu|cuda:N or --from-run LOG")
    if device is not None:
        calibrate_machine(device, out, quick, json)
        return
    assert from_run is not None
    if quick or model is None or gpu is None:
        wrong = "--quick goes with --device" if quick else "--from-run needs --model and --gpu"
        raise InputError(f"calibrate: {wrong}; see kvsim calibrate --help")

    from kvsim.evidence.logs import read_run
    from kvsim.files import check_target
    from kvsim.report import calibrate_run as report
    from kvsim.report.json import print_json
    from kvsim.serving.rules import Rules
    from kvsim.techniques import parse

    check_target(out, "--out")
    run = read_run(from_run)
    if run.left_out:
        print(f"kvsim: {run.left_out} requests failed or did not finish; left out", file=sys.stderr)
    where = deployment(model, gpu, stack, tp, weights, None)
    kind = parse(technique)
    rules = Rules(
        max_seqs=count("--max-seqs", max_seqs),
        max_tokens=count("--max-tokens", max_tokens),
        block_tokens=count("--block-tokens", block_tokens),
        blocks=count("--blocks", blocks),
        prefix_caching=prefix_caching,
    )
    first = count("--fit-first", fit_first)
    print(f"kvsim: fitting to the first {first} of {len(run.requests)} requests", file=sys.stderr)
    found = report.calibrated(run, kind, where, rules, first, stack, out, command_line())
    answer = found.row
    if json:
        print_json(answer)
    else:
        report.show_fit(found, str(out))
