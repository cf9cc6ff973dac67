"""One kind of replica: what runs on it, what it costs, and what its software says of itself."""

from dataclasses import replace

import numpy as np

from kvsim.frozen import frozen
from kvsim.machines.hardware import GIB
from kvsim.planner.fleet.arrays import Offers
from kvsim.serving.costs import StepCosts
from kvsim.serving.pools import TwoPools

PLAINER = 1e-7  # what each addition counts, of the price: of equally dear replicas the plainer one


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
        price=np.array([x.price * (1 + PLAINER * x.extras) for x in some]),
        reserved=np.array([x.reserved * (1 + PLAINER * x.extras) for x in some]),
        gpus=np.array([x.gpus for x in some], np.int64),
        kind=tuple(x.gpu for x in some),
        host=np.array([x.host for x in some]),
        power=np.array([x.power for x in some]),
    )
