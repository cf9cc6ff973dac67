"""What can be rented: kinds of replica, the limits on a fleet, and how wrong their times may be.

Every deployment that may be rented is a kind with full KV, and with the techniques that an engine
runs (or the user names) and a closed estimate finds cheaper there; each of them again with several
budgets of tokens per pass, with other memories for prefix blocks and with prefill apart from decode
where the traffic may gain from it. Nothing is left out because another kind looks better: the
search plays them, cheapest bound first.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from math import exp, log
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
from kvsim.planner.fleet.demand import FleetTargets, Traffic
from kvsim.planner.fleet.replica import Classes, list_step_costs, load_coefficients
from kvsim.planner.question import Admission, PlanLimits
from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import NIC_RATE, Rules
from kvsim.serving.simulate import usual_route
from kvsim.serving.world import limits_of
from kvsim.techniques import parse
from kvsim.techniques.released import served_by
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


@frozen
class Schedule:
    """Replicas may start and stop between windows.

    Attributes
    ----------
    start_up
        Time that a replica is paid for before it serves. [h]
    """

    start_up: float = 0.0


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
    def tiers(self) -> bool:
        """Whether memories besides the GPU's keep prefix blocks."""
        return self.costs.rules.tiers

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

    def limited(self, max_seqs: int) -> "Configuration":
        """The same with another batch limit."""
        return replace(self, costs=self.costs.with_fewer(max_seqs))


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


def list_kinds(question: "CapacityQuestion", tell: Callable[[str], None]) -> list[ReplicaKind]:
    """List every kind of replica that may be rented and can run.

    Parameters
    ----------
    question
        What is asked.
    tell
        Is told what is being done.

    Raises
    ------
    InputError
        If the model fits nowhere.
    InfeasibleError
        If no technique is admitted.
    """
    found: list[ReplicaKind] = []
    reason: InputError | InfeasibleError | None = None
    for one in question.rentable:
        tell(f"what {one.deployment.gpus} {one.gpu} can run")
        try:
            settings = _list_settings(one, question)
        except (InputError, InfeasibleError) as problem:
            reason = problem
            continue
        for setting, needed in settings:
            budgets = _budgets(setting.costs, question)
            timed = replace(setting, costs=next(iter(budgets.values())))
            for x, n in _variants(timed, needed, question):
                found.append(ReplicaKind(tuple(_choices(x, budgets, question)), n))
    if not found:
        raise reason or InfeasibleError("none of the admitted techniques can run on these GPUs")
    return found


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

    def cheaper(needed: Array) -> bool:
        return float(needed.sum()) < WORTHWHILE_COST * known.sum() or bool(
            (needed < WORTHWHILE_COST * known).any()
        )

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
        if not found or cheaper(needed):
            names.add(name)
            found.append((x, needed))
    return found


def _estimate(one: Rentable, question: "CapacityQuestion", admission: Admission) -> list[Estimated]:
    """Every admitted setting on a deployment, and the replicas each class needs by a formula.

    Memory, seats and time per token each ask for laps of the batch; a lap costs its fixed time.
    """
    d, traffic, targets = one.deployment, question.traffic, question.targets.uniform
    rules = question.rules.scale_to(d)
    here = PlanLimits(
        gpu_memory=d.hardware.gpu_memory * question.utilisation,
        host_memory=d.hardware.host_memory,
        ttft=targets.ttft,
        tpot=targets.tpot,
        loss=question.largest_loss,
    )
    options = list_step_costs(d, traffic.requests, here, rules, admission)
    per_s = traffic.demand.mean
    classes = Classes(traffic.prompt, traffic.generate, per_s, traffic.of)
    found = load_coefficients(options, classes)
    slack = targets.tpot * found.tokens - found.fixed
    in_time = found.work / np.where(slack > 0, slack, np.nan) if np.isfinite(targets.tpot) else 0.0
    each = (found.gpu / found.room, found.host / found.host_room, found.seats / rules.max_seqs)
    laps = np.maximum.reduce([*each, np.broadcast_to(in_time, found.work.shape)])
    needed = found.fixed * laps + found.work
    fits = (found.longest <= found.room) & (slack > 0) & np.isfinite(needed)
    needed = np.where(fits, np.maximum(needed, 1e-9), np.inf)
    return [
        (Configuration(x, one.gpu, one.price, one.reserved, one.power), needed[:, j])
        for j, x in enumerate(options)
    ]


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


@frozen
class CapacityQuestion:
    """What is asked.

    Attributes
    ----------
    largest_loss
        Relative loss of quality that may be known of a setting.
    utilisation
        Share of each GPU's memory that the engine uses.
    spread
        How far predictions have been off; what the ledger of errors has if None.
    extras
        Memories for prefix blocks besides the GPU's, and whether prefill and decode may be apart.
    sure
        Probability with which the targets are to be kept, over other days of the traffic and the
        error of the times; 0: the trace as it is, with times as predicted.
    tunes
        Whether the pass budget and the batch limit are chosen too.
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
    schedule: Schedule | None = None
    extras: Extras = Extras()
    sure: float = 0.9
    tunes: bool = True
    left_out: int = 0
    route: str = ""
    sellers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
