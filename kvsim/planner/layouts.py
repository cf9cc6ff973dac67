"""Ways to spread replicas of a model over so many GPUs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from kvsim.errors import InputError
from kvsim.machines.deployment import Deployment

DEGREES = (1, 2, 4, 8, 16, 32, 64)
"""Degrees that are tried: engines cut attention and experts by powers of two."""


def on_nodes(deployment: Deployment, gpus: int, nodes: int) -> Deployment:
    """The deployment where a machine holds an equal part of all GPUs.

    Parameters
    ----------
    deployment
        The deployment.
    gpus, nodes
        GPUs in all, and machines that hold them; 0: as few as the card's machines allow.

    Raises
    ------
    InputError
        If the machines cannot hold equally many.
    """
    if not nodes:
        return deployment
    if gpus % nodes:
        raise InputError(f"--nodes: {gpus} GPUs do not divide over {nodes} machines")
    linked = min(deployment.hardware.linked, gpus // nodes)
    return replace(deployment, hardware=replace(deployment.hardware, linked=linked))


def list_layouts(deployment: Deployment, gpus: int) -> Iterator[Deployment]:
    """All layouts of replicas that divide so many GPUs evenly, the fewest GPUs each first.

    Tensor parallelism stays within a machine, where links carry its sums. Data parallelism of
    attention, and whole experts on GPUs, are for models with experts.

    Parameters
    ----------
    deployment
        Model, card, stack and weights.
    gpus
        GPUs that all serve.
    """
    experts = deployment.model.experts > 0
    found = []
    for tp, pp, dp in product(DEGREES, DEGREES, DEGREES if experts else (1,)):
        each = tp * pp * dp
        if gpus % each or tp > deployment.hardware.linked:
            continue
        for ep in sorted({1, tp * dp}) if experts else (1,):
            try:
                spread = replace(deployment, tp=tp, pp=pp, dp=dp, ep=ep)
                assert spread.shard.heads  # refuses heads that do not divide
                found.append(spread)
            except InputError:
                continue
    yield from sorted(found, key=lambda d: (d.gpus, d.pp, d.dp))
