"""`kvsim simulate`: a request trace under continuous batching."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvsim.arguments import count, gib, number, option
from kvsim.commands.options import (
    GpuOption,
    HostOption,
    JsonOption,
    MaxSeqsOption,
    MaxTokensOption,
    ModelOption,
    StackOption,
    TpOption,
    WeightsOption,
    deployment,
)
from kvsim.errors import InfeasibleError, InputError


def simulate(
    trace: Annotated[str, option("--trace", "FILE", "A request trace, or sample:NAME.")],
    model: ModelOption,
    gpu: GpuOption,
    technique: Annotated[str, option("--technique", "SPEC", "NAME or NAME:KEY=VALUE,...")] = "full",
    compare: Annotated[
        str, option("--compare", "SPEC ...", "Several, as 'full kivi:bits=4', instead of one.")
    ] = "",
    replicas: Annotated[str, option("--replicas", "N", "Replicas of the model.")] = "1",
    route: Annotated[
        str, option("--route", "HOW", "round-robin, least-loaded or prefix-aware.")
    ] = "round-robin",
    rate: Annotated[str, option("--rate", "X", "The trace X times as fast.")] = "1",
    max_seqs: MaxSeqsOption = "256",
    max_tokens: MaxTokensOption = "2048",
    block_tokens: Annotated[str, option("--block-tokens", "N", "Tokens per KV block.")] = "16",
    blocks: Annotated[
        str, option("--blocks", "N", "KV blocks, as your engine prints them; by default derived.")
    ] = "0",
    prefill: Annotated[str, option("--prefill", "HOW", "chunked, or whole prompts.")] = "chunked",
    priority: Annotated[str, option("--priority", "WHO", "decode or prefill.")] = "decode",
    preemption: Annotated[str, option("--preemption", "HOW", "recompute or swap.")] = "recompute",
    admission: Annotated[
        str, option("--admission", "WHEN", "Memory free for the whole prompt, or its first chunk.")
    ] = "prompt",
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching", help="Keep computed prompt blocks.")
    ] = False,
    host_cache: Annotated[
        str | None, option("--host-cache", "GIB", "Host memory for swapped and evicted cache.")
    ] = None,
    acceptance_draws: Annotated[
        str | None,
        option("--draw-acceptance", "SEED", "Draw accepted tokens per round instead of the mean."),
    ] = None,
    ttft: Annotated[str | None, option("--ttft", "SECONDS", "Target of a good request.")] = None,
    tpot: Annotated[str | None, option("--tpot", "SECONDS", "Target of a good request.")] = None,
    stack: StackOption = "fused",
    tp: TpOption = "1",
    weights: WeightsOption = "fp16",
    host_memory: HostOption = None,
    gpu_memory: Annotated[
        str | None, option("--gpu-memory", "GIB", "GPU memory to use; all if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="F.parquet", help="Every request's times.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove that nothing is lost or served early.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Replay a request trace under continuous batching."""
    from json import dumps

    from kvsim.basis import basis
    from kvsim.report import serving as report
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Outcome, Targets, faults
    from kvsim.serving.rounds import drawn_rate
    from kvsim.serving.rules import Rules
    from kvsim.serving.simulate import simulate as play
    from kvsim.techniques import parse
    from kvsim.traces.read import load

    if out is not None and (out.suffix != ".parquet" or compare):
        expected = "one technique with --out" if compare else "a name ending in .parquet"
        raise InputError(f"--out: got {str(out)[:60]!r}; expected {expected}")
    where = deployment(model, gpu, stack, tp, weights, host_memory)
    rules = Rules(
        max_seqs=count("--max-seqs", max_seqs),
        max_tokens=count("--max-tokens", max_tokens),
        block_tokens=count("--block-tokens", block_tokens),
        blocks=count("--blocks", blocks),
        prefill=prefill,
        priority=priority,
        preemption=preemption,
        admission=admission,
        prefix_caching=prefix_caching,
        host_cache=0.0 if host_cache is None else gib("--host-cache", host_cache),
    )
    targets = Targets(
        ttft=float("inf") if ttft is None else number("--ttft", ttft),
        tpot=float("inf") if tpot is None else number("--tpot", tpot),
    )
    found = load(trace)
    for note in found.notes:
        print(f"kvsim: {note}", file=sys.stderr)
    requests = found.requests.scaled(number("--rate", rate))
    rows = []
    for text in compare.split() or [technique]:
        costs = StepCosts(
            technique=parse(text),
            deployment=where,
            rules=rules,
            longest=int((requests.prompt + requests.generate).max()),
            longest_prompt=int(requests.prompt.max()),
            gpu_memory=None if gpu_memory is None else gib("--gpu-memory", gpu_memory),
        )
        draws = None
        if acceptance_draws is not None:
            draws = drawn_rate(
                costs, requests.generate, count("--draw-acceptance", acceptance_draws)
            )
        run = play(requests, costs, count("--replicas", replicas), route, draws)
        wrong = faults(run) if check else []
        if wrong:
            raise InfeasibleError(f"--check: {text}: {'; '.join(wrong)}")
        rows.append(Outcome(run, targets).summary() | {"basis": basis(where)})
        if out is not None:
            report.write_requests(out, run)
    if json:
        typer.echo(dumps(rows if compare else rows[0], indent=2, allow_nan=False))
    else:
        report.show(rows, trace, checked=check)
