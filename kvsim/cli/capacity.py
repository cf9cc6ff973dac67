"""`kvsim capacity`: the cheapest fleet for a request trace."""

import sys
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from kvsim.cli.admission import (
    AcceptanceOption,
    EngineOption,
    LossyOption,
    MaxLossOption,
    OnlyOption,
    QualityOption,
    WithoutOption,
    admission,
    largest_loss,
)
from kvsim.cli.arguments import count, number, option, seconds, words
from kvsim.cli.cacheoptions import Nic, NvmeRead, NvmeWrite
from kvsim.cli.capacityoptions import (
    MOST_BARE_TPOT,
    MOST_BARE_TTFT,
    HostCacheOption,
    NvmeCacheOption,
    PoolsOption,
    all_rentable,
    extras,
    fleet_limits,
    longer_prompts,
)
from kvsim.cli.emit import EmitOption, engines, settings, show
from kvsim.cli.options import (
    DpOption,
    EpOption,
    HostOption,
    JsonOption,
    MaxSeqsOption,
    MaxTokensOption,
    ModelOption,
    PpOption,
    StackOption,
    WeightsOption,
    command_line,
    say_written,
)
from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED
from kvsim.options import ENGINE_SHARE

if TYPE_CHECKING:
    from kvsim.planner.fleet.offers import Schedule

DEGREES = "1,2,4,8"


def capacity(
    trace: Annotated[str, option("--trace", "FILE", "A request trace, or sample:NAME.")],
    model: ModelOption,
    gpus: Annotated[str, option("--gpus", "NAME,...", "GPUs that may be rented.")],
    ttft: Annotated[str, option("--ttft", "TIME", "Longest time to first token, as 2s, or none.")],
    tpot: Annotated[str, option("--tpot", "TIME", "Longest time per token, as 100ms, or none.")],
    percentile: Annotated[
        str, option("--percentile", "P", "Share of requests within each target [%].")
    ] = "99",
    class_targets: Annotated[
        str | None,
        option(
            "--class-targets",
            "N=TTFT/TPOT,..",
            "Targets of prompts above N tokens, as 8000=10s/200ms; each class must keep its own.",
        ),
    ] = None,
    rate: Annotated[str, option("--rate", "X", "The trace X times as fast.")] = "1",
    tp: Annotated[str, option("--tp", "N,...", "GPUs per replica to consider.")] = DEGREES,
    pp: PpOption = "1",
    dp: DpOption = "1",
    ep: EpOption = "1",
    weights: WeightsOption = RELEASED,
    stack: StackOption = DEFAULT_STACK,
    only: OnlyOption = None,
    without: WithoutOption = None,
    engine: EngineOption = None,
    lossy: LossyOption = False,
    max_loss: MaxLossOption = None,
    quality: QualityOption = None,
    acceptance: AcceptanceOption = None,
    price: Annotated[str | None, option("--price", "GPU=USD,...", "Per GPU and hour.")] = None,
    reserved: Annotated[
        str | None, option("--reserved", "GPU=USD,...", "Per GPU and hour with a commitment.")
    ] = None,
    max_gpus: Annotated[
        str | None, option("--max-gpus", "N|GPU=N,...", "GPUs in all, or of a kind.")
    ] = None,
    max_host: Annotated[
        str | None, option("--max-host", "GIB", "Host memory for caches, in all.")
    ] = None,
    max_power: Annotated[
        str | None, option("--max-power", "KW", "Rated power of all GPUs.")
    ] = None,
    watts: Annotated[
        str | None,
        option("--watts", "GPU=W,...", "Rated power per GPU; the profile's if not given."),
    ] = None,
    configurations: Annotated[
        str | None, option("--configurations", "N", "Different kinds of replica at most.")
    ] = None,
    headroom: Annotated[
        str, option("--headroom", "X", "Share of load beyond the trace's that must be carried.")
    ] = "0",
    failures: Annotated[
        str, option("--failures", "K", "Replicas that may be lost without missing a target.")
    ] = "0",
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Start and stop replicas over the day.")
    ] = False,
    start_up: Annotated[
        str, option("--start-up", "TIME", "Paid before a started replica serves.")
    ] = "5min",
    windows: Annotated[
        str | None, option("--windows", "N", "Parts of the trace with a rate of their own.")
    ] = None,
    gpu_memory_utilization: Annotated[
        str, option("--gpu-memory-utilization", "X", "Share of GPU memory that engines use.")
    ] = str(ENGINE_SHARE),
    host_memory: HostOption = None,
    host_cache: HostCacheOption = None,
    nvme_cache: NvmeCacheOption = None,
    nvme_read: NvmeRead = None,
    nvme_write: NvmeWrite = None,
    nic: Nic = None,
    pools: PoolsOption = "auto",
    max_seqs: MaxSeqsOption = "256",
    max_tokens: MaxTokensOption = "2048",
    spread: Annotated[
        str | None,
        option("--spread", "X", "Spread of log(measured / predicted); the ledger's if not given."),
    ] = None,
    emit: EmitOption = None,
    json: JsonOption = False,
    report: Annotated[str | None, option("--report", "F.html", "Write an HTML page there.")] = None,
) -> None:
    """Find the cheapest fleet that serves a trace within targets."""
    from kvsim.emit.served import serve_costs
    from kvsim.files.writing import check_target
    from kvsim.planner.fleet.answer import make_capacity
    from kvsim.planner.fleet.comparisons import CapacityQuestion
    from kvsim.planner.fleet.demand import FleetTargets, traffic_of
    from kvsim.planner.fleet.offers import Spread
    from kvsim.report import capacity as answers
    from kvsim.report import capacity_page, capacity_tables
    from kvsim.serving.rules import Rules
    from kvsim.traces.read import load

    if report is not None:
        check_target(report, "--report")
    wanted = engines(emit)
    names = words("--gpus", gpus)
    if not schedule and (start_up != "5min"):
        raise InputError("--start-up: replicas start only with --schedule; add it or omit this")
    targets = FleetTargets(
        seconds("--ttft", ttft, MOST_BARE_TTFT),
        seconds("--tpot", tpot, MOST_BARE_TPOT),
        number("--percentile", percentile) / 100,
        () if class_targets is None else longer_prompts(class_targets),
    )
    limits = fleet_limits(
        names, targets.share, max_gpus, max_host, max_power, configurations, headroom, failures
    )
    rentable = all_rentable(
        model, names, (tp, pp, dp, ep), weights, stack, host_memory, price, reserved, watts
    )
    unknown = [x.gpu for x in rentable if not isfinite(x.power)]
    if max_power is not None and unknown:
        raise InputError(
            f"--max-power: the rated power of {unknown[0]} is unknown; add --watts "
            f"{quote(unknown[0])}=W"
        )
    used = number("--gpu-memory-utilization", gpu_memory_utilization, share=True)
    off = None if spread is None else Spread(number("--spread", spread), "given with --spread")
    found = load(trace)
    for note in found.notes:
        print(f"kvsim: {note}", file=sys.stderr)
    if not len(found.requests):
        raise InputError(f"--trace: {trace} has no requests; expected at least one")
    requests = found.requests.scaled(number("--rate", rate))
    longest = int(requests.prompt.max())
    if targets.longer and targets.longer[-1].above >= longest:
        raise InputError(
            f"--class-targets: the trace's longest prompt has {longest:,} tokens, so targets above "
            f"{targets.longer[-1].above:,} do nothing; leave them out"
        )
    parts = 0 if windows is None else _windows(windows, len(requests))
    question = CapacityQuestion(
        traffic=traffic_of(requests, parts, targets),
        rentable=rentable,
        admission=admission(only, without, engine, lossy, quality, acceptance),
        targets=targets,
        limits=limits,
        rules=Rules(
            max_seqs=count("--max-seqs", max_seqs),
            max_tokens=count("--max-tokens", max_tokens),
            prefix_caching=requests.block_ids is not None,
        ),
        largest_loss=largest_loss(max_loss, lossy),
        spread=off,
        utilisation=used,
        schedule=_schedule(start_up) if schedule else None,
        extras=extras(
            requests.block_ids is not None,
            rentable,
            {
                "host_cache": host_cache,
                "nvme_cache": nvme_cache,
                "nvme_read": nvme_read,
                "nvme_write": nvme_write,
                "nic": nic,
            },
            pools,
        ),
    )
    answer = make_capacity(question, _tell)
    shown = answers.row(answer, trace)
    for replica, j in zip(shown["fleet"], answer.used, strict=True):
        x = answer.market.configurations[j]
        replica["settings"] = settings(wanted, serve_costs(x.costs, used, x.sides))
    if report is not None:
        capacity_page.write_page(Path(report), shown, answer, command_line())
        say_written(Path(report))
    if json:
        from kvsim.report.json import print_json

        print_json(answers.envelope(answer, shown, command_line()))
    else:
        capacity_tables.show(shown)
        for replica in shown["fleet"]:
            show(replica["settings"])
    if answer.shortfall:
        raise InfeasibleError(f"not as asked: {answer.shortfall}")


def _windows(text: str, requests: int) -> int:
    value = count("--windows", text)
    if not 1 <= value <= min(requests, 288):
        raise InputError(f"--windows: got {value}; expected 1 to {min(requests, 288)}")
    return value


def _schedule(start_up: str) -> "Schedule":
    from kvsim.planner.fleet.offers import Schedule

    return Schedule(seconds("--start-up", start_up, float("inf")) / 3600)


def _tell(what: str) -> None:
    """Progress on a terminal."""
    if sys.stderr.isatty():
        print(f"kvsim: {what}", file=sys.stderr)
