"""Tokens on their way to experts of other data-parallel ranks, and back.

The rank with most tokens sends as many copies as it would take in if all ranks had as many: within
a node its port is busy as long, whether others have tokens or not.
"""

import numpy as np

from kvsim.engine.formats import HALF
from kvsim.graph import Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.machines.parallel import NETWORK


def exchange(
    deployment: Deployment, name: str, tokens: Number, ranks: Number | None = None
) -> list[Op]:
    """Hidden states between data-parallel ranks and the GPUs that have a token's experts.

    A GPU takes in each routed copy for its experts, and no token more than once: where every GPU
    has a part of every expert that is an all-gather. Between nodes a token goes once to each, over
    all of a node's ports, and NVLink spreads it there. The way back is as long.

    Parameters
    ----------
    tokens : of the rank with most.
    ranks : tokens of all ranks over those (None: all ranks have as many).
    """
    d = deployment
    if d.dp == 1:
        return []
    sums, link = d.stack.sums, d.hardware.links["link"]
    states = HALF * d.model.hidden * tokens * d.dp  # of all ranks, if all have as many
    copies = min(1.0, d.model.experts_active * d.routed_share)
    moved = states * copies * (d.dp - 1) / d.dp
    share = sums.ring_share if sums.direct_share else 1.0
    wait = link.latency + sums.direct + moved / link.bandwidth * (1 / share - 1)
    nodes = -(-d.parallelism.stage // d.domain)
    if nodes > 1:
        busy = 1.0 if ranks is None else np.minimum(1.0, ranks * nodes / d.dp)
        entering = busy * states * (nodes - 1) / nodes / d.domain
        wait = wait + NETWORK.latency + entering / NETWORK.bandwidth
    return [Op(name, kernel="allreduce", bytes={"link": moved}, fixed=wait)]
