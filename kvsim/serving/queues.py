"""First-in, first-out queues of a replica's requests, linked through the requests."""

import numpy as np

from kvsim.serving.compiled import compiled
from kvsim.serving.records import NONE, ROUNDING, SWAPPED, Replica, Request, World


@compiled
def unread(request: Request) -> int:
    """Tokens that a request which waits has to read, if none are found. [tokens]"""
    return request.prompt + request.made


@compiled
def queue(world: World, replica: Replica, index: int) -> None:
    """Wait behind all others."""
    replica.unread += unread(world.requests[index])
    world.requests[index].link = NONE
    if replica.waiting == 0:
        replica.wait_head = index
    else:
        world.requests[replica.wait_tail].link = index
    replica.wait_tail = index
    replica.waiting += 1


@compiled
def queue_front(world: World, replica: Replica, index: int) -> None:
    """Wait in front of all others."""
    replica.unread += unread(world.requests[index])
    world.requests[index].link = replica.wait_head if replica.waiting > 0 else NONE
    if replica.waiting == 0:
        replica.wait_tail = index
    replica.wait_head = index
    replica.waiting += 1


@compiled
def unqueue(world: World, replica: Replica) -> int:
    """Take the first one that waits."""
    index = replica.wait_head
    replica.unread -= unread(world.requests[index])
    replica.wait_head = world.requests[index].link
    replica.waiting -= 1
    return index


@compiled
def queue_swapped(world: World, replica: Replica, index: int) -> None:
    """Wait in host memory, behind all others there."""
    world.requests[index].link = NONE
    if replica.swapped == 0:
        replica.swap_head = index
    else:
        world.requests[replica.swap_tail].link = index
    replica.swap_tail = index
    replica.swapped += 1


@compiled
def hand_over(world: World, replica: Replica, index: int) -> None:
    """Wait to decode, with the cache that another replica made."""
    request = world.requests[index]
    request.status = SWAPPED
    request.left = int(np.ceil((request.generate - request.made) / request.rate - ROUNDING))
    queue_swapped(world, replica, index)


@compiled
def unqueue_swapped(world: World, replica: Replica) -> int:
    """Take the first one in host memory."""
    index = replica.swap_head
    replica.swap_head = world.requests[index].link
    replica.swapped -= 1
    return index
