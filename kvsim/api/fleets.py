"""``kvsim capacity``: the cheapest fleet of GPUs that serves a trace within targets."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import inf, isfinite
from shlex import quote

from kvsim.api.cost import announce_cost, count_passes
from kvsim.api.deployments import build_admission, build_deployment, largest_loss, name_stack
from kvsim.api.simulations import find_value
from kvsim.api.traffic import ServedRequests, read_traffic
from kvsim.console import TimeLeft, print_note, print_progress
from kvsim.emit.engines import check_engines, write_settings
from kvsim.emit.served import serve_costs
from kvsim.errors import InfeasibleError, InputError, unknown
from kvsim.inputs import parse_count, parse_words
from kvsim.machines.hardware import DEFAULT_STACK, GIB
from kvsim.machines.prices import choose_seller, find_sellers
from kvsim.options import Inputs, command_line, options_of, takes_options
from kvsim.planner.fleet.answer import CapacityAnswer, make_capacity
from kvsim.planner.fleet.demand import ClassTarget, FleetTargets, traffic_of
from kvsim.planner.fleet.offers import (
    CapacityQuestion,
    Extras,
    FleetLimits,
    Rentable,
    Spread,
)
from kvsim.planner.fleet.search import FleetSolver
from kvsim.planner.question import DEFAULT_TPOT, DEFAULT_TTFT
from kvsim.report.capacity import make_result
from kvsim.report.result import Result
from kvsim.serving.rules import Rules
from kvsim.serving.servable import within_context
from kvsim.techniques.released import describe_cut

SHOWN_BY = ("json", "csv", "report", "verbose", "yes")
"""Options that say how an answer is shown."""

POOL_HOST_SHARE = 0.25
"""Of a host's memory that one GPU's prefix blocks may take, if nothing is said."""


@takes_options("capacity", "trace", "model", "gpus")
def capacity(inputs: Inputs) -> Result[CapacityAnswer]:
    """Find the cheapest combination of GPUs that serves a trace within latency targets.

    Fleets are simulated in order of their cost, the cheapest that could do first; with ``schedule``
    a mixed-integer programme proposes them.

    Returns
    -------
    Result
        ``.choice`` has the replicas of each kind and the price per hour; ``.found`` has the
        simulation. If the limits or ``sure`` cannot be kept, the closest fleet is returned, and
        ``.found.shortfall`` says what it misses.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.
    InfeasibleError
        If no GPU can serve the trace at all, or none meets the targets even when idle.

    Examples
    --------
    >>> fleet = capacity(  # doctest: +SKIP
    ...     model="llama3.1-8b", gpus="l40s,h100", prompt="3k", generate=500, rate=5, ttft="2s"
    ... )
    >>> fleet.choice.replicas, fleet.choice.usd_per_hour  # doctest: +SKIP
    """

    check_engines(inputs.emit)
    found = read_traffic(inputs)
    print_note(*found.notes)
    question = build_question(inputs, found)
    traffic = question.traffic
    requests, runs = traffic.requests, len(question.rentable)
    passes = count_passes(requests, inputs.max_tokens)
    longest = int((requests.prompt + requests.generate).max())
    announce_cost(inputs, len(requests), runs, traffic.work, passes, longest=longest)
    name = found.name
    if inputs.find is not None:
        question, name = _find_question(inputs, found, question)
    answer = make_capacity(question, TimeLeft())
    counts, used = answer.fleet.replicas, inputs.gpu_memory_utilization
    settings = []
    for j in answer.used:
        x = answer.fleet.kinds[j]
        served = serve_costs(x.costs, used, x.sides)
        served = replace(served, replicas=int(counts[j]), route=x.route)
        settings.append(write_settings(inputs.emit or (), served))
    return make_result(answer, name, settings, _write_play(inputs, answer))


def _write_play(inputs: Inputs, answer: CapacityAnswer) -> str:
    """Write the ``kvsim simulate`` command for the fleet; empty if it has no such fleet."""
    if len(answer.used) > 1 or inputs.schedule or inputs.find or answer.load != 1:
        return ""
    (j,) = answer.used
    x, count = answer.fleet.kinds[j], int(answer.fleet.replicas[j])
    targets = answer.targets.uniform  # `simulate` has no classes of prompts
    d, rules = x.costs.deployment, x.costs.rules
    layout, tiers, limits = asdict(d.parallelism), ("host_cache", "nvme_cache"), ("ttft", "tpot")
    spread = {k: v for k, v in layout.items() if v > 1}
    stored = {k: getattr(rules, k) / GIB for k in tiers if getattr(rules, k)}
    times = {k: f"{t:.6g}s" for k in limits if isfinite(t := getattr(targets, k))}
    options = options_of("simulate")
    known = options.keys() - {"find", *SHOWN_BY, *layout, *tiers, *limits}
    known -= set() if rules.nvme_cache else {"nvme_read", "nvme_write"}
    known -= set() if x.apart else {"nic"}
    kept = {k: v for k, v in inputs.given.items() if k in known and not isinstance(v, list)}
    stack = name_stack(inputs)
    played = {
        **kept,
        **({"stack": stack} if stack != DEFAULT_STACK else {}),
        "gpu": x.gpu,
        **spread,
        "weights": d.weights,
        "technique": x.technique,
        "replicas": count * x.engines,
        "route": x.route,
        "max_tokens": rules.max_tokens // d.lanes,
        "max_seqs": rules.max_seqs // d.dp,
        "prefix_caching": rules.prefix_caching,
        **({"prefix_load": rules.prefix_load} | stored if rules.tiers else {}),
        **({"prefill_replicas": count * x.apart.prefill} if x.apart else {}),
        **times,
    }
    told = {k: v for k, v in played.items() if v != options[k].default}
    return command_line("simulate", told)


def build_question(
    inputs: Inputs, found: ServedRequests, changes: Mapping[str, float] | None = None
) -> CapacityQuestion:
    """Build the question that the fleet planner answers from the options of ``kvsim capacity``.

    Parameters
    ----------
    inputs
        The options.
    found
        The requests to serve.
    changes
        Values that replace given ones while ``--find`` searches, by keyword: ``rate``, ``hit_rate``
        or ``host_cache``.

    Returns
    -------
    CapacityQuestion
        Traffic, rentable GPUs, targets and limits.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.
    """

    changes = changes or {}
    longer = () if inputs.class_targets is None else _parse_class_targets(inputs.class_targets)
    usual = {"ttft": DEFAULT_TTFT, "tpot": DEFAULT_TPOT} | inputs.select("ttft", "tpot")
    targets = FleetTargets(**usual, share=inputs.percentile / 100, longer=longer)
    limits = _build_limits(inputs)
    rentable, sellers = list_rentable(inputs)
    unrated = [x.gpu for x in rentable if not isfinite(x.power)]
    if inputs.max_power is not None and unrated:
        add = f"--watts {quote(unrated[0])}=W"
        raise InputError(f"--max-power: the rated power of {unrated[0]} is unknown; add {add}")
    if "hit_rate" in changes:
        found = found.with_hit_rate(changes["hit_rate"])
    rate = changes.get("rate", inputs.rate if found.workload is None else None)
    requests = found.requests if rate is None else found.at_rate(rate)
    model, most = rentable[0].deployment.model, inputs.max_model_len or 0
    requests, left_out = within_context(requests, model, most)
    longest = int(requests.prompt.max())
    if longer and longer[-1].above >= longest:
        raise InputError(
            f"--class-targets: the trace's longest prompt has {longest:,} tokens, so targets above "
            f"{longer[-1].above:,} have no effect; omit them"
        )
    windows = inputs.windows or 0
    if windows > len(requests):
        raise InputError(f"--windows: got {windows}; expected 1 to {len(requests)}")
    prefixes, used = requests.block_ids is not None, inputs.gpu_memory_utilization
    spread = None if inputs.spread is None else Spread(inputs.spread, "given with --spread")
    extras = _build_extras(inputs, prefixes, rentable)
    if "host_cache" in changes:
        extras = replace(extras, host=changes["host_cache"])
    return CapacityQuestion(
        traffic=traffic_of(requests, windows, targets),
        rentable=rentable,
        admission=build_admission(inputs),
        targets=targets,
        limits=limits,
        rules=Rules(
            max_seqs=inputs.max_seqs or 0,
            max_tokens=inputs.max_tokens or 0,
            max_model_len=most,
            prefix_caching=prefixes,
        ),
        largest_loss=largest_loss(inputs),
        spread=spread,
        utilisation=used,
        start_up=inputs.start_up / 3600 if inputs.schedule else None,
        extras=extras,
        sure=inputs.sure,
        tunes="max_tokens" not in inputs.given,
        left_out=left_out,
        route=inputs.route or "",
        sellers=sellers,
    )


def _find_question(
    inputs: Inputs, found: ServedRequests, first: CapacityQuestion
) -> tuple[CapacityQuestion, str]:
    """Search for the value of ``--find``; return the question with it and the traffic's name."""

    questions: dict[float, CapacityQuestion] = {}
    case = {"replicas": 1, "req_s": None, "rate": inputs.rate}
    sought = find_value(inputs, found, first.rentable[0].deployment, case)

    def keeps(value: float) -> bool:
        """Whether some fleet within the limits meets the targets with this value."""
        question = questions[value] = build_question(inputs, found, {sought.option: value})
        print_progress(f"looking for a fleet with {inputs.find} {sought.show(value)}")
        return FleetSolver(question, print_progress).solve(question) is not None

    value = sought.search(keeps).found
    if value is None:
        tried = ", ".join(map(sought.show, sorted(questions)))
        raise InfeasibleError(
            f"--find {inputs.find}: no fleet within the limits meets the targets with any of "
            f"{tried}; loosen --max-gpus or --max-power, or the targets"
        )
    shown, most = sought.show(value), "lowest" if sought.easier else "highest"
    print_note(f"--find {inputs.find}: {shown} is the {most} value within the limits")
    if sought.option != "rate":
        return questions[value], f"{found.name}, {inputs.find} {shown}"
    if found.workload is None:
        what = "clock" if found.clock else "clients"
        return questions[value], f"{found.name} at {shown} times its {what}"
    return questions[value], f"{shown} requests/s of {found.name}"


def list_rentable(inputs: Inputs) -> tuple[list[Rentable], dict[str, dict[str, float]]]:
    """List the deployments that can be rented, with prices: each GPU, parallel layout and format.

    Parameters
    ----------
    inputs
        The options of ``kvsim capacity``.

    Returns
    -------
    list of Rentable
        The deployments at the given prices or those of one seller.
    dict
        Prices of every other seller that offers all the GPUs, by seller and GPU. [USD/h]

    Raises
    ------
    InputError
        If no seller offers all GPUs, or the model cannot be split in any of the layouts.
    """

    prices, committed, power = (
        _check_gpus(inputs, name) for name in ("price", "reserved", "watts")
    )
    ways = list(product(inputs.pp, inputs.dp, inputs.ep))
    found: list[Rentable] = []
    problem = None
    for gpu, form, tp, way in product(inputs.gpus, inputs.weights, inputs.tp, ways):
        pp, dp, ep = way
        try:
            d = build_deployment(inputs, gpu=gpu, weights=form, tp=tp, pp=pp, dp=dp, ep=ep)
        except InputError as error:
            if len(ways) == 1 and way == (1, 1, 1):
                raise
            problem = problem or error
            continue
        if cut := describe_cut(d.stack.family, d):
            problem = problem or InputError(f"--tp {tp}: {cut}")
            continue
        least, watts = committed.get(gpu, inf), power.get(gpu, d.hardware.power or inf)
        found.append(Rentable(d, gpu, inf, least * d.gpus, watts * d.gpus))
    if problem is not None and (not found or not _each_occurs(found, ways)):
        raise problem
    cards = {x.gpu: x.deployment.hardware for x in found}
    own = prices | {
        gpu: h.price for gpu, h in cards.items() if gpu not in prices and h.price and not h.listed
    }
    asked = {gpu: h.name for gpu, h in cards.items() if gpu not in own}
    if inputs.seller is not None and not asked:
        raise InputError("--seller: has no effect where --price names every GPU; omit it")
    optional = [name for gpu, name in asked.items() if gpu in committed]
    sold = choose_seller(asked.values(), inputs.seller, optional)
    terms = {gpu: sold[name] for gpu, name in asked.items() if name in sold}
    usd = own | {gpu: price.usd for gpu, price in terms.items()}
    others = {
        seller: own | {gpu: some[name].usd for gpu, name in asked.items() if name in some}
        for seller, some in find_sellers(asked.values()).items()
        if some.keys() == sold.keys() and some != sold
    }
    priced = [
        replace(
            x,
            price=usd.get(x.gpu, inf) * x.deployment.gpus,
            source=terms[x.gpu].words if x.gpu in terms else "given",
        )
        for x in found
    ]
    return priced, others


def _each_occurs(found: list[Rentable], ways: Sequence[tuple[int, ...]]) -> bool:
    """Whether every requested degree of parallelism occurs in some deployment."""
    there = [(s.pp, s.dp, s.ep) for s in (x.deployment.parallelism for x in found)]
    both = zip(zip(*ways, strict=True), zip(*there, strict=True), strict=True)
    return all(set(given) == set(some) for given, some in both)


def _check_gpus(inputs: Inputs, name: str) -> dict[str, float]:
    """Return the numbers that an option gives by GPU, each of which must be in ``--gpus``."""
    found: dict[str, float] = getattr(inputs, name) or {}
    for gpu in found:
        if gpu not in inputs.gpus:
            kind = f"GPU in --{name.replace('_', '-')}:"
            raise unknown(kind, gpu, inputs.gpus, "name one of --gpus")
    return found


def _build_limits(inputs: Inputs) -> FleetLimits:
    """Collect the limits on the fleet, and the headroom and failures it must withstand."""

    gpus = inputs.select(gpus="max_gpus")
    if isinstance(inputs.max_gpus, dict):
        gpus = {"gpus_of": _check_gpus(inputs, "max_gpus")}
    others = inputs.select("configurations", "headroom", "failures")
    return FleetLimits(**gpus, **others, **inputs.select(host="max_host", power="max_power"))


def _build_extras(inputs: Inputs, prefixes: bool, rentable: list[Rentable]) -> Extras:
    """Collect what replicas may use besides GPU memory: caches, drives and networks."""

    if inputs.pools not in ("auto", "yes", "no"):
        raise InputError(f"--pools: got {inputs.pools[:40]!r}; expected auto, yes or no")
    for name in ("host_cache", "nvme_cache"):
        if getattr(inputs, name) is not None and not prefixes:
            raise InputError(
                f"--{name.replace('_', '-')}: the trace names no prefix blocks, so nothing would "
                "be stored; omit it or use a trace that has hash blocks"
            )
    apart = inputs.pools == "yes" or (inputs.pools == "auto" and prefixes)
    if inputs.nic is not None and not apart:
        raise InputError(
            "--nic: has no effect unless prefill and decode run on separate replicas; "
            "add --pools yes"
        )
    found = Extras(apart=apart, **inputs.select("nic"))
    if not prefixes:
        return found
    host = inputs.host_cache
    if host is None:
        host = min(x.deployment.hardware.host_memory for x in rentable) * POOL_HOST_SHARE
    rates = inputs.select("nvme_read", "nvme_write")
    return replace(found, host=host, drive=inputs.nvme_cache or 0.0, rates=rates)


def _parse_class_targets(text: str) -> tuple[ClassTarget, ...]:
    """Targets of longer prompts, as 8000=10s/200ms,32000=30s/none.

    Raises
    ------
    InputError
        If it is not of that form, or a length is there twice.
    """

    name, found, options = "--class-targets", {}, options_of("capacity")
    for item in parse_words(name, text):
        above, equals, times = item.partition("=")
        ttft, slash, tpot = times.partition("/")
        if not equals or not slash:
            raise InputError(
                f"{name}: got {item[:40]!r}; expected N=TTFT/TPOT, such as 8000=10s/200ms, for "
                f"prompts above N tokens"
            )
        tokens = parse_count(name, above, None, " before the =")
        if tokens < 1 or tokens in found:
            wrong = "is there twice; give it once" if tokens in found else "is below 1 token"
            raise InputError(f"{name}: {tokens} {wrong}")
        first, each = (
            options[key].parse(name, given, None) for key, given in (("ttft", ttft), ("tpot", tpot))
        )
        found[tokens] = ClassTarget(tokens, first, each)  # type: ignore[arg-type]
    return tuple(found[tokens] for tokens in sorted(found))
