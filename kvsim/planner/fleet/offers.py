"""What can be rented: kinds of replica, and which of very many are worth a simulation.

A closed estimate rates every deployment and technique. Of one class, or of all together, a replica
needs laps and load as the planner of traces derives them:

    laps = max(memory, host memory, seats, work / (TPOT x tokens - fixed))
    load = fixed x laps + work

Every deployment is rated with full KV first; the techniques are then tried on the best of them. The
estimate is only good for leaving out what is much dearer than the best. It knows neither other
memories for prefix blocks nor prefill apart from decode, so both are added as variants where the
trace says which prompts share a prefix, and simulated.
"""

from collections.abc import Callable, Mapping
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
from kvsim.planner.fleet.demand import Counts, FleetTargets, Traffic
from kvsim.planner.question import Admission, PlanLimits
from kvsim.planner.replica import Classes, Loads, list_step_costs, load_coefficients
from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools
from kvsim.serving.rules import NIC_RATE, Rules
from kvsim.serving.world import limits_of
from kvsim.techniques import parse
from kvsim.traces.requests import Requests

# what the programme reads


@frozen
class Offers:
    """Kinds of replica that can be rented, one per column.

    Attributes
    ----------
    capacity
        Requests of one class alone that one replica serves within the targets; 0: it cannot.
        (c, j) [1/s]
    late
        Share of a class that misses a target even on an idle replica. (c, j)
    price, reserved
        On demand and with a commitment; infinite where it is not offered. (j,) [USD/h]
    gpus
        GPUs of one replica. (j,)
    kind
        Which GPU. (j,)
    host
        Host memory of one replica. (j,) [B]
    power
        Rated power of one replica's GPUs; infinite where it is unknown. (j,) [W]
    """

    capacity: Array
    late: Array
    price: Array
    reserved: Array
    gpus: Counts
    kind: tuple[str, ...]
    host: Array
    power: Array

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def classes(self) -> int:
        """How many classes of requests there are."""
        return len(self.capacity)

    @property
    def rent(self) -> Array:
        """The lower of the two prices, for replicas that always run. (j,) [USD/h]"""
        return np.minimum(self.price, self.reserved)

    def only(self, columns: list[int]) -> "Offers":
        """Some of the offers."""
        return Offers(
            capacity=self.capacity[:, columns],
            late=self.late[:, columns],
            price=self.price[columns],
            reserved=self.reserved[columns],
            gpus=self.gpus[columns],
            kind=tuple(self.kind[j] for j in columns),
            host=self.host[columns],
            power=self.power[columns],
        )

    def times(self, factor: Array) -> "Offers":
        """The same offers with other capacities. (j,)"""
        return replace(self, capacity=self.capacity * factor)


@frozen
class FleetLimits:
    """What a fleet must respect; infinite where the user set nothing.

    Attributes
    ----------
    gpus, gpus_of
        GPUs in all, and of each kind.
    host, power
        Host memory [B] and rated power of all GPUs [W].
    configurations, mixed
        Different kinds of replica at most, and whether there must be several.
    headroom
        Share of load beyond the demand that the fleet must carry.
    failures
        Replicas that may be lost while the rest carries the demand.
    late
        Share of all requests that may miss a target.
    """

    gpus: float = np.inf
    gpus_of: Mapping[str, float] = field(default_factory=dict)
    host: float = np.inf
    power: float = np.inf
    configurations: float = np.inf
    mixed: bool = False
    headroom: float = 0.0
    failures: int = 0
    late: float = 0.01


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

# What each addition counts, of the price: of equally dear replicas the plainer one.
ADDITION_SURCHARGE = 1e-7


@frozen
class Configuration:
    """A replica: GPUs with a model, a technique and an engine's limits.

    Where prefill and decode are apart, the smallest whole of engines that do either is a replica.

    Attributes
    ----------
    costs
        Step costs of the technique there.
    gpu
        Name of the GPU, as `kvsim gpus` lists it.
    price, reserved
        Of the whole replica, on demand and with a commitment; infinite where there is none. [USD/h]
    power
        Rated power of its GPUs; infinite where it is unknown. [W]
    apart
        Its engines that read prompts and those that decode; None if each does both.
    """

    costs: StepCosts
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf
    apart: TwoPools | None = None

    @property
    def engines(self) -> int:
        """Engines of one replica."""
        return 1 if self.apart is None else self.apart.prefill + self.apart.decode

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.costs.deployment.gpus * self.engines

    @property
    def extras(self) -> int:
        """What it has besides GPUs: memories for prefix blocks, and prefill apart."""
        rules = self.costs.rules
        return (rules.host_cache > 0) + (rules.nvme_cache > 0) + (self.apart is not None)

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
        """The lower of its prices. [USD/h]"""
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
    def name(self) -> str:
        """Short, for tables: the GPU, how many, the weights, the technique and other memories."""
        d = self.costs.deployment
        several = f" x{d.gpus}{d.parallelism.brackets()}" if d.gpus > 1 else ""
        weights = "" if d.weights == "fp16" else f" {d.weights}"
        return f"{self.gpu}{several}{weights} {self.technique}{self._memories}{self._pools}"

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
        return f" ({self.apart.prefill} prefill + {self.apart.decode} decode)"

    def limited(self, max_seqs: int) -> "Configuration":
        """The same with another batch limit."""
        return replace(self, costs=self.costs.with_fewer(max_seqs))


def offers_of(some: list[Configuration], capacity: np.ndarray, late: np.ndarray) -> Offers:
    """The programme's columns.

    Parameters
    ----------
    capacity, late : by class and configuration. (c, j)
    """
    return Offers(
        capacity=capacity,
        late=late,
        price=np.array([x.price * (1 + ADDITION_SURCHARGE * x.extras) for x in some]),
        reserved=np.array([x.reserved * (1 + ADDITION_SURCHARGE * x.extras) for x in some]),
        gpus=np.array([x.gpus for x in some], np.int64),
        kind=tuple(x.gpu for x in some),
        host=np.array([x.host for x in some]),
        power=np.array([x.power for x in some]),
    )


# known errors of their times

SURE = 0.95
ERROR_KINDS = ("decode", "prefill", "request")


@frozen
class Spread:
    """Standard deviation of the logarithm of measured over predicted times, and its source."""

    sigma: float
    source: str

    def slowdown(self, likely: float = SURE) -> float:
        """The factor that times stay below with a likelihood."""
        return exp(self.sigma * NormalDist().inv_cdf(likely))


def known_spread(configurations: list[Configuration]) -> Spread:
    """The widest spread that the ledger of errors has for what some replicas run.

    Times to the first token and per token count where they were measured, else whole requests.
    """
    found = []
    for x in configurations:
        each = [evidence_for(x.costs.deployment, x.technique, kind) for kind in ERROR_KINDS]
        measured = [e for e in each[:-1] if e.entry is not None] or each[-1:]
        found.append(max(measured, key=_log_width))
    widest = max(found, key=_log_width)
    return Spread(_log_width(widest) / WITHIN_80, widest.words)


def _log_width(error: KnownError) -> float:
    """How far the logarithm of an 80 % interval reaches to either side."""
    return max(log(error.high), -log(error.low))


# closed estimate


def estimate_loads(
    configurations: list[Configuration], traffic: Traffic, targets: FleetTargets
) -> Loads:
    """Coefficients of every configuration at the trace's mean rates."""
    per_s = traffic.demand.mean
    classes = Classes(traffic.prompt, traffic.generate, per_s, traffic.of, traffic.requests.prompt)
    return load_coefficients([x.costs for x in configurations], classes, targets.ttft)


def replicas_needed(found: Loads, targets: FleetTargets, max_seqs: Array) -> Array:
    """Replicas that each class alone needs of each configuration; infinite where it cannot.

    Parameters
    ----------
    max_seqs : of each configuration. (j,)

    Returns
    -------
    (c, j)
    """
    slack = targets.tpot * found.tokens - found.fixed
    in_time = found.work / np.where(slack > 0, slack, np.nan) if np.isfinite(targets.tpot) else 0.0
    laps = np.maximum.reduce(
        [
            found.gpu / found.room,
            found.host / found.host_room,
            found.seats / max_seqs,
            np.broadcast_to(in_time, found.work.shape),
        ]
    )
    needed = found.fixed * laps + found.work
    fits = (found.longest <= found.room) & (slack > 0)
    return np.where(fits & np.isfinite(needed), np.maximum(needed, 1e-9), np.inf)


def late_shares(found: Loads, traffic: Traffic) -> Array:
    """Share of each class whose prompt takes longer than the TTFT target even alone. (c, j)"""
    of_class = np.bincount(traffic.of, minlength=traffic.classes) / len(traffic.of)
    return np.asarray(np.minimum(found.late / of_class[:, None], 1.0))


# shortlist

MAX_DEPLOYMENTS = 8  # kept with full KV
DEPLOYMENTS_WITH_TECHNIQUES = 2  # of them with every other technique
# Cost at which another technique is worth a look, of full KV on the same deployment.
WORTHWHILE_COST = 0.99
SETTINGS_PER_DEPLOYMENT = 2  # per deployment, besides full KV
# Deployments that are kept because a whole one is cheaper than one of the best.
CHEAPER_WHOLE_DEPLOYMENTS = 2
# Cost of all requests, or of one class, of the cheapest, that is still looked at.
MAX_COST_RATIO = 4.0


@frozen
class Rentable:
    """A deployment that can be rented as one replica, with the prices of all of it. [USD/h, W]"""

    deployment: Deployment
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf


@frozen
class Rated:
    """A configuration with the closed estimate of what it carries.

    Attributes
    ----------
    needed
        Replicas that each class alone needs; infinite where it cannot. (c,)
    late
        Share of each class that misses a target on an idle replica as well. (c,)
    """

    configuration: Configuration
    needed: Array
    late: Array

    @property
    def cost(self) -> Array:
        """Price of each class. (c,) [USD/h]"""
        return np.asarray(self.needed * self.configuration.rent)

    @property
    def cost_of_all(self) -> float:
        """Price of all classes. [USD/h]"""
        return float(self.cost.sum())


@frozen
class Terms:
    """What every configuration is rated for.

    Attributes
    ----------
    admission, largest_loss
        Which techniques, and what relative loss of quality may be known of them.
    utilisation
        Share of each GPU's memory that the engine uses.
    """

    traffic: Traffic
    targets: FleetTargets
    rules: Rules
    admission: Admission
    largest_loss: float
    utilisation: float


def shortlist(
    rentable: list[Rentable], terms: Terms, tell: Callable[[str], None] = lambda _: None
) -> list[Rated]:
    """The configurations to simulate, the cheapest by estimate first.

    Raises
    ------
    InputError
        If the model fits nowhere.
    InfeasibleError
        If no technique is admitted.
    """
    techniques = terms.admission.candidates()
    others = tuple(t for t in techniques if t.name != "full")
    full = replace(terms.admission, techniques=(parse("full"),), only=(), without=())
    lossless, rest = replace(terms, admission=full), terms
    if others:
        rest = replace(terms, admission=replace(full, techniques=others))
    plain: list[tuple[Rentable, Rated]] = []
    reason: InputError | InfeasibleError | None = None
    for one in rentable:
        try:
            rated = _rate_settings(one, lossless)
        except (InputError, InfeasibleError) as problem:
            reason = problem
            continue
        plain += [(one, r) for r in rated]
    if not plain:
        assert reason is not None
        raise reason
    best = _select_cheapest([r for _, r in plain], MAX_DEPLOYMENTS)
    kept = best if len(others) < len(techniques) else []
    for one, known in plain:
        if others and any(known is r for r in best[:DEPLOYMENTS_WITH_TECHNIQUES]):
            tell(f"estimating techniques on {one.gpu}")
            kept = kept + _cheaper_settings(one, known, rest)
    if not kept:
        raise InfeasibleError("none of the admitted techniques can run on these GPUs")
    return _select_cheapest(kept, len(kept))


def _cheaper_settings(one: Rentable, full: Rated, terms: Terms) -> list[Rated]:
    """Settings that need fewer replicas than full KV for all classes, or for one."""
    try:
        rated = _rate_settings(one, terms)
    except (InputError, InfeasibleError):
        return []
    known = np.where(np.isfinite(full.cost), full.cost, np.inf)
    worth = [r for r in rated if (r.cost < WORTHWHILE_COST * known).any()]
    worth.sort(key=lambda r: (float(np.isinf(r.cost).sum()), r.cost_of_all))
    best: list[Rated] = []
    for r in worth:  # two settings of one technique are rarely both worth it
        if r.configuration.costs.technique.name not in {
            x.configuration.costs.technique.name for x in best
        }:
            best.append(r)
    return best[:SETTINGS_PER_DEPLOYMENT]


def _rate_settings(one: Rentable, terms: Terms) -> list[Rated]:
    """Every admitted setting on a deployment, with its estimate."""
    d, traffic, targets = one.deployment, terms.traffic, terms.targets.loosest
    rules = terms.rules.scale_to(d)
    here = PlanLimits(
        gpu_memory=d.hardware.gpu_memory * terms.utilisation,
        host_memory=d.hardware.host_memory,
        ttft=targets.ttft,
        tpot=targets.tpot,
        loss=terms.largest_loss,
    )
    options = list_step_costs(d, traffic.requests, here, rules, terms.admission)
    some = [Configuration(x, one.gpu, one.price, one.reserved, one.power) for x in options]
    found = estimate_loads(some, traffic, targets)
    needed = replicas_needed(found, targets, np.array([float(rules.max_seqs)]))
    late = late_shares(found, traffic)
    return [Rated(x, needed[:, j], late[:, j]) for j, x in enumerate(some)]


def _select_cheapest(rated: list[Rated], most: int) -> list[Rated]:
    """The cheapest of all classes together and of each class, without those far dearer.

    Little load is cheapest on the cheapest replica that carries it, not on the one of which it
    keeps the cheapest part busy: replicas that are cheaper whole than the best of these stay too.
    """
    cost = np.array([r.cost for r in rated])
    cheapest = np.min(cost, axis=0)
    ratio = cost / np.where(np.isfinite(cheapest) & (cheapest > 0), cheapest, 1.0)
    worst = np.where(np.isfinite(ratio).any(axis=1), np.nanmin(ratio, axis=1), np.inf)
    order = sorted(
        range(len(rated)),
        key=lambda i: (int(np.isinf(cost[i]).sum()), rated[i].cost_of_all, float(worst[i])),
    )
    first = [i for i in dict.fromkeys(np.argmin(cost, axis=0).tolist()) if np.isfinite(worst[i])]
    near = [i for i in order if worst[i] <= MAX_COST_RATIO]
    whole = [max(float(r.needed.sum()), 1.0) * r.configuration.rent for r in rated]
    cheaper = sorted((i for i in order if whole[i] < whole[order[0]]), key=whole.__getitem__)
    some = [*order[:1], *first, *cheaper[:CHEAPER_WHOLE_DEPLOYMENTS], *near, *order[:2]]
    chosen = list(dict.fromkeys(some))[:most]
    return [rated[i] for i in sorted(chosen, key=order.index)]


# variants

# Of the shortlist's best, with each memory; others with all that there is, and none.
TRIED_WITH_EACH_MEMORY = 4
TRIED_DISAGGREGATED = 2  # of the shortlist's best, with prefill and decode apart
PREFILL_DECODE_RATIOS = (
    (1, 1),
    (2, 1),
    (1, 2),
)  # engines that read prompts and engines that decode


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


def add_variants(rated: list[Rated], requests: Requests, extras: Extras) -> list[Rated]:
    """The shortlist with its variants.

    Techniques whose caches cannot be shared are played without prefix caching.
    """
    found: list[Rated] = []
    for place, x in enumerate(rated):
        kept = [_add_memory(x, *sizes, extras) for sizes in _memory_sizes(extras)]
        usable = [y for y in (x, *kept) if _can_share_prefixes(y, requests)]
        if not usable:
            found.append(_disable_prefix_caching(x))
            continue
        found += usable if place < TRIED_WITH_EACH_MEMORY else usable[:1] + usable[1:][-1:]
        if extras.apart and place < TRIED_DISAGGREGATED:
            found += [
                _disaggregate(usable[-1], *ratio, extras.nic) for ratio in PREFILL_DECODE_RATIOS
            ]
    return found


def _memory_sizes(extras: Extras) -> list[tuple[float, float]]:
    """Host memory and drive, each GPU's, from the least to all. [B]"""
    some = [(extras.host, 0.0), (extras.host, extras.drive)]
    return [x for x in dict.fromkeys(some) if any(x)]


def _add_memory(x: Rated, host: float, drive: float, extras: Extras) -> Rated:
    """The same with prefix blocks in other memories, all loaded: engines do not recompute them."""
    costs, gpus = x.configuration.costs, x.configuration.costs.deployment.gpus
    rates = extras.rates if drive else {}
    rules = replace(
        costs.rules, host_cache=host * gpus, nvme_cache=drive * gpus, prefix_load="load", **rates
    )
    return replace(x, configuration=replace(x.configuration, costs=costs.with_rules(rules)))


def _disable_prefix_caching(x: Rated) -> Rated:
    costs = x.configuration.costs
    rules = replace(costs.rules, prefix_caching=False)
    return replace(x, configuration=replace(x.configuration, costs=costs.with_rules(rules)))


def _disaggregate(x: Rated, prefill: int, decode: int, nic: float) -> Rated:
    one, engines = x.configuration, prefill + decode
    several = replace(
        one,
        price=one.price * engines,
        reserved=one.reserved * engines,
        power=one.power * engines,
        apart=TwoPools(prefill, decode, rate=nic),
    )
    return replace(x, configuration=several, needed=x.needed / engines)


def _can_share_prefixes(x: Rated, requests: Requests) -> bool:
    """Whether prompts can share the technique's cache."""
    costs = x.configuration.costs
    if not costs.rules.prefix_caching:
        return True
    try:
        limits_of(costs, requests)
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
