"""What can be rented: kinds of replica, the limits on a fleet, and how wrong their times may be.

Every deployment that may be rented is a kind with full KV, and with the techniques that an engine
runs (or the user names) and a closed estimate finds cheaper there; each of them again with several
budgets of tokens per pass, with other memories for prefix blocks and with prefill apart from decode
where the traffic may gain from it. Nothing is left out because another kind looks better: the
search plays them, cheapest bound first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import exp, floor, log
from statistics import NormalDist
from typing import Any

import numpy as np

from kvsim.errors import InfeasibleError, InputError
from kvsim.evidence.ledger import WITHIN_80, KnownError, evidence_for
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB
from kvsim.options import ENGINE_SHARE
from kvsim.planner.fleet.demand import Counts, FleetTargets, Traffic
from kvsim.planner.question import Admission, does_nothing, needed_option
from kvsim.serving.costs import StepCosts, simple_pass_seconds
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import NIC_RATE, Rules
from kvsim.serving.simulate import usual_route
from kvsim.serving.world import limits_of
from kvsim.techniques import parse
from kvsim.techniques.released import served_by
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

FULL = parse("full")


@frozen
class FleetLimits:
    """What a fleet must respect; infinite where the user set nothing.

    Attributes
    ----------
    gpus, gpus_of
        GPUs in all, and of each kind.
    host, power
        Host memory [B] and rated power of all GPUs [W].
    configurations
        Different kinds of replica at most.
    headroom
        Share of load beyond the demand that the fleet must carry.
    failures
        Replicas that may be lost while the rest carries the demand.
    """

    gpus: float = np.inf
    gpus_of: Mapping[str, float] = field(default_factory=dict)
    host: float = np.inf
    power: float = np.inf
    configurations: float = np.inf
    headroom: float = 0.0
    failures: int = 0

    def list_amounts(self, kinds: Sequence["Configuration"]) -> Iterator[tuple[str, float, Array]]:
        """Each amount that is limited: its name, the limit, and that of a replica by kind. (j,)"""
        for name in ("gpus", "host", "power"):
            if np.isfinite(bound := getattr(self, name)):
                yield name, bound, np.array([getattr(x, name) for x in kinds], float)
        for i, (gpu, most) in enumerate(self.gpus_of.items()):
            yield f"of_{i}", most, np.array([x.gpus * (x.gpu == gpu) for x in kinds], float)

    def count_most(self, replica: "Configuration") -> int:
        """Count the replicas of one kind that the limits allow at most."""
        amounts = [(bound, float(each[0])) for _, bound, each in self.list_amounts([replica])]
        most = min((bound / each for bound, each in amounts if each), default=1e6)
        return floor(min(most, 1e6) + 1e-9)

    def allow(self, kinds: Sequence["Configuration"], counts: Counts) -> bool:
        """Whether so many replicas of each kind are within the limits."""
        several = np.count_nonzero(counts) <= self.configurations
        return bool(several) and all(
            counts @ each <= bound for _, bound, each in self.list_amounts(kinds)
        )


# kinds of replica


@frozen
class Configuration:
    """One replica: its GPUs with a model, a technique and an engine's limits.

    If prefill and decode run on separate engines, a replica is the smallest set of both.

    Attributes
    ----------
    costs
        Step costs of the technique on these GPUs.
    gpu
        Name of the GPU, as `kvsim gpus` lists it.
    price, reserved
        Price of the whole replica on demand, and with a commitment; infinite if not offered.
        [USD/h]
    power
        Rated power of its GPUs; infinite if not known. [W]
    apart
        Numbers of engines that prefill and that decode; None if each does both.
    route
        Name of the rule that assigns requests to replicas, as `--route` takes it; empty for that of
        the engine's router.
    """

    costs: StepCosts
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf
    apart: TwoPools | None = None
    route: str = ""

    @property
    def engines(self) -> int:
        """Engines of one replica."""
        return 1 if self.apart is None else self.apart.prefill + self.apart.decode

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.costs.deployment.gpus * self.engines

    @property
    def sides(self) -> tuple[int, int] | None:
        """Engines that read prompts and that decode; None if each does both."""
        return None if self.apart is None else (self.apart.prefill, self.apart.decode)

    @property
    def rent(self) -> float:
        """Price on demand or with a commitment, whichever is lower. [USD/h]"""
        return min(self.price, self.reserved)

    @property
    def technique(self) -> str:
        """The technique and its settings, as `--technique` takes them."""
        return str(self.costs.technique)

    @property
    def host(self) -> float:
        """Host memory that one replica keeps caches in. [B]"""
        rules, room = self.costs.rules, self.costs.room
        own = float(room.host_bytes[-1]) * rules.max_seqs
        keep = self.engines if self.apart is None else self.apart.prefill
        return rules.host_cache * keep + min(own, room.host_capacity) * self.gpus

    @property
    def complexity(self) -> int:
        """What it has besides GPUs with full KV, counted."""
        rules = self.costs.rules
        some = self.technique != "full", self.apart, rules.host_cache, rules.nvme_cache
        return sum(map(bool, some))

    @property
    def name(self) -> str:
        """Short, for tables: its GPUs, the weights, the technique and other memories."""
        d = self.costs.deployment
        gpus = f"{self.gpus} {self.gpu}" if self.gpus > 1 else self.gpu
        weights = "" if d.weights == "fp16" else f" {d.weights}"
        with_all = f"{weights} {self.technique}{self._memories}{self._pools}"
        return f"{gpus}{d.parallelism.brackets()}{with_all}"

    @property
    def _memories(self) -> str:
        rules = self.costs.rules
        kept = {"host": rules.host_cache, "NVMe": rules.nvme_cache}
        said = [f"{size / GIB:.0f} GiB {name}" for name, size in kept.items() if size]
        return f" + {', '.join(said)} cache" if said and rules.tiers else ""

    @property
    def _pools(self) -> str:
        if self.apart is None:
            return ""
        each = self.costs.deployment.gpus
        of = f" engines of {each}" if each > 1 else ""
        return f" ({self.apart.prefill} prefill + {self.apart.decode} decode{of})"


def count_replicas(count: int, name: str) -> str:
    """Write a number of replicas with their name: ``4 x l40s``, or ``1 replica of 2 h100``.

    Parameters
    ----------
    count
        Number of replicas.
    name
        Name of one replica, as ``Configuration.name`` writes it.
    """
    if not name.partition(" ")[0].isdigit():
        return f"{count} x {name}"
    return f"{count} {'replica' if count == 1 else 'replicas'} of {name}"


# known errors of their times

SLOWED_KINDS = ("decode", "prefill", "request")


@frozen
class Spread:
    """Standard deviation of the logarithm of measured over predicted times, and its source."""

    sigma: float
    source: str

    def slowdown(self, likely: float) -> float:
        """The factor that times stay below with a likelihood."""
        return exp(self.sigma * NormalDist().inv_cdf(likely))


def known_spread(configurations: list[Configuration]) -> Spread:
    """The widest spread that the ledger of errors has for what some replicas run.

    Times to the first token and per token count where they were measured, else whole requests.
    """
    found = []
    for x in configurations:
        each = [evidence_for(x.costs.deployment, x.technique, kind) for kind in SLOWED_KINDS]
        measured = [e for e in each[:-1] if e.entry is not None] or each[-1:]
        found.append(max(measured, key=_log_width))
    widest = max(found, key=_log_width)
    return Spread(_log_width(widest) / WITHIN_80, widest.words)


def _log_width(error: KnownError) -> float:
    """How far the logarithm of an 80 % interval reaches to either side."""
    return max(log(error.high), -log(error.low))


@frozen
class Rentable:
    """A deployment that can be rented as one replica, with the prices of all of it. [USD/h, W]

    Attributes
    ----------
    source
        Who asks the price on what terms, and when.
    """

    deployment: Deployment
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf
    source: str = "given"


@frozen
class Extras:
    """What replicas may use besides GPU memory.

    Attributes
    ----------
    host, drive
        Host memory and NVMe space for prefix blocks, for each GPU; 0: none. [B]
    rates
        Settings of ``Rules`` for the drive.
    apart
        Whether engines may read prompts only, or decode only.
    nic
        Network of each engine in one direction. [B/s]
    """

    host: float = 0.0
    drive: float = 0.0
    rates: dict[str, Any] = field(default_factory=dict)
    apart: bool = False
    nic: float = NIC_RATE


TOKEN_BUDGETS = (512, 1024, 2048, 4096, 8192)
"""Tokens of a pass at most that are tried where the user names none: a small budget keeps the time
per token even, a large one reads prompts sooner. [tokens]"""

POOL_RATIOS = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3))  # engines that read prompts, and that decode
WORTHWHILE_COST = 0.99  # of full KV's on the same deployment, by the estimate
TECHNIQUES_PER_DEPLOYMENT = 2  # besides full KV
NODES_PER_OCTAVE = 2  # of the step costs that replicas are estimated by


@frozen
class ReplicaKind:
    """Replicas that differ in their pass budget alone.

    Attributes
    ----------
    choices
        The same replica with each of them; the engine's default first.
    needed
        Replicas that each class of requests alone is estimated to need; infinite where it cannot.
        (c,)
    """

    choices: tuple[Configuration, ...]
    needed: Array

    @property
    def gpu(self) -> str:
        """Name of its card, as `kvsim gpus` lists it."""
        return self.choices[0].gpu

    @property
    def rent(self) -> float:
        """Price of one replica. [USD/h]"""
        return self.choices[0].rent


def list_kinds(
    question: "CapacityQuestion", tell: Callable[[str], None]
) -> tuple[list[ReplicaKind], dict[str, str]]:
    """List every kind of replica that may be rented and can run.

    Parameters
    ----------
    question
        What is asked.
    tell
        Is told what is being done.

    Returns
    -------
    list of ReplicaKind
        The kinds.
    dict
        For each GPU that none of them has, why its last layout cannot run.

    Raises
    ------
    InputError
        If the model fits nowhere.
    InfeasibleError
        If no technique is admitted.
    """
    found: list[ReplicaKind] = []
    reasons = dict[str, InputError | InfeasibleError]()
    for one in question.rentable:
        tell(f"what {one.deployment.gpus} {one.gpu} can run")
        try:
            settings = _list_settings(one, question)
        except (InputError, InfeasibleError) as problem:
            reasons[one.gpu] = problem
            continue
        for setting, needed in settings:
            budgets = _budgets(setting.costs, question)
            timed = replace(setting, costs=next(iter(budgets.values())))
            for x, n in _variants(timed, needed, question):
                found.append(ReplicaKind(tuple(_choices(x, budgets, question)), n))
    if not found:
        none = InfeasibleError("none of the admitted techniques can run on these GPUs")
        raise next(reversed(reasons.values()), none)
    used = {kind.gpu for kind in found}
    return found, {gpu: str(x) for gpu, x in reasons.items() if gpu not in used}


Estimated = tuple[Configuration, Array]


def _list_settings(one: Rentable, question: "CapacityQuestion") -> list[Estimated]:
    """Full KV on a deployment and the techniques that are cheaper there, with estimates."""
    admission = question.admission
    techniques = admission.candidates()
    named = bool(admission.only or admission.engine)
    others = tuple(
        t for t in techniques if t.name != "full" and (named or served_by(t.name, one.deployment))
    )
    full = _estimate(one, question, replace(admission, techniques=(FULL,), only=(), without=()))
    found = list(full) if any(t.name == "full" for t in techniques) else []
    if not others:
        return found
    known = full[0][1]
    try:
        rated = _estimate(one, question, replace(admission, techniques=others, without=()))
    except (InputError, InfeasibleError):
        if not found:
            raise
        return found
    rated.sort(key=lambda x: (int(np.isinf(x[1]).sum()), float(x[1][np.isfinite(x[1])].sum())))
    names: set[str] = set()
    for x, needed in rated:  # two settings of one technique are rarely both worth it
        name = x.costs.technique.name
        if name in names or len(names) == TECHNIQUES_PER_DEPLOYMENT:
            continue
        if not found or (needed < WORTHWHILE_COST * known).any():
            names.add(name)
            found.append((x, needed))
    return found


def _estimate(one: Rentable, question: "CapacityQuestion", admission: Admission) -> list[Estimated]:
    """Every admitted setting that leaves room for a cache, and the replicas each class needs.

    Raises
    ------
    InputError
        If weights leave no room.
    InfeasibleError
        If no technique is admitted.
    """
    d, requests = one.deployment, question.traffic.requests
    rules, memory = question.rules.scale_to(d), d.hardware.gpu_memory * question.utilisation
    found, wanted = list[Estimated](), set[str]()
    reason: InputError | None = None
    admission.check(d)
    for technique in admission.candidates():
        for settings, option in _list_options(technique, d, question, admission):
            if option:
                wanted.add(option.partition(" ")[0])
                continue
            costs = StepCosts.for_requests(settings, d, rules, requests, memory)
            try:
                assert costs.capacity > 0
            except InputError as error:
                reason = error
                continue
            needed = estimate_replicas(costs, question.traffic, question.targets.uniform.tpot)
            one_of = Configuration(costs, one.gpu, one.price, one.reserved, one.power)
            found.append((one_of, needed))
    if not found and reason is not None:
        raise reason
    if not found:
        others = f"; {' or '.join(sorted(wanted))} admits others" if wanted else ""
        raise InfeasibleError(f"none of the admitted techniques can run here{others}")
    return found


def _list_options(
    technique: Technique, deployment: Deployment, question: "CapacityQuestion", admission: Admission
) -> Iterator[tuple[Technique, str]]:
    """Settings of a technique that do something there, each with the option that it lacks."""
    if technique.refuses(deployment):
        return
    requests = question.traffic.requests
    mean = round(float(requests.prompt.mean())), max(round(float(requests.generate.mean())), 2)
    longest = int((requests.prompt + requests.generate).max())
    for some in admission.settings(technique, deployment, *mean, differ=True):
        for settings in some.rows():
            if does_nothing(settings) and ("gamma" in settings.settings or not admission.only):
                continue
            known = admission.evidence(settings, deployment, longest)
            if admission.loss(known) > question.largest_loss:
                yield settings, needed_option(known)
            else:
                yield settings, "--acceptance" if settings.assumes else ""


def find_unadmitted(question: "CapacityQuestion") -> dict[str, str]:
    """Find techniques that were asked for by name and that other options keep out.

    Parameters
    ----------
    question
        What is asked.

    Returns
    -------
    dict
        For each of them an option that would admit one of its settings.
    """
    found, admission = dict[str, str](), question.admission
    each = [x.deployment for x in question.rentable]
    for t in admission.candidates() if admission.only else ():
        lacking = [y for d in each for _, y in _list_options(t, d, question, admission)]
        if lacking and all(lacking):
            found[t.name] = min(lacking)
    return found


def estimate_replicas(costs: StepCosts, traffic: Traffic, tpot: float) -> Array:
    """Estimate how many replicas each class of requests alone needs.

    A replica goes round: in each lap it makes one decoding round and reads the prompts that
    arrived. A lap of L seconds carries all requests of a class if

        decoding     d tokens/s keep L d / (tokens per round) sequences in the batch
        time         fixed time of a round + L (seconds per second of work) <= L
        memory       sequences x bytes of one <= capacity, on the GPU and on the host
        seats        sequences <= max_seqs
        TPOT         L / (tokens per round) <= target

    Times are straight lines in the batch, through one sequence and the most that memory and rules
    allow.

    Parameters
    ----------
    costs
        Step costs of the replica.
    traffic
        Requests in classes.
    tpot
        Longest time per token; infinite if there is no target. [s]

    Returns
    -------
    array
        Replicas; infinite where they cannot serve the class. (c,)
    """
    costs = costs.with_density(NODES_PER_OCTAVE, work=False)
    t, rules, per_s = costs.tables, costs.rules, traffic.mean
    decoded = per_s * (traffic.generate - 1)  # tokens per second after the first ones
    middle = traffic.prompt + traffic.generate / 2
    blocks = np.ceil(middle / rules.block_tokens).astype(np.int64)
    blocks = np.minimum(blocks, len(t.gpu_bytes) - 1)  # longer requests are refused
    gpu, host = t.gpu_bytes[blocks].astype(float), t.host_bytes[blocks].astype(float)
    room, host_room = float(costs.capacity), float(costs.room.host_capacity)
    weight = decoded / max(decoded.sum(), 1e-300)
    fit = min(room / max(float(weight @ gpu), 1.0), host_room / max(float(weight @ host), 1.0))
    most = int(np.clip(fit, 2, max(rules.max_seqs, 2)))
    few, many = 1, min(most, t.costs.round.shape[0] - 1)
    at_few, at_many = (simple_pass_seconds(t, batch=n, context=middle) for n in (few, many))
    each = np.maximum(at_many - at_few, 0.0) / max(many - few, 1)
    fixed = max(float(weight @ (at_few - each)), 0.0)
    seats = decoded / costs.rate
    work = per_s * _prompt_seconds(costs, traffic.prompt) / t.lanes + seats * each
    slack = tpot * costs.rate - fixed
    if slack <= 0 or max(t.gpu_bytes[-1], t.prompt_bytes[-1]) > room:
        return np.full(len(work), np.inf)
    laps = [seats * gpu / room, seats * host / max(host_room, 1.0), seats / rules.max_seqs]
    needed = fixed * np.maximum.reduce([*laps, work / slack]) + work
    return np.where(np.isfinite(needed), np.maximum(needed, 1e-9), np.inf)


def _prompt_seconds(costs: StepCosts, prompts: Array) -> Array:
    """Each of some prompts alone, in the parts that the rules make of it. (n,) [s]"""
    chunked = costs.rules.prefill == "chunked"
    part = costs.rules.max_tokens // costs.tables.lanes
    size = float(part) if chunked else max(float(prompts.max()), 1.0)
    parts = np.maximum(np.ceil(prompts / size), 1).astype(np.int64)
    of = np.repeat(np.arange(prompts.size), parts)
    place = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    last = place == parts[of] - 1
    start = place * size
    took = simple_pass_seconds(
        costs.tables,
        tokens=np.round(np.minimum(size, prompts[of] - start)),
        start=start,
        finished=last,
        after=np.where(last, prompts[of], 0.0),
    )
    return np.bincount(of, weights=took, minlength=prompts.size).astype(float)


def _variants(x: Configuration, needed: Array, question: "CapacityQuestion") -> Iterator[Estimated]:
    """A replica as it is, with each memory for prefix blocks, and with prefill apart."""
    extras, requests = question.extras, question.traffic.requests
    if not _can_share_prefixes(x, requests):
        rules = replace(x.costs.rules, prefix_caching=False)
        yield replace(x, costs=x.costs.with_rules(rules)), needed
        return
    best = x
    yield x, needed
    for host, drive in dict.fromkeys([(extras.host, 0.0), (extras.host, extras.drive)]):
        if host or drive:
            best = _add_memory(x, host, drive, extras)
            yield best, needed
    for prefill, decode in POOL_RATIOS if extras.apart else ():
        engines = prefill + decode
        several = replace(
            best,
            price=x.price * engines,
            reserved=x.reserved * engines,
            power=x.power * engines,
            apart=TwoPools(prefill, decode, rate=extras.nic),
        )
        yield several, needed / engines


def _budgets(costs: StepCosts, question: "CapacityQuestion") -> dict[int, StepCosts]:
    """A replica's costs with every pass budget that is tried, the engine's default first."""
    rules, lanes = costs.rules, costs.deployment.lanes
    own = costs.times_alone()
    found = {rules.max_tokens: own}
    for budget in (b * lanes for b in TOKEN_BUDGETS if question.tunes):
        if budget not in found:
            changed = replace(costs, rules=replace(rules, max_tokens=budget))
            found[budget] = changed.times_alone(own)
    return found


def _choices(
    x: Configuration, budgets: Mapping[int, StepCosts], question: "CapacityQuestion"
) -> Iterator[Configuration]:
    """A replica with every pass budget, whose tables its variants share, and with its router."""
    rules = x.costs.rules
    route = question.route or usual_route(x.costs, question.traffic.requests)
    for budget, costs in budgets.items():
        if x.apart is None or budget == rules.max_tokens:
            mine = costs.with_rules(replace(rules, max_tokens=budget))
            yield replace(x, costs=mine, route=route)


def _add_memory(x: Configuration, host: float, drive: float, extras: Extras) -> Configuration:
    """The same with prefix blocks in other memories, all loaded: engines do not recompute them."""
    costs, gpus = x.costs, x.costs.deployment.gpus
    rates = extras.rates if drive else {}
    rules = replace(
        costs.rules, host_cache=host * gpus, nvme_cache=drive * gpus, prefix_load="load", **rates
    )
    return replace(x, costs=costs.with_rules(rules))


def _can_share_prefixes(x: Configuration, requests: Requests) -> bool:
    """Whether prompts can share the technique's cache."""
    if not x.costs.rules.prefix_caching:
        return True
    try:
        limits_of(x.costs, requests)
    except InputError:
        return False
    return True


# what is asked


def allow_all(_: Configuration) -> bool:
    """Every kind of replica may be rented."""
    return True


@frozen
class CapacityQuestion:
    """What is asked; comparisons and what-ifs are the same question with other values.

    Attributes
    ----------
    largest_loss
        Relative loss of quality that may be known of a setting.
    utilisation
        Share of each GPU's memory that the engine uses.
    spread
        How far predictions have been off; what the ledger of errors has if None.
    start_up
        Time that a replica is paid for before it serves, where replicas start and stop between
        windows; None: they always run. [h]
    extras
        Memories for prefix blocks besides the GPU's, and whether prefill and decode may be apart.
    sure
        Probability with which the targets are to be kept, over other days of the traffic and the
        error of the times; 0: the trace as it is, with times as predicted.
    tunes
        Whether the pass budget and the batch limit are chosen too.
    load
        Clients, in times of the trace's.
    least
        What the fleet for a smaller load costs: one that costs less is not taken, as it keeps the
        targets by the luck of the days that were drawn. [USD/h]
    only
        Which kinds of replica may be rented.
    left_out
        Requests that no engine takes because they exceed the context; the traffic is without them.
    route
        How requests find one of several equal replicas; empty: as engines' routers do.
    sellers
        What other sellers ask for each GPU. [USD/h]
    """

    traffic: Traffic
    rentable: list[Rentable]
    admission: Admission
    targets: FleetTargets
    limits: FleetLimits
    rules: Rules
    spread: Spread | None = None
    largest_loss: float = 0.0
    utilisation: float = ENGINE_SHARE
    start_up: float | None = None
    extras: Extras = Extras()
    sure: float = 0.9
    tunes: bool = True
    load: float = 1.0
    least: float = 0.0
    only: Callable[[Configuration], bool] = allow_all
    left_out: int = 0
    route: str = ""
    sellers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
