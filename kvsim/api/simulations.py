"""A request trace under continuous batching, with one technique or several."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.api.cost import announce_cost
from kvsim.api.deployments import build_deployment
from kvsim.api.traffic import ServedRequests, read_traffic
from kvsim.console import ProgressLine, print_note, print_once
from kvsim.errors import InfeasibleError, InputError
from kvsim.files import check_target, make_folder
from kvsim.frozen import frozen
from kvsim.options import Inputs, takes_options

if TYPE_CHECKING:
    from kvsim.graph import Array
    from kvsim.machines.deployment import Deployment
    from kvsim.report.json import Row
    from kvsim.report.result import Result
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.pools import TwoPools
    from kvsim.serving.rules import Rules
    from kvsim.serving.simulate import Run
    from kvsim.traces.requests import Requests

MAX_RUNS = 32
"""Combinations of values that one command runs."""

VARIED = ("replicas", "rate", "req_s", "max_tokens", "host_cache", "nvme_cache", "prefix_load")
"""Options that take several values, of which each combination is run."""

AUTO = "auto"  # of --prefix-load: every way is played, the best is kept


@frozen
class TraceRun:
    """All that the run of one technique depends on."""

    requests: "Requests"
    costs: "StepCosts"
    replicas: int
    route: str
    rates: "Array | None"  # tokens per decoding round of each request, None for the mean (n,)
    targets: "Targets"
    pools: "TwoPools | None" = None
    otherwise: "tuple[StepCosts, ...]" = ()  # other rules: those with the least mean TTFT are kept

    def result(self, place: Path | None, resume: bool, check: bool) -> "Row":
        """Run the simulation, or take the result of an earlier one.

        Parameters
        ----------
        place
            Where every request's times are written; nowhere if None.
        resume
            Whether to take the result that is there if it is of the same run.
        check
            Whether to check the simulation for faults.

        Returns
        -------
        dict
            The run's entry in an answer.

        Raises
        ------
        InfeasibleError
            If a check finds a fault.
        InputError
            If the place cannot be written, or ``resume`` finds another run there.
        """
        from kvsim.report import runfile
        from kvsim.report.simulate import run_fields
        from kvsim.serving.outcome import Outcome, faults

        pools = [self.pools] if self.pools else []
        what = self.requests, self.costs, self.rates, self.replicas, self.route, self.targets
        mark = runfile.run_digest(*what, *pools, *self.otherwise)
        if place is not None and resume:
            before = runfile.read_finished_run(place, mark)
            if before is not None:
                return before
        run = min(map(self._play, (self.costs, *self.otherwise)), key=_mean_ttft)
        name = str(self.costs.technique)
        wrong = faults(run) if check else []
        if wrong:
            raise InfeasibleError(f"--check: {name}: {'; '.join(wrong)}")
        found = run_fields(Outcome(run, self.targets))
        if self.otherwise:
            way = run.costs.rules.prefix_load
            found["row"]["prefix_load"] = way
            least = f"mean TTFT is shortest with {way}: {_mean_ttft(run):.4g} s"
            print_note(f"--prefix-load auto: {name}: {least}")
        if place is not None:
            runfile.write(place, run, mark, found)
        return found

    def _play(self, costs: "StepCosts") -> "Run":
        from kvsim.serving.pools import simulate_pools
        from kvsim.serving.simulate import simulate

        way = f", prefix load {costs.rules.prefix_load}" if self.otherwise else ""
        progress = ProgressLine(f"{costs.technique}{way}", "requests", len(self.requests))
        what = self.requests, costs
        if self.pools is None:
            run = simulate(*what, self.replicas, self.route, self.rates, told=progress)
        else:
            run = simulate_pools(*what, self.pools, self.route, self.rates, told=progress)
        progress.finish()
        return run


def _mean_ttft(run: "Run") -> float:
    """Of the requests that got a token; infinite if none did. [s]"""
    import numpy as np

    from kvsim.serving.outcome import Outcome

    ttft = Outcome(run).ttft_s
    known = ttft[np.isfinite(ttft)]
    return float(known.mean()) if known.size else float("inf")


@takes_options("simulate", "trace", "model", "gpu", "technique")
def simulate(inputs: Inputs) -> "Result[Sequence[Row]]":
    """Simulate a request trace under continuous batching, with one technique or several.

    Returns
    -------
    Result
        Times, goodput and memory, one row per technique.

    Raises
    ------
    InputError
        For what the command would refuse.

    Examples
    --------
    >>> run = simulate("sample:chat", "llama3-8b", "h100", ttft="2s", tpot="100ms")
    >>> run.rows[0]["requests"], run.ttft.p50 < run.ttft.p99
    (500, True)
    """
    from kvsim.report.simulate import make_result
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.rounds import draw_rates, find_acceptance, with_acceptance
    from kvsim.serving.servable import within_context
    from kvsim.techniques import parse, parse_several
    from kvsim.traces.attention import load as load_attention

    text = inputs.technique if inputs.compare is None else inputs.compare
    kinds = parse_several(text) or [parse("")]
    cases = list(_cases(inputs))
    runs = [(kind, values, shown) for values, shown in cases for kind in kinds]
    several = inputs.compare is not None or len(runs) > 1
    places = _places(inputs.out, [_name_run(kind, shown) for kind, _, shown in runs], several)
    where, none = build_deployment(inputs), float("inf")
    usable = inputs.gpu_memory
    if inputs.gpu_memory_utilization is not None:
        usable = inputs.gpu_memory_utilization * where.hardware.gpu_memory
    targets = Targets(
        ttft=none if inputs.ttft is None else inputs.ttft,
        tpot=none if inputs.tpot is None else inputs.tpot,
    )
    attention = None if inputs.acceptance is None else load_attention(inputs.acceptance)
    found = read_traffic(inputs)
    for note in found.notes:
        print_note(note)
    within_context(found.requests, where.model, inputs.max_model_len or 0)  # or none is served
    announce_cost(inputs, len(found.requests), len(runs))
    where = _without_server(where, found.requests)
    results, replays = [], []
    left_out: dict[str, str] = {}
    for (kind, values, shown), place in zip(runs, places, strict=True):
        reason = kind.refuses(where) if len(kinds) > 1 else ""
        if reason and kind.name not in left_out:
            left_out[kind.name] = f"{kind.name} cannot run here: {reason}"
            print_note(f"left out: {left_out[kind.name]}")
        if reason:
            continue
        requests = _prepare_requests(found, values, inputs.abort_after)
        measured = None if attention is None else find_acceptance(kind, attention)
        first, *others = _build_rules(inputs, values, where, found.reuses)
        technique = with_acceptance(kind, measured)
        costs = StepCosts.for_requests(technique, where, first, requests, usable)
        seed, fleet = inputs.draw_acceptance, values["replicas"]
        rates = None if seed is None else draw_rates(costs, requests.generate, seed, measured)
        pools, otherwise = _build_pools(inputs, fleet), tuple(map(costs.with_rules, others))
        replay = TraceRun(requests, costs, fleet, inputs.route, rates, targets, pools, otherwise)
        result = replay.result(place, inputs.resume, inputs.check)
        if len(cases) > 1:
            result["row"] |= {"case": shown}
        results.append(result)
        replays.append(replay)
    if not results:
        raise InputError(f"--compare: none can run there; {next(iter(left_out.values()))}")
    given = inputs.given
    wanted = [f"{name.upper()} {given[name]}" for name in ("ttft", "tpot") if name in given]
    return make_result(
        results,
        where,
        found.name,
        " and ".join(wanted),
        command=inputs.line(),
        left_out=list(left_out.values()),
        played=replays,
        listed=several,
        checked=inputs.check,
        notes=found.notes,
    )


def _without_server(where: "Deployment", requests: "Requests") -> "Deployment":
    """The deployment of requests that are all there at once: an offline run, without a server."""
    if len(requests) < 2 or requests.depends or requests.arrival.max() > 0:
        return where
    if where.stack.offline != where.stack:
        print_note("all requests are there at once: an offline run, without a server's work")
    return replace(where, stack=where.stack.offline)


def _cases(inputs: Inputs) -> Iterator[tuple[dict[str, Any], "Row"]]:
    """Every combination of the options that take several values, and how it is shown.

    Raises
    ------
    InputError
        For too many combinations.
    """
    lists = {name: getattr(inputs, name) or [(None, None)] for name in VARIED}
    varied = [name for name, some in lists.items() if len(some) > 1]
    shown = {name: "req_s" if name == "rate" and inputs.trace is None else name for name in varied}
    count = prod(map(len, lists.values()))
    if count > MAX_RUNS:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in varied)
        raise InputError(
            f"{names}: {count} combinations; expected at most {MAX_RUNS} in one command"
        )
    for some in product(*lists.values()):
        given = dict(zip(lists, some, strict=True))
        yield (
            {name: value for name, (_, value) in given.items()},
            {shown[name]: _as_number(given[name][0]) for name in varied},
        )


def _as_number(given: object) -> float | str:
    try:
        return float(str(given).removesuffix("x"))
    except ValueError:
        return str(given)


def _name_run(technique: object, case: Mapping[str, float | str]) -> str:
    """A technique and the values of its case, as part of a file's name."""
    values = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in case.items()
    ]
    return " ".join([str(technique), *values])


def _places(out: Path | None, runs: list[str], several: bool) -> list[Path | None]:
    """A file for each run, if files are wanted at all."""
    if out is None:
        return [None] * len(runs)
    if several:
        if out.suffix == ".parquet" or (out.exists() and not out.is_dir()):
            raise InputError(f"--out: got {str(out)[:60]!r}; expected a folder with --compare")
        if not out.parent.is_dir():
            raise InputError(f"--out: {out.parent} is not there; choose an existing folder")
        make_folder(out, "--out")
        names = [f"{run.replace(':', ' ').replace('/', '_')}.parquet" for run in runs]
        return [check_target(out / name, f"--out for {name}") for name in names]
    check_target(out, "--out", (".parquet",))
    return [out]


def _prepare_requests(
    traffic: "ServedRequests", case: Mapping[str, Any], abort_after: float | None
) -> "Requests":
    """The requests at the rate of a case, and with clients that hang up.

    Raises
    ------
    InputError
        For options that fit neither the trace nor each other.
    """
    import numpy as np

    from kvsim.traces.requests import at_rate

    requests, rate = traffic.requests, case["rate"]
    if traffic.workload is not None:
        rate = case["req_s"] if rate is None else rate
        found = requests if rate is None else traffic.at_rate(rate)
    elif case["req_s"] is not None:
        found, copies = at_rate(requests, case["req_s"])
        if copies > 1:
            print_note(
                f"{case['req_s']:g} requests per second: the trace is repeated {copies} times, "
                f"each time with prompts of its own"
            )
    else:
        found = requests if rate is None else traffic.at_rate(rate)
    if abort_after is not None:
        if abort_after == float("inf"):
            raise InputError("--abort-after: none does nothing; leave it out")
        if requests.abort_after is not None:
            raise InputError("--abort-after: the trace says when its clients hang up; leave it out")
        found = replace(found, abort_after=np.full(len(found), abort_after))
    return found


def _build_rules(
    inputs: Inputs, case: Mapping[str, Any], deployment: "Deployment", reuses: bool
) -> "tuple[Rules, ...]":
    """The engine's rules; where the way of loading prefixes is chosen, those with each way.

    Raises
    ------
    InputError
        For an unknown way.
    """
    from kvsim.serving.rules import PREFIX_LOADS, SPLIT, Rules

    names = (
        "max_seqs", "max_model_len", "block_tokens", "blocks", "prefill",
        "priority", "preemption", "admission", "prefix_caching", "remote_cache", "cache_ttl",
        "cache_block", "nvme_read", "nvme_write",
    )  # fmt: skip
    settings = {name: getattr(inputs, name) for name in names}
    settings |= {name: case[name] for name in ("max_tokens", "host_cache", "nvme_cache")}
    if inputs.prefill_replicas is None or inputs.remote_cache is not None:
        settings["nic"] = inputs.nic
    given = {name: value for name, value in settings.items() if value is not None}
    sizes = [*(inputs.host_cache or ()), *(inputs.nvme_cache or ())]  # of all runs: one may be 0
    stored = any(size for _, size in sizes) or bool(inputs.remote_cache)
    implied = stored and inputs.preemption == "recompute" and not reuses
    if implied and not inputs.prefix_caching:
        print_once("prefix caching is on, as the memories for prefix blocks need it")
    given["prefix_caching"] = inputs.prefix_caching or reuses or implied
    given |= {name: given.get(name, 0) for name in ("max_seqs", "max_tokens")}  # 0: the engine's

    def build(way: str) -> Rules:
        return Rules(**given, prefix_load=way).scale_to(deployment)

    way = case["prefix_load"]
    if way is None:
        usual = build(PREFIX_LOADS[SPLIT])
        if not usual.tiers:
            return (usual,)
        way = AUTO
    if way not in (*PREFIX_LOADS, AUTO):
        raise InputError(
            f"--prefix-load: got {way[:40]!r}; expected {', '.join(PREFIX_LOADS)} or {AUTO}"
        )
    return tuple(map(build, PREFIX_LOADS if way == AUTO else (way,)))


def _build_pools(inputs: Inputs, replicas: int) -> "TwoPools | None":
    """Replicas by what they do; None where all do both."""
    from kvsim.serving.pools import TRANSFERS, TwoPools
    from kvsim.serving.rules import NIC_RATE

    first = inputs.prefill_replicas
    if first is None:
        return None
    rate = NIC_RATE if inputs.nic is None else inputs.nic
    return TwoPools(first, replicas - first, inputs.transfer or TRANSFERS[0], rate)
