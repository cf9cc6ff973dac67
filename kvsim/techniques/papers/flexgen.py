"""FlexGen: weights, cache and hidden states placed on GPU, host and disk in any proportion."""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Part, Term
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.settings import combine, make_axis, param
from kvsim.techniques.axes.storage import PACKED_ON_HOST, packed_on_host

DISK_SHARES = make_axis(*np.arange(1, 33) / 32)  # of what the host has, tried in plans


@frozen
class Flexgen(Term):
    """Offloads cache and weights; each layer processes the parts of a batch in turn.

    This is column order: a layer serves all parts of the batch before the next layer runs.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen: high-throughput generative inference of large language
       models with a single GPU", ICML 2023, sections 4.2 to 4.4.
    """

    name: ClassVar[str] = "flexgen"
    evidence_kind: ClassVar[str] = PACKED_ON_HOST

    weights_gpu: float = param(0, "share of the weights on the GPU [%]", high=100, whole=False)
    cache_gpu: float = param(0, "share of the cache on the GPU [%]", high=100, whole=False)
    states_gpu: float = param(
        100, "share of the hidden states on the GPU [%]", high=100, whole=False
    )
    weights_disk: Number = param(
        0, "share of the weights on the disk [%]", high=100, whole=False, quiet=True
    )
    cache_disk: Number = param(
        0, "share of the cache on the disk [%]", high=100, whole=False, quiet=True
    )
    states_disk: float = param(
        0, "share of the hidden states on the disk [%]", high=100, whole=False, quiet=True
    )
    bits: float = param(16, "bits per cached number", choices=(4, 8, 16), gentler=1)
    parts: int = param(8, "parts of the batch", low=1, high=1024)

    candidates = (  # the corners of the placement, and half the weights
        *combine(weights_gpu=(0.0, 50.0, 100.0), cache_gpu=(0.0, 50.0)),
        {"bits": 4},
    )

    def pieces(self) -> tuple[Part, ...]:
        """Return the placement in column order; shares not on GPU or disk are on the host."""
        cache, cache_disk = _split_off_gpu("cache", self.cache_gpu, self.cache_disk)
        weights, weights_disk = _split_off_gpu("weights", self.weights_gpu, self.weights_disk)
        states, states_disk = _split_off_gpu("states", self.states_gpu, self.states_disk)
        place = HostPlacement(
            cache,
            weights_host=weights,
            states_host=states,
            cache_disk=cache_disk,
            weights_disk=weights_disk,
            states_disk=float(states_disk),
            parts=self.parts,
        )
        return (place, *packed_on_host(self.bits))

    def options(self, deployment: Deployment, prompt: int, generate: int) -> Iterable[Term]:
        """Return the settings to try; if the machine has a drive, also some that use it."""
        for some in super().options(deployment, prompt, generate):
            yield some
            assert isinstance(some, Flexgen)
            weights, cache = 100 - some.weights_gpu, 100 - some.cache_gpu
            if deployment.hardware.disk_memory and (weights or cache):
                on_disk = weights * DISK_SHARES, cache * DISK_SHARES
                yield replace(some, weights_disk=on_disk[0], cache_disk=on_disk[1])


def _split_off_gpu(what: str, gpu: float, disk: Number) -> tuple[float, Number]:
    """Return the share that is not on the GPU, and how much of that is on the drive."""
    if np.any(gpu + np.asarray(disk) > 100):
        raise InputError(f"flexgen: {what}_gpu and {what}_disk exceed 100 % together")
    return 1.0 - gpu / 100, disk / (100.0 - gpu) if gpu < 100 else 0.0
