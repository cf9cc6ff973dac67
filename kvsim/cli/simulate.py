"""`kvsim simulate`: a request trace under continuous batching."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.arguments import count, either, option, seconds
from kvsim.cli.cacheoptions import (
    CacheBlock,
    CacheTtl,
    GpuShare,
    HostCache,
    Nic,
    NvmeCache,
    NvmeRead,
    NvmeWrite,
    PrefillReplicas,
    PrefixLoad,
    RemoteCache,
    Transfer,
    memories,
    two_pools,
    usable_memory,
    ways_to_load,
)
from kvsim.cli.cases import cases, told
from kvsim.cli.options import (
    DpOption,
    EpOption,
    GpuOption,
    HostOption,
    JsonOption,
    MaxSeqsOption,
    MaxTokensOption,
    ModelOption,
    PpOption,
    StackOption,
    TpOption,
    WeightsOption,
    command_line,
    deployment,
    say_written,
)
from kvsim.cli.serve import Job, requests_of
from kvsim.cli.traceoptions import (
    AbortAfter,
    CharsPerToken,
    Columns,
    Format,
    SkipBad,
    Sort,
    TimeUnit,
    hash_blocks,
    reading,
)
from kvsim.errors import InputError
from kvsim.files import check_target, make_folder
from kvsim.machines.hardware import DEFAULT_STACK, RELEASED


def simulate(
    trace: Annotated[str, option("--trace", "FILE", "A request trace, or sample:NAME.")],
    model: ModelOption,
    gpu: GpuOption,
    technique: Annotated[str, option("--technique", "SPEC", "NAME or NAME:KEY=VALUE,...")] = "full",
    compare: Annotated[
        str, option("--compare", "SPEC,...", "Several, as full,kivi:bits=4,kvpr, instead of one.")
    ] = "",
    replicas: Annotated[
        str, option("--replicas", "N,..", "Replicas of the model; of several each is run.")
    ] = "1",
    route: Annotated[
        str, option("--route", "HOW", "round-robin, least-loaded, prefix-aware or cache-and-load.")
    ] = "round-robin",
    rate: Annotated[
        str | None, option("--rate", "X,..", "The trace X times as fast; of several each is run.")
    ] = None,
    req_s: Annotated[
        str | None,
        option(
            "--req-s",
            "R,..",
            "So many requests per second instead; a short trace is repeated for two minutes.",
        ),
    ] = None,
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
    host_cache: HostCache = None,
    nvme_cache: NvmeCache = None,
    remote_cache: RemoteCache = None,
    cache_ttl: CacheTtl = None,
    cache_block: CacheBlock = None,
    prefix_load: PrefixLoad = None,
    nvme_read: NvmeRead = None,
    nvme_write: NvmeWrite = None,
    nic: Nic = None,
    prefill_replicas: PrefillReplicas = None,
    transfer: Transfer = None,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            "--acceptance", metavar="F.json", help="Accepted drafts, from an attention trace."
        ),
    ] = None,
    draws: Annotated[
        str | None,
        option("--draw-acceptance", "SEED", "Draw accepted tokens per round instead of the mean."),
    ] = None,
    abort_after: AbortAfter = None,
    ttft: Annotated[
        str | None, option("--ttft", "TIME", "Target of a good request, as 2s or 500ms.")
    ] = None,
    tpot: Annotated[str | None, option("--tpot", "TIME", "Target of a good request.")] = None,
    stack: StackOption = DEFAULT_STACK,
    tp: TpOption = "1",
    pp: PpOption = "1",
    dp: DpOption = "1",
    ep: EpOption = "1",
    weights: WeightsOption = RELEASED,
    host_memory: HostOption = None,
    gpu_memory: Annotated[
        str | None, option("--gpu-memory", "GIB", "GPU memory to use; 0.9 of it if not given.")
    ] = None,
    gpu_memory_utilization: GpuShare = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="F.parquet|DIR", help="Every request's times; with --compare a folder."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take from --out what an earlier run has finished.")
    ] = False,
    report: Annotated[str | None, option("--report", "F.html", "Write an HTML page there.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Verify that no request is lost or starts too early.")
    ] = False,
    format: Format = "",
    columns: Columns = "",
    time_unit: TimeUnit = "",
    hash_block_tokens: Annotated[str, hash_blocks("--hash-block-tokens")] = "",
    chars_per_token: CharsPerToken = "",
    sort: Sort = False,
    skip_bad: SkipBad = False,
    json: JsonOption = False,
) -> None:
    """Replay a request trace under continuous batching."""
    from kvsim.report import names, simulate_page
    from kvsim.report import simulate as tables
    from kvsim.report.evidence import newest_measurement
    from kvsim.report.json import envelope, print_json
    from kvsim.report.simulate_answer import Simulations, answered
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.rounds import drawn_rate, measured_for, with_acceptance
    from kvsim.serving.rules import Rules
    from kvsim.techniques import parse, parse_several
    from kvsim.traces.attentionfile import load as load_attention
    from kvsim.traces.read import load

    if report is not None:
        check_target(report, "--report")
    kinds = parse_several(compare) if compare else [parse(technique)]
    if not kinds:
        raise InputError(f"--compare: got {compare!r}; expected techniques, as full,kivi:bits=4")
    if rate is not None and req_s is not None:
        raise InputError("--req-s: --rate says the same as a factor; give one of them")
    listed = {
        "replicas": replicas, "rate": rate, "req_s": req_s, "host_cache": host_cache,
        "nvme_cache": nvme_cache, "prefix_load": prefix_load,
    }  # fmt: skip
    runs = [(kind, case) for case in cases(listed) for kind in kinds]
    several = bool(compare) or len(runs) > 1
    names_of = [" ".join([str(kind), *_written(told(case, listed))]) for kind, case in runs]
    places = _places(out, names_of, several)
    where = deployment(model, gpu, stack, tp, weights, host_memory, (pp, dp, ep))

    def rules_of(case: dict[str, str | None], way: str) -> Rules:
        return Rules(
            max_seqs=count("--max-seqs", max_seqs),
            max_tokens=count("--max-tokens", max_tokens),
            block_tokens=count("--block-tokens", block_tokens),
            blocks=count("--blocks", blocks),
            prefill=prefill,
            priority=priority,
            preemption=preemption,
            admission=admission,
            prefix_caching=prefix_caching,
            **memories(
                {
                    "host_cache": case["host_cache"],
                    "nvme_cache": case["nvme_cache"],
                    "remote_cache": remote_cache,
                    "cache_ttl": cache_ttl,
                    "cache_block": cache_block,
                    "nvme_read": nvme_read,
                    "nvme_write": nvme_write,
                    "nic": None if prefill_replicas and remote_cache is None else nic,
                },
                way,
            ),
        ).over(where)

    usable = usable_memory(gpu_memory, gpu_memory_utilization, where.hardware.gpu_memory)
    targets = Targets(
        ttft=seconds("--ttft", either(ttft, "none"), 60),
        tpot=seconds("--tpot", either(tpot, "none"), 1),
    )
    attention = None if acceptance is None else load_attention(acceptance)
    seed = None if draws is None else count("--draw-acceptance", draws)
    options = reading(
        format, columns, time_unit, hash_block_tokens, chars_per_token, sort, skip_bad,
        "--hash-block-tokens",
    )  # fmt: skip
    found = load(trace, options)
    for note in found.notes:
        print(f"kvsim: {note}", file=sys.stderr)
    results, jobs = [], []
    left_out: dict[str, str] = {}
    for (kind, case), place in zip(runs, places, strict=True):
        reason = kind.refuses(where) if len(kinds) > 1 else ""
        if reason and kind.name not in left_out:
            left_out[kind.name] = f"{kind.name} cannot run here: {reason}"
            print(f"kvsim: left out: {left_out[kind.name]}", file=sys.stderr)
        if reason:
            continue
        requests = requests_of(found.requests, case, abort_after)
        fleet = count("--replicas", str(case["replicas"]))
        measured = None if attention is None else measured_for(kind, attention)
        first, *others = ways_to_load(partial(rules_of, case), case["prefix_load"])
        costs = StepCosts(
            technique=with_acceptance(kind, measured),
            deployment=where,
            rules=first,
            longest=int((requests.prompt + requests.generate).max()),
            longest_prompt=int(requests.prompt.max()),
            gpu_memory=usable,
        )
        rates = None if seed is None else drawn_rate(costs, requests.generate, seed, measured)
        pools = two_pools(fleet, prefill_replicas, transfer, nic)
        otherwise = tuple(map(costs.with_rules, others))
        jobs.append(Job(requests, costs, fleet, route, rates, targets, pools, otherwise))
        result = jobs[-1].result(place, resume, check)
        if len(runs) > len(kinds):
            result["row"] |= {"case": told(case, listed)}
        results.append(result)
    if not results:
        raise InputError(f"--compare: none can run there; {next(iter(left_out.values()))}")
    shown = [result["row"] for result in results]
    asked = " and ".join(f"{name} {x}" for name, x in (("TTFT", ttft), ("TPOT", tpot)) if x)
    answer = answered(shown, where, trace, asked, list(left_out.values()), jobs)
    simulated = Simulations(command_line(), answer, shown, results)
    if report is not None:
        simulate_page.write_page(Path(report), names.deployment(where), trace, simulated)
        say_written(Path(report))
    if json:
        own = {"runs": shown} if len(runs) > len(kinds) else {"rows": shown}
        fields = (own if several else shown[0]) | {"answer": answer.row()}
        print_json(
            envelope(
                command_line(), fields, verdict=answer.verdict, notes=list(found.notes),
                evidence=answer.evidence, data=newest_measurement([where]),
            )
        )  # fmt: skip
    else:
        tables.show(simulated, trace, checked=check)


def _written(case: dict[str, str | float]) -> list[str]:
    """The values of a case as part of a file's name."""
    return [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in case.items()
    ]


def _places(out: Path | None, specs: list[str], several: bool) -> list[Path | None]:
    """A file for each technique, if files are wanted at all."""
    if out is None:
        return [None] * len(specs)
    if several:
        if out.suffix == ".parquet" or (out.exists() and not out.is_dir()):
            raise InputError(f"--out: got {str(out)[:60]!r}; expected a folder with --compare")
        if not out.parent.is_dir():
            raise InputError(f"--out: {out.parent} is not there; choose an existing folder")
        make_folder(out, "--out")
        names = [f"{spec.replace(':', ' ').replace('/', '_')}.parquet" for spec in specs]
        return [check_target(out / name, f"--out for {name}") for name in names]
    check_target(out, "--out", (".parquet",))
    return [out]
