"""First-in, first-out queues of requests, linked through one array."""

from kvsim.serving.compiled import compiled
from kvsim.serving.state import NOBODY, Fleet, Progress

# A queue is three neighbouring counts of a replica: head, tail and length.


@compiled
def push(f: Fleet, p: Progress, r: int, queue: int, request: int) -> None:
    """Join at the end."""
    p.link[request] = NOBODY
    if f.tally[r, queue + 2] == 0:
        f.tally[r, queue] = request
    else:
        p.link[f.tally[r, queue + 1]] = request
    f.tally[r, queue + 1] = request
    f.tally[r, queue + 2] += 1


@compiled
def push_front(f: Fleet, p: Progress, r: int, queue: int, request: int) -> None:
    """Be served next."""
    p.link[request] = f.tally[r, queue] if f.tally[r, queue + 2] > 0 else NOBODY
    if f.tally[r, queue + 2] == 0:
        f.tally[r, queue + 1] = request
    f.tally[r, queue] = request
    f.tally[r, queue + 2] += 1


@compiled
def pop(f: Fleet, p: Progress, r: int, queue: int) -> int:
    """Leave from the front of a queue that is not empty."""
    request = int(f.tally[r, queue])
    f.tally[r, queue] = p.link[request]
    f.tally[r, queue + 2] -= 1
    return request
