"""Queues of a replica's requests, linked through them: by class, then first in, first out."""

import numpy as np

from kvsim.serving.core import jit_function
from kvsim.serving.records import NONE, ROUNDING, SWAPPED, Ends, Replica, Request, World

HEAD = 0  # of a queue's ends; behind it, the last request of each class


@jit_function
def enqueue(world: World, ends: Ends, index: int, front: bool) -> None:
    """Wait behind all others of the same class, or in front of them."""
    request = world.requests[index]
    before = NONE
    for rank in range(request.priority + (not front)):
        if ends[1 + rank] != NONE:
            before = ends[1 + rank]
    request.back = before
    if before == NONE:
        request.link = ends[HEAD]
        ends[HEAD] = index
    else:
        request.link = world.requests[before].link
        world.requests[before].link = index
    if request.link != NONE:
        world.requests[request.link].back = index
    if not front or ends[1 + request.priority] == NONE:
        ends[1 + request.priority] = index


@jit_function
def dequeue(world: World, ends: Ends, index: int) -> None:
    """Leave a queue, from whatever place in it."""
    request = world.requests[index]
    if request.back == NONE:
        ends[HEAD] = request.link
    else:
        world.requests[request.back].link = request.link
    if request.link != NONE:
        world.requests[request.link].back = request.back
    if ends[1 + request.priority] == index:
        ends[1 + request.priority] = NONE
        if request.back != NONE and world.requests[request.back].priority == request.priority:
            ends[1 + request.priority] = request.back


@jit_function
def unread(request: Request) -> int:
    """Tokens that a request which waits has to read, if none are found. [tokens]"""
    return request.prompt + request.made


@jit_function
def queue(world: World, replica: Replica, index: int) -> None:
    """Wait behind all others of the class."""
    replica.unread += unread(world.requests[index])
    enqueue(world, replica.wait_ends, index, False)
    replica.waiting += 1


@jit_function
def queue_front(world: World, replica: Replica, index: int) -> None:
    """Wait in front of all others of the class."""
    replica.unread += unread(world.requests[index])
    enqueue(world, replica.wait_ends, index, True)
    replica.waiting += 1


@jit_function
def unqueue(world: World, replica: Replica, index: int) -> None:
    """Wait no longer to begin."""
    replica.unread -= unread(world.requests[index])
    dequeue(world, replica.wait_ends, index)
    replica.waiting -= 1


@jit_function
def queue_swapped(world: World, replica: Replica, index: int) -> None:
    """Wait in host memory, behind all others of the class there."""
    enqueue(world, replica.swap_ends, index, False)
    replica.swapped += 1


@jit_function
def hand_over(world: World, replica: Replica, index: int) -> None:
    """Wait to decode, with the cache that another replica made."""
    request = world.requests[index]
    request.status = SWAPPED
    request.left = int(np.ceil((request.generate - request.made) / request.rate - ROUNDING))
    queue_swapped(world, replica, index)


@jit_function
def unqueue_swapped(world: World, replica: Replica, index: int) -> None:
    """Wait in host memory no longer."""
    dequeue(world, replica.swap_ends, index)
    replica.swapped -= 1
