"""What the fleet programme reads and answers, as plain arrays."""

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array

if TYPE_CHECKING:
    from kvsim.planner.fleet.survival import FatalLoss

Counts = NDArray[np.int64]


@frozen
class Demand:
    """How many requests of each class arrive in each window of the day.

    Attributes
    ----------
    rate
        Requests per second. (w, c) [1/s]
    hours
        How long each window lasts. (w,) [h]
    """

    rate: Array
    hours: Array

    @property
    def mean(self) -> Array:
        """Requests per second over all windows. (c,) [1/s]"""
        return np.asarray(self.hours @ self.rate / self.hours.sum())

    @cached_property
    def peaks(self) -> Array:
        """The windows that no other window exceeds in every class. (p, c) [1/s]"""
        rows = np.unique(self.rate, axis=0)
        exceeded = [
            bool(((rows >= row).all(axis=1) & (rows > row).any(axis=1)).any()) for row in rows
        ]
        return np.asarray(rows[~np.array(exceeded)])


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


@frozen
class FleetCut:
    """A fleet that missed the targets in simulation, and so do those that are hardly larger.

    Attributes
    ----------
    replicas
        Of each kind. (j,)
    beyond
        Replicas that another fleet must have beyond these at least: one, or one more than may fail,
        as it would be left with these otherwise.
    """

    replicas: Counts
    beyond: int = 1

    def excludes(self, replicas: Counts) -> bool:
        """Whether a fleet is among them."""
        return int(np.maximum(replicas - self.replicas, 0).sum()) < self.beyond


@frozen
class FleetPlan:
    """A solution of the programme.

    Attributes
    ----------
    running
        Replicas that serve in each window. (w, j)
    reserved
        Replicas rented with a commitment. (j,)
    share
        Share of each class that each kind of replica serves in each window. (w, c, j)
    cost
        Mean price per hour. [USD/h]
    bound
        Price that no fleet of these offers can undercut, by the solver. [USD/h]
    relaxed
        Price if parts of replicas could be rented. [USD/h]
    seconds
        Time of the solver. [s]
    losses
        Failures that it was made to survive.
    """

    running: Counts
    reserved: Counts
    share: Array
    cost: float
    bound: float
    relaxed: float
    seconds: float
    losses: tuple["FatalLoss", ...] = ()

    @property
    def replicas(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))
