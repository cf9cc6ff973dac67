"""What each setting of a technique costs each class of a trace's requests."""

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.classes import Classes
from kvsim.serving import spend
from kvsim.serving.costs import StepCosts

DENSITY = 2  # nodes per octave of the estimate's step costs


@frozen
class Loads:
    """What each option (o,) costs each class (c,) at the trace's rates.

    Attributes
    ----------
    fixed
        The fixed time of a round: weights, launches. (o,) [s]
    work
        Seconds per second: prompts, and sequences in rounds. (c, o)
    seats, gpu, host
        Sequences, and bytes of caches, that a lap of one second needs. (c, o) [1/s, B/s, B/s]
    room, host_room
        Memory for caches. (o,) [B]
    tokens
        Tokens per round and sequence. (o,)
    longest
        Cache of the longest request. (o,) [B]
    late
        Share of all requests whose prompt takes longer than the TTFT target even alone. (c, o)
    """

    fixed: Array
    work: Array
    seats: Array
    gpu: Array
    host: Array
    room: Array
    host_room: Array
    tokens: Array
    longest: Array
    late: Array

    def only(self, options: list[int]) -> "Loads":
        """The same with some of the options."""
        return Loads(**{name: values[..., options] for name, values in vars(self).items()})


def loads_of(options: list[StepCosts], classes: Classes, ttft: float = np.inf) -> Loads:
    """Coefficients from the engine's own step costs, straight lines in the batch.

    The line of a round goes through a batch of one and the largest that memory and rules allow.

    Parameters
    ----------
    ttft : the target. [s]
    """
    lengths = np.unique(classes.prompts)
    timed = (costs.with_density(DENSITY, work=False) for costs in options)
    columns = [_load(costs, classes, lengths, ttft) for costs in timed]
    names = vars(columns[0])
    return Loads(**{k: np.stack([getattr(x, k) for x in columns], axis=-1) for k in names})


def _load(costs: StepCosts, classes: Classes, lengths: NDArray[np.int64], target: float) -> Loads:
    t = costs.tables
    middle = classes.prompt + classes.generate / 2
    blocks = np.ceil(middle / costs.rules.block_tokens).astype(np.int64)
    gpu, host = t.gpu_bytes[blocks].astype(float), t.host_bytes[blocks].astype(float)
    weight = classes.decoded_per_s / max(classes.decoded_per_s.sum(), 1e-300)
    fit = min(costs.capacity / max(float(weight @ gpu), 1.0),
              costs.room.host_capacity / max(float(weight @ host), 1.0))  # fmt: skip
    most = int(np.clip(fit, 2, max(costs.rules.max_seqs, 2)))
    few, many = 1, min(most, t.costs.round.shape[0] - 1)
    at_few = spend.pass_seconds(t, batch=few, context=middle)
    at_many = spend.pass_seconds(t, batch=many, context=middle)
    each = np.maximum(at_many - at_few, 0.0) / max(many - few, 1)
    fixed = max(float(weight @ (at_few - each)), 0.0)
    ttft = _prompts_s(costs, classes.prompt)
    seats = classes.decoded_per_s / costs.rate
    return Loads(
        fixed=np.array(fixed),
        work=classes.per_s * ttft / t.lanes + seats * each,
        seats=seats,
        gpu=seats * gpu,
        host=seats * host,
        room=np.array(float(costs.capacity)),
        host_room=np.array(float(max(costs.room.host_capacity, 1))),
        tokens=np.array(costs.rate),
        longest=np.array(float(max(t.gpu_bytes[-1], t.prompt_bytes[-1]))),
        late=_late(costs, classes, lengths, target),
    )


def _late(costs: StepCosts, classes: Classes, lengths: NDArray[np.int64], target: float) -> Array:
    """Share of all requests that are of a class and whose prompt alone exceeds the target. (c,)

    ``lengths`` are those of the prompts, each once and in order.
    """
    late = lengths[_prompts_s(costs, lengths.astype(float)) > target]
    if not late.size:
        return np.zeros(len(classes))
    exceeds = classes.of[classes.prompts >= late[0]]
    return np.bincount(exceeds, minlength=len(classes)) / classes.of.size


def _prompts_s(costs: StepCosts, prompts: Array) -> Array:
    """Each of some prompts alone, in the parts that the rules make of it. (n,) [s]"""
    chunked = costs.rules.prefill == "chunked"
    part = costs.rules.max_tokens // costs.tables.lanes
    size = float(part) if chunked else max(float(prompts.max()), 1.0)
    parts = np.maximum(np.ceil(prompts / size), 1).astype(np.int64)
    of = np.repeat(np.arange(prompts.size), parts)
    place = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    last = place == parts[of] - 1
    start = place * size
    took = spend.pass_seconds(
        costs.tables, tokens=np.round(np.minimum(size, prompts[of] - start)), start=start,
        finished=last, after=np.where(last, prompts[of], 0.0),
    )  # fmt: skip
    return np.bincount(of, weights=took, minlength=prompts.size).astype(float)
