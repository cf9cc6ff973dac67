"""`kvsim calibrate`: a machine measured, or a stack fitted to what a serving run measured."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.arguments import count, option
from kvsim.cli.machine import calibrate_machine
from kvsim.cli.options import (
    JsonOption,
    ReportOption,
    TpOption,
    WeightsOption,
    command_line,
    deployment,
    say_written,
)
from kvsim.errors import InputError
from kvsim.files import check_target
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED


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
    from_ops: Annotated[
        list[Path] | None,
        typer.Option("--from-ops", metavar="F.csv", help="Fit to measured operators; repeatable."),
    ] = None,
    from_serving: Annotated[
        Path | None,
        typer.Option("--from-serving", metavar="F.csv", help="Fit host times to load tests."),
    ] = None,
    engine: Annotated[
        str | None, option("--engine", "NAME", "Rows of this engine, with either table.")
    ] = None,
    version: Annotated[
        str | None, option("--version", "V", "With --from-ops: of the engine; else the newest.")
    ] = None,
    hold_out: Annotated[
        str, option("--hold-out", "SHARE", "With --from-ops: shapes held out in turn; 0: none.")
    ] = "0.25",
    model: Annotated[
        str | None, option("--model", "NAME|PATH", "With --from-run: what was served.")
    ] = None,
    gpu: Annotated[
        str | None, option("--gpu", "NAME|PATH", "With --from-run or --from-ops: what it ran on.")
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
    stack: Annotated[
        str | None,
        option("--stack", "NAME|PATH", "What to start from: the engine's if it ships, else vllm."),
    ] = None,
    tp: TpOption = "1",
    weights: WeightsOption = RELEASED,
    page: ReportOption = None,
    json: JsonOption = False,
) -> None:
    """Measure this machine, or fit a stack to runs or tables."""
    given = [device is not None, from_run is not None, bool(from_ops), from_serving is not None]
    if sum(given) != 1:
        raise InputError(
            "calibrate: expected one of --device cpu|cuda:N, --from-run LOG, --from-ops F.csv "
            "and --from-serving F.csv"
        )
    if page is not None:
        if from_ops or from_serving:
            raise InputError(
                "--report: fits to tables have no page; it goes with --from-run or --device"
            )
        check_target(page, "--report")
    if from_ops or from_serving:
        from kvsim.cli import operators
        from kvsim.cli.arguments import number

        if engine is None:
            raise InputError("calibrate: --engine is missing; name the rows' engine, such as vllm")
        if from_ops:
            share = number("--hold-out", hold_out, share=True)
            if not (share == 0 or 0.05 <= share <= 0.5):
                raise InputError(f"--hold-out: got {hold_out}; expected 0, or from 0.05 to 0.5")
            args = from_ops, engine, gpu, version, share, out
            row = operators.calibrate_operators(*args, stack or operators.start(engine))
        else:
            assert from_serving is not None
            base = stack or operators.start(engine)
            row = operators.calibrate_load_tests(from_serving, engine, base, out)
        if json:
            from kvsim.report.json import envelope, print_json

            print_json(envelope(command_line(), row))
        else:
            operators.show(row, str(out))
        return
    if device is not None:
        calibrate_machine(device, out, quick, json, page)
        return
    assert from_run is not None
    if quick or model is None or gpu is None:
        wrong = "--quick goes with --device" if quick else "--from-run needs --model and --gpu"
        raise InputError(f"calibrate: {wrong}; see kvsim calibrate --help")

    from kvsim.evidence.logs import read_run
    from kvsim.report import calibrate_run as report
    from kvsim.report.json import print_json
    from kvsim.serving.rules import Rules
    from kvsim.techniques import parse

    check_target(out, "--out")
    run = read_run(from_run)
    if run.left_out:
        print(f"kvsim: {run.left_out} requests failed or did not finish; left out", file=sys.stderr)
    stack = stack or DEFAULT_STACK
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
    if page is not None:
        found.write(page)
        say_written(page)
    if json:
        print_json(found.envelope())
    else:
        report.show_fit(found, str(out))
