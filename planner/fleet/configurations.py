"""One kind of replica: what runs on it, what it costs, and what its software says of itself."""

from dataclasses import dataclass, replace

import numpy as np

from kvsim.planner.fleet.arrays import Offers
from kvsim.serving.costs import StepCosts


@dataclass(frozen=True)
class Configuration:
    """A replica: GPUs with a model, a technique and an engine's limits.

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
    """

    costs: StepCosts
    gpu: str
    price: float
    reserved: float = np.inf
    power: float = np.inf

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.costs.deployment.tp

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
        return rules.host_cache + min(own, room.host_capacity) * self.gpus

    @property
    def name(self) -> str:
        """Short, for tables: the GPU, how many, the weights and the technique."""
        d = self.costs.deployment
        several = f" x{d.tp}" if d.tp > 1 else ""
        weights = "" if d.weights == "fp16" else f" {d.weights}"
        return f"{self.gpu}{several}{weights} {self.technique}"

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
        price=np.array([x.price for x in some]),
        reserved=np.array([x.reserved for x in some]),
        gpus=np.array([x.gpus for x in some], np.int64),
        kind=tuple(x.gpu for x in some),
        host=np.array([x.host for x in some]),
        power=np.array([x.power for x in some]),
    )
