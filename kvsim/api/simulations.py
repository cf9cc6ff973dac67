"""``kvsim simulate``: a request trace under continuous batching, with one or several techniques."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.api.cost import RUNS_TO_FIND, TURN_WORK, announce_cost
from kvsim.api.deployments import build_deployment, refuse_idle_drive
from kvsim.api.traffic import ServedRequests, read_traffic
from kvsim.console import ProgressLine, print_note, print_once
from kvsim.errors import InfeasibleError, InputError
from kvsim.files import check_target, make_folder
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.inputs import parse_rate
from kvsim.machines.deployment import Deployment
from kvsim.options import Inputs, command_line, takes_options
from kvsim.report.json import Row, number
from kvsim.report.names import join_words
from kvsim.report.result import Result
from kvsim.report.simulate import (
    arrival_rate,
    count_replicas,
    is_overloaded,
    keeps_targets,
    make_result,
    read_finished_run,
    run_digest,
    run_fields,
    write_run,
)
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, Targets, faults
from kvsim.serving.pools import TRANSFERS, TwoPools, simulate_pools
from kvsim.serving.records import World
from kvsim.serving.rules import NIC_RATE, PREFIX_LOADS, SPLIT, Rules
from kvsim.serving.servable import within_context
from kvsim.serving.simulate import Run, draw_rates, find_acceptance, usual_route, with_acceptance
from kvsim.techniques import parse, parse_several
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import load as load_attention
from kvsim.traces.requests import Requests
from kvsim.traces.resample import MOST_REQUESTS, at_rate

MAX_RUNS = 32
"""Combinations of values that one command runs."""


SIZE_OPTIONS = ("max_tokens", "max_seqs", "host_cache", "nvme_cache")
VARIED = ("replicas", "rate", "req_s", *SIZE_OPTIONS, "prefix_load")
"""Options that take several values, of which each combination is run."""

SOUGHT = ("rate", "replicas", "hit-rate", "host-cache", "prefill-replicas")
CLOSE = 1.02  # how near to each other the last value that keeps the targets and the next one are
FEW_REQUESTS = 50  # that a part of a trace's clients sends, from which a rate is tried
MOST_SHARES = 16  # of replicas that read prompts, each of which is played
MOST_TRIED = 3  # numbers of replicas that are simulated where one run is overloaded
COMPARED = 20.0  # estimate of a command below which a run without its caches is added [s]
ROWS_AROUND = 2  # on either side of what was found, that are shown

OF_TIERS = (
    *("host_cache", "nvme_cache", "remote_cache", "cache_ttl", "cache_block"),
    *("prefix_load", "nvme_read", "nvme_write", "nic"),
)
CACHES = ("prefix_caching", *OF_TIERS)
AUTO = "auto"  # of --prefix-load: every way is played, the best is kept


@frozen
class TraceRun:
    """The inputs of one simulation: requests, cost model, replicas, router and targets."""

    requests: Requests
    costs: StepCosts
    replicas: int
    route: str
    rates: Array | None  # tokens per decoding round of each request, None for the mean (n,)
    targets: Targets
    pools: TwoPools | None = None
    otherwise: tuple[StepCosts, ...] = ()  # other rules: those with the least mean TTFT are kept

    def result(self, place: Path | None, resume: bool, check: bool) -> Row:
        """Run the simulation, or return the stored result of the same simulation.

        Parameters
        ----------
        place
            Parquet file for the times of every request; None to store nothing.
        resume
            Whether a result in that file is reused if it is of the same simulation.
        check
            Whether to check that no request was lost or started early, and that memory sufficed.

        Returns
        -------
        dict
            The row of the results table, with time series and quantiles for charts.

        Raises
        ------
        InfeasibleError
            If ``check`` finds a fault.
        InputError
            If the file cannot be written, or ``resume`` finds a different simulation in it.
        """

        pools = [self.pools] if self.pools else []
        what = self.requests, self.costs, self.rates, self.replicas, self.route, self.targets
        mark = run_digest(*what, *pools, *self.otherwise)
        if place is not None and resume:
            before = read_finished_run(place, mark)
            if before is not None:
                return before
        runs = [self._play(costs) for costs in (self.costs, *self.otherwise)]
        run = min(runs, key=_mean_ttft)
        name = str(self.costs.technique)
        wrong = faults(run) if check else []
        if wrong:
            raise InfeasibleError(f"--check: {name}: {'; '.join(wrong)}")
        found = run_fields(Outcome(run, self.targets))
        found["row"]["route"] = self.route
        if self.otherwise:
            found["row"]["prefix_load"] = run.costs.rules.prefix_load
            means = {x.costs.rules.prefix_load: number(_mean_ttft(x)) for x in runs}
            found["row"]["prefix_load_ttft_s"] = means
        if place is not None:
            write_run(place, run, mark, found)
        return found

    def _play(self, costs: StepCosts) -> Run:
        from kvsim.serving.simulate import simulate

        way = f", prefix load {costs.rules.prefix_load}" if self.otherwise else ""
        progress = ProgressLine(f"{costs.technique}{way}", "requests", len(self.requests))
        what = self.requests, costs

        def tell(world: World) -> None:
            progress(world.done)

        if self.pools is None:
            run = simulate(*what, self.replicas, self.route, self.rates, told=tell)
        else:
            run = simulate_pools(*what, self.pools, self.route, self.rates, told=tell)
        progress.finish()
        return run


def _mean_ttft(run: Run) -> float:
    """Mean TTFT of the requests that received a token; infinite if none did. [s]"""

    ttft = Outcome(run).ttft_s
    known = ttft[np.isfinite(ttft)]
    return float(known.mean()) if known.size else float("inf")


@takes_options("simulate", "trace", "model", "gpu", "technique")
def simulate(inputs: Inputs) -> Result[Sequence[Row]]:
    """Simulate how a server with continuous batching handles a request trace.

    Without ``trace``, requests are generated from ``prompt``, ``generate`` and ``rate``. Options
    that take several values, such as ``replicas`` or ``req_s``, are simulated in every combination,
    and ``find`` searches for the highest rate (or another value) at which the targets are met.

    Returns
    -------
    Result
        ``.rows`` has, for each technique and combination, percentiles of TTFT, TPOT and latency,
        goodput, memory use and prefix cache hits. ``.ttft`` and ``.tpot`` are those of the best.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.

    Examples
    --------
    >>> run = simulate("sample:chat", "llama3-8b", "h100", ttft="2s", tpot="100ms")
    >>> run.rows[0]["requests"], run.ttft.p50 < run.ttft.p99
    (500, True)
    """

    text = inputs.technique if inputs.compare is None else inputs.compare
    kinds = parse_several(text) or [parse("")]
    cases = list(_cases(inputs))
    runs = [(kind, values, shown) for values, shown in cases for kind in kinds]
    several = inputs.compare is not None or len(runs) > 1
    places = _places(inputs.out, [_name_run(kind, shown) for kind, _, shown in runs], several)
    where = build_deployment(inputs)
    refuse_idle_drive(inputs, kinds)
    usable = inputs.gpu_memory
    if inputs.gpu_memory_utilization is not None:
        usable = inputs.gpu_memory_utilization * where.hardware.gpu_memory
    targets = Targets(**inputs.select("ttft", "tpot"), share=inputs.percentile / 100)
    attention = None if inputs.acceptance is None else load_attention(inputs.acceptance)
    found = read_traffic(inputs)
    print_note(*found.notes)
    within_context(found.requests, where.model, inputs.max_model_len or 0)  # or none is served
    rates = [v["rate"] or (None if found.workload is None else v["req_s"]) for _, v, _ in runs]
    count = max(map(found.count_at, rates))
    work = count * (1 if found.requests.parent is None else TURN_WORK)
    plays = len(runs) if inputs.find is None else RUNS_TO_FIND
    estimate = announce_cost(inputs, count, plays, work)
    where = _without_server(where, found.requests)
    results, replays = [], []
    left_out: dict[str, str] = {}

    def build(kind: Technique, values: Row) -> TraceRun:
        """Build the run of a technique with one combination of values."""
        requests = _prepare_requests(found, values, inputs.abort_after)
        measured = None if attention is None else find_acceptance(kind, attention)
        reuses = found.reuses or values["hit_rate"] is not None
        first, *others = _build_rules(inputs, values, where, reuses)
        technique = with_acceptance(kind, measured)
        costs = StepCosts.for_requests(technique, where, first, requests, usable)
        seed, fleet = inputs.draw_acceptance, values["replicas"]
        rates = None if seed is None else draw_rates(costs, requests.generate, seed, measured)
        pools, otherwise = _build_pools(inputs, values), tuple(map(costs.with_rules, others))
        route = inputs.route or usual_route(costs, requests)
        return TraceRun(requests, costs, fleet, route, rates, targets, pools, otherwise)

    sought: Sought | None = None
    if inputs.find is not None:
        if len(runs) > 1:
            raise InputError("--find: several runs are asked for; expected one value per option")
        sought = find_value(inputs, found, where, cases[0][0])
        key, (kind, values, _) = sought.option, runs[0]
        tried: dict[float, tuple[Row, TraceRun]] = {}

        def keeps(value: float) -> bool:
            """Whether the targets are met with this value."""
            replay = build(kind, {**values, key: value})
            result = replay.result(None, False, inputs.check)
            shown = value / 2**30 if key == "host_cache" else value
            name = "req_s" if key == "rate" and inputs.trace is None else key
            result["row"] |= {"case": {name: shown}}
            tried[value] = result, replay
            return keeps_targets(result["row"])

        sought = sought.search(keeps)
        if key == "host_cache" and 0.0 not in tried:
            keeps(0.0)
        some = sought.choose(sorted(tried))
        if (
            sought.found is None
            and key != "host_cache"
            and len({str(tried[x][0]["row"]["ttft_s"]) for x in some}) == 1
        ):
            some = some[-1:]  # the value makes no difference
        results = [tried[x][0] for x in some]
        replays = [tried[x][1] for x in some]
        runs = []
    for (kind, values, shown), place in zip(runs, places, strict=False):
        reason = kind.refuses(where) if len(kinds) > 1 else ""
        if reason and kind.name not in left_out:
            left_out[kind.name] = f"{kind.name} cannot run here: {reason}"
            print_note(f"left out: {left_out[kind.name]}")
        if reason:
            continue
        replay = build(kind, values)
        result = replay.result(place, inputs.resume, inputs.check)
        if len(cases) > 1:
            result["row"] |= {"case": shown}
        results.append(result)
        replays.append(replay)
    if len(runs) == 1 == len(results):
        if estimate < COMPARED and replays[0].pools is None:
            played = _find_sufficient(replays[0], results[0]["row"])
            results[0]["row"] |= {"sufficient_replicas": played} if played else {}
        cached, apart = _remove_caches(inputs, replays[0])
        if cached and estimate < COMPARED:
            other = apart.result(None, False, False)["row"]
            told = "ttft_s", "request_per_s", "goodput_per_s", "good_share"
            results[0]["row"]["without"] = {"of": cached} | {key: other[key] for key in told}
        elif cached:
            same = {k: v for k, v in inputs.given.items() if k not in ("out", "resume", *CACHES)}
            print_note(f"to see what {cached} brings, run {command_line('simulate', same)}")
    if not results:
        reason = next(iter(left_out.values()))
        raise InputError(
            f"--compare: none of these techniques can run on this deployment; {reason}"
        )
    return make_result(
        results,
        where,
        found.name,
        left_out=list(left_out.values()),
        played=[replay.requests for replay in replays],
        sought=sought is not None,
        listed=several,
        checked=inputs.check,
        notes=found.notes,
        fleet=_write_capacity(inputs, where),
    )


def _find_sufficient(replay: TraceRun, row: Row) -> int:
    """The fewest replicas that keep up with what overloads a run; 0 if none were found."""
    arrive = arrival_rate(replay.requests)
    if not is_overloaded(row) or arrive is None:
        return 0

    def keeps_up(count: int) -> bool:
        more = replace(replay, replicas=count, otherwise=())
        return not is_overloaded(more.result(None, False, False)["row"])

    few, count = replay.replicas, max(count_replicas(row, arrive), replay.replicas + 1)
    for _ in range(MOST_TRIED if replay.rates is None else 0):
        if keeps_up(count):  # a short run completes less a second than it could
            while count - 1 > few and keeps_up(count - 1):
                count -= 1
            return count
        few, count = count, count + ceil(count / 10)
    return 0


def _remove_caches(inputs: Inputs, replay: TraceRun) -> tuple[str, TraceRun]:
    """Name the caches that were asked for, and build the same run without them."""
    rules = replay.costs.rules
    tiers = {"host": rules.host_cache, "NVMe": rules.nvme_cache, "remote": rules.remote_cache}
    named = [name for name, size in tiers.items() if size]
    if named and (not rules.tiers or rules.preemption == "swap"):
        return "", replay  # sequences are swapped to that memory, which is then not only a cache
    if named:
        what = f"the {join_words(named)} cache"
        usual: dict[str, Any] = {f.name: f.default for f in fields(Rules) if f.name in OF_TIERS}
        rules = replace(rules, **usual)
    elif inputs.prefix_caching:
        what, rules = "prefix caching", replace(rules, prefix_caching=False)
    else:
        return "", replay
    return what, replace(replay, costs=replay.costs.with_rules(rules), otherwise=())


def _write_capacity(inputs: Inputs, where: Deployment) -> str:
    """Write the ``kvsim capacity`` command for the same requests and targets."""
    shape = "trace prompt generate lengths rate scale users think burst hours cached hit_rate turns"
    known = {*shape.split(), "stack", "ttft", "tpot", "percentile"}
    given = {k: v for k, v in inputs.given.items() if k in known and not isinstance(v, list)}
    for key in given.keys() & {"rate", "hit_rate"}:  # of several, the most demanding
        hardest = max if key == "rate" else min
        values = str(given[key]).split(",")
        given[key] = hardest(values, key=lambda x: parse_rate(f"--{key}", x))
    asked = {"model": inputs.model, "gpus": where.hardware.name, "weights": where.weights}
    return command_line("capacity", asked | given)


@frozen
class Sought:
    """The option whose value ``--find`` searches for, and the range of the search.

    Attributes
    ----------
    option
        The keyword of the option.
    start, least, most
        First value to try, and the bounds of the search.
    easier
        Whether a larger value makes the targets easier to meet.
    unit
        Step between allowed values; 0 if any value is allowed.
    found
        The last value at which the targets are met; None if there is none, or before the search.
    """

    option: str
    start: float
    least: float
    most: float
    easier: bool
    unit: float = 0.0
    found: float | None = None

    def search(self, keeps: Callable[[float], bool]) -> "Sought":
        """Search by bisection, and return a copy that has the value found.

        Parameters
        ----------
        keeps
            Simulates a value and returns whether the targets are met.
        """
        if self.option == "prefill_replicas":
            for count in range(round(self.least), round(self.most) + 1):
                keeps(count)
            return self
        good, bad, value = None, None, self.start
        while good is None or bad is None:
            if keeps(value):
                good, ahead = value, self.least if self.easier else self.most
            else:
                bad, ahead = value, self.most if self.easier else self.least
            if value == ahead:
                return replace(self, found=good)
            value = self._round(value * (2.0 if ahead > value else 0.5), ahead)
        while max(good, bad) > CLOSE * min(good, bad):
            middle = (good * bad) ** 0.5 if good * bad else (good + bad) / 2
            middle = self._round(middle)
            if middle in (good, bad):
                break
            good, bad = (middle, bad) if keeps(middle) else (good, middle)
        return replace(self, found=good)

    def _round(self, value: float, bound: float | None = None) -> float:
        """Round to an allowed value, or return the bound if the value is beyond it."""
        if self.unit:
            value = round(round(value / self.unit) * self.unit, 9)
        else:
            value = float(f"{value:.3g}")
        if bound is not None and not self.least < value < self.most:
            return bound
        return value

    def show(self, value: float) -> str:
        """Format a value as it is typed on the command line.

        Parameters
        ----------
        value
            Value of the option; bytes are shown in GiB.
        """
        return f"{value / 2**30:g} GiB" if self.option == "host_cache" else f"{value:g}"

    def choose(self, tried: Sequence[float]) -> Sequence[float]:
        """Select the simulated values to show: those next to the value that was found.

        Parameters
        ----------
        tried
            All simulated values, in ascending order.
        """
        if self.found is None:
            ends = {"prefill_replicas": tried, "host_cache": [*tried[:2], tried[-1]]}
            return [*dict.fromkeys(ends.get(self.option, (tried[0], tried[-1])))]
        at = tried.index(self.found)
        some = tried[max(at - ROWS_AROUND, 0) : at + ROWS_AROUND + 1]
        without = [0.0] if self.option == "host_cache" and some[0] else []
        return [*without, *some]


def find_value(
    inputs: Inputs, traffic: ServedRequests, where: Deployment, case: Mapping[str, Any]
) -> Sought:
    """Set up the search of ``--find``: the option, the first value and the bounds.

    Parameters
    ----------
    inputs
        The options of ``kvsim simulate`` or ``kvsim capacity``.
    traffic
        The requests to serve.
    where
        The deployment, whose host memory bounds a prefix cache.
    case
        The given ``replicas``, ``rate`` and ``req_s``.

    Returns
    -------
    Sought
        The search, which has not started.

    Raises
    ------
    InputError
        If the option cannot be searched for, or no target is given.
    """
    what, drawn, fleets = inputs.find, traffic.workload is not None, inputs.command == "capacity"
    if what not in SOUGHT:
        raise InputError(f"--find: got {what[:40]!r}; expected {', '.join(SOUGHT)}")
    if fleets and what == "replicas":
        raise InputError(
            "--find replicas: kvsim capacity finds the number of replicas anyway; omit --find"
        )
    if fleets and what == "prefill-replicas":
        raise InputError(
            "--find prefill-replicas: kvsim capacity --pools yes compares all divisions into "
            "prefill and decode replicas by itself, without --find; of a given number, "
            "kvsim simulate --replicas 8 --find prefill-replicas finds the best"
        )
    if not fleets and inputs.ttft is None and inputs.tpot is None:
        raise InputError("--find: no target is given; add --ttft or --tpot, such as --ttft 2s")
    replicas = case["replicas"]
    if what == "rate":
        if drawn and not traffic.workload.rate:  # type: ignore[union-attr]
            raise InputError(
                "--find rate: has no effect with --users, whose requests follow their think time; "
                "give --rate instead"
            )
        key = "req_s" if case["req_s"] is not None else "rate"
        start = case[key] or (traffic.workload.rate if traffic.workload is not None else 1.0)
        least, most = start / 1000, start * 1000
        if not drawn and not traffic.clock and key == "rate":
            least = max(least, min(start, FEW_REQUESTS / len(traffic.requests)))
            most = max(start, min(most, MOST_REQUESTS / len(traffic.requests)))
        return Sought(key, start, least, most, False)
    if what == "replicas":
        return Sought(what, replicas, 1, 10**4, True, 1)
    if what == "hit-rate":
        if traffic.workload is None or traffic.reuses:
            raise InputError(
                "--find hit-rate: needs traffic without stated prefix reuse; give --prompt, "
                "--generate and --rate without --cached, --hit-rate and --turns"
            )
        return Sought("hit_rate", 0.5, 0.0, 0.99, True, 0.01)
    if what == "host-cache":
        if traffic.requests.block_ids is None and not traffic.reuses:
            other = "replace --trace with --prompt 4k --generate 300 --rate 2 --turns 5"
            raise InputError(
                "--find host-cache: the requests share no prefixes; use a trace that has hash "
                f"blocks, or {other if inputs.trace else 'add --turns 5'}"
            )
        gib = 2.0**30
        most = where.hardware.host_memory // gib * gib
        return Sought("host_cache", 64 * gib, 0.0, most, True, gib)
    if not 2 <= replicas <= MOST_SHARES + 1:
        raise InputError(
            f"--find prefill-replicas: got --replicas {replicas}; expected 2 to {MOST_SHARES + 1}"
        )
    return Sought("prefill_replicas", 1, 1, replicas - 1, True, 1)


def _without_server(where: Deployment, requests: Requests) -> Deployment:
    """Leave out the server's time per request where all requests arrive at once, as offline."""
    if len(requests) < 2 or requests.depends or requests.arrival.max() > 0:
        return where
    if where.stack.offline != where.stack:
        print_note(
            "all requests arrive at once; this is simulated as an offline run, without server time"
        )
    return replace(where, stack=where.stack.offline)


def _cases(inputs: Inputs) -> Iterator[tuple[Row, Row]]:
    """Yield each combination of the options with several values, and how tables show it.

    A combination has the value of every option in ``VARIED``, of ``prefill_replicas`` and of
    ``hit_rate``, or None. Rates are in requests/s or a factor on a trace, caches in bytes.
    """
    lists = {name: getattr(inputs, name) or [(None, None)] for name in VARIED}
    varied = [name for name, some in lists.items() if len(some) > 1]
    shown = {name: "req_s" if name == "rate" and inputs.trace is None else name for name in varied}
    count = prod(map(len, lists.values()))
    if count > MAX_RUNS:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in varied)
        most = f"expected at most {MAX_RUNS} in one command"
        raise InputError(f"{names}: {count} combinations; {most}")
    for some in product(*lists.values()):
        given = dict(zip(lists, some, strict=True))
        values = {name: value for name, (_, value) in given.items()}
        values |= {"prefill_replicas": inputs.prefill_replicas, "hit_rate": None}
        yield values, {shown[name]: _as_number(given[name][0]) for name in varied}


def _as_number(given: object) -> float | str:
    try:
        return float(str(given).removesuffix("x"))
    except ValueError:
        return str(given)


def _name_run(technique: object, case: Mapping[str, float | str]) -> str:
    """Name a run in a file name by its technique and the values of its options."""
    values = {k: f"{v:g}" if isinstance(v, float) else v for k, v in case.items()}
    return " ".join([str(technique), *(f"{k}={v}" for k, v in values.items())])


def _places(out: Path | None, runs: list[str], several: bool) -> list[Path | None]:
    """The output file of each run; None for all if no output is wanted."""
    if out is None:
        return [None] * len(runs)
    if several:
        if out.suffix == ".parquet" or (out.exists() and not out.is_dir()):
            raise InputError(f"--out: got {str(out)[:60]!r}; with --compare, expected a folder")
        if not out.parent.is_dir():
            raise InputError(f"--out: {out.parent} does not exist; choose an existing folder")
        make_folder(out, "--out")
        names = [f"{run.replace(':', ' ').replace('/', '_')}.parquet" for run in runs]
        return [check_target(out / name, f"--out for {name}") for name in names]
    check_target(out, "--out", (".parquet",))
    return [out]


def _prepare_requests(traffic: ServedRequests, case: Row, abort_after: float | None) -> Requests:
    """Scale the requests to the rate of a combination, and set when clients disconnect."""

    requests, rate = traffic.requests, case["rate"]
    if traffic.workload is not None:
        rate = case["req_s"] if rate is None else rate
        if case["hit_rate"] is not None:
            traffic = traffic.with_hit_rate(case["hit_rate"])
        found = traffic.requests if rate is None else traffic.at_rate(rate)
    elif case["req_s"] is not None:
        found, copies = at_rate(requests, case["req_s"])
        if copies > 1:
            print_note(
                f"{case['req_s']:g} requests per second: the trace is repeated {copies} times, "
                f"each time with different prompts"
            )
    else:
        found = requests if rate is None else traffic.at_rate(rate)
    if abort_after is not None:
        if abort_after == float("inf"):
            raise InputError("--abort-after: none has no effect; omit it")
        if requests.abort_after is not None:
            raise InputError("--abort-after: the trace has its own times to an abort; omit it")
        found = replace(found, abort_after=np.full(len(found), abort_after))
    return found


def _build_rules(
    inputs: Inputs, case: Row, deployment: Deployment, reuses: bool
) -> tuple[Rules, ...]:
    """Build the scheduling rules; several if the way to load prefixes is chosen by TTFT."""

    apart = (*SIZE_OPTIONS, "ahead", "prefix_load", "nic")
    names = [f.name for f in fields(Rules) if f.name not in apart]
    settings = {name: getattr(inputs, name) for name in names}
    settings |= {name: case[name] for name in SIZE_OPTIONS}
    if case["prefill_replicas"] is None or inputs.remote_cache is not None:
        settings["nic"] = inputs.nic
    if inputs.disk is not None and not case["nvme_cache"]:  # a drive for weights and caches alone
        settings |= {"nvme_read": None, "nvme_write": None}
    given = {name: value for name, value in settings.items() if value is not None}
    sizes = [*(inputs.host_cache or ()), *(inputs.nvme_cache or ())]  # of all runs: one may be 0
    stored = any(size for _, size in sizes) or bool(inputs.remote_cache)
    stored |= inputs.find == "host-cache"
    implied = stored and inputs.preemption == "recompute" and not reuses
    if implied and not inputs.prefix_caching:
        print_once("prefix caching is enabled, because stored prefix blocks need it")
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


def _build_pools(inputs: Inputs, case: Row) -> TwoPools | None:
    """Split the replicas into prefill and decode replicas; None if each does both."""

    first, replicas = case["prefill_replicas"], case["replicas"]
    if first is None:
        return None
    rate = NIC_RATE if inputs.nic is None else inputs.nic
    return TwoPools(first, replicas - first, inputs.transfer or TRANSFERS[0], rate)
