"""Which replica a request goes to."""

from kvsim.serving.core import jit_function
from kvsim.serving.queues import hand_over, queue
from kvsim.serving.records import NONE, Request, World
from kvsim.serving.schedule import has_work
from kvsim.serving.tiers import found_blocks

ROUTES = ("round-robin", "least-loaded", "prefix-aware", "cache-and-load")
ROUND_ROBIN, LEAST_LOADED, PREFIX_AWARE, CACHE_AND_LOAD = range(len(ROUTES))


@jit_function
def best(world: World, request: Request, route: int) -> int:
    """The replica that a request goes to, the one with the fewest unfinished of equals."""
    chosen, least, least_load = 0, 0, 0
    for index in range(world.replicas.size):
        replica = world.replicas[index]
        if not has_work(replica):
            replica.clock = max(replica.clock, request.arrival)
        load = replica.running + replica.waiting + replica.swapped
        if replica.clock > request.arrival:  # what its pass will complete is not complete yet
            load += replica.just_done
        score = 0
        if route != LEAST_LOADED and request.blocks > 0:
            score = -found_blocks(world, replica, request)
        if route == CACHE_AND_LOAD:
            score = replica.unread + score * world.limits.prefix_tokens
        if index == 0 or score < least or (score == least and load < least_load):
            chosen, least, least_load = index, score, load
    return chosen


@jit_function
def receive(world: World, route: int, index: int) -> None:
    """A request arrives at its replica, or at the one that suits it best."""
    request = world.requests[index]
    if request.replica == NONE:
        request.replica = best(world, request, route)
    replica = world.replicas[request.replica]
    replica.clock = max(replica.clock, request.arrival)
    if request.handed:
        hand_over(world, replica, index)
    else:
        queue(world, replica, index)
