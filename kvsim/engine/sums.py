"""Sums of hidden states over the GPUs of a tensor-parallel group."""

import numpy as np

from kvsim.graph import Number, Op
from kvsim.machines.deployment import Deployment


def all_reduce(deployment: Deployment, name: str, data: Number) -> list[Op]:
    """Sum of ``data`` bytes of hidden states over the replica's GPUs.

    In a ring, 2 (tp - 1) transfers of 1 / tp of the data; in one shot, everyone reads all others';
    in two shots, everyone sums its part of the data and then reads the others' sums.
    """
    if deployment.tp == 1:
        return []
    latency = deployment.hardware.links["link"].latency
    if deployment.stack.sums.direct_share:
        return [_quickest_sum(deployment, name, data)]
    if deployment.stack.sums.one_shot:
        moved, wait = (deployment.tp - 1) * data, latency
    else:
        moved, wait = (
            2 * (deployment.tp - 1) / deployment.tp * data,
            2 * (deployment.tp - 1) * latency,
        )
    return [Op(name, kernel="allreduce", bytes={"link": moved}, fixed=wait)]


def _quickest_sum(deployment: Deployment, name: str, data: Number) -> Op:
    """The quickest of a one-shot sum, a two-shot sum and a ring over ``data`` bytes per GPU.

    The op carries the bytes that its way moves, and what that way takes beyond them as fixed time.
    """
    stack, others, rate = deployment.stack, deployment.tp - 1, deployment.bandwidth["link"]
    once, twice = others * data, 2 * others / deployment.tp * data
    hops, share = stack.sums.direct_hop * others, stack.sums.direct_share * rate
    one = stack.sums.direct + hops + once / share
    two = stack.sums.direct + stack.sums.direct_second + 2 * hops + twice / share
    ring = (
        stack.sums.ring + 2 * others * stack.sums.ring_hop + twice / (stack.sums.ring_share * rate)
    )
    took = np.minimum(np.minimum(one, two), ring)
    moved = np.where(took < one, twice, once)
    carried = moved / (rate * stack.kernel("allreduce").memory)
    return Op(name, kernel="allreduce", bytes={"link": moved}, fixed=took - carried)
