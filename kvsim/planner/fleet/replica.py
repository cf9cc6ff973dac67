"""What serving a trace costs a replica, class by class, as straight lines in the rate.

Requests stand in classes, alike in prompt and generated tokens. A replica goes round: in each lap
every lane (a technique with the classes of requests it serves) makes one decoding round, and the
prompts that arrived are read. A lap of L seconds carries phi times the trace's rates if

    decoding     a class of d tokens/s keeps phi L d / (tokens per round) sequences in the batch
    time         sum over lanes of the fixed time of a round
                 + phi L (sum over classes of prompts' and sequences' seconds per second) <= L
    memory       sequences x bytes of one <= capacity, on the GPU and on the host
    seats        sequences <= max_seqs
    TPOT         L / (tokens per round) <= target
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.planner.question import Admission, PlanLimits, does_nothing, needed_option
from kvsim.serving.costs import StepCosts, simple_pass_seconds
from kvsim.serving.rules import Rules
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

# classes of requests

CLASSES_PER_AXIS = 3  # classes by prompt, and of each of those by generated tokens


@frozen
class Classes:
    """Mean lengths and rates of the classes of a trace.

    Attributes
    ----------
    prompt, generate
        Mean lengths. (c,) [tokens]
    per_s
        Requests per second over the whole trace. (c,) [1/s]
    of
        The class of each request. (n,)
    """

    prompt: Array
    generate: Array
    per_s: Array
    of: NDArray[np.int64]

    @property
    def decoded_per_s(self) -> Array:
        """Tokens per second after the first of each request. (c,) [tokens/s]"""
        return self.per_s * (self.generate - 1)


def group_requests(requests: Requests, per_axis: int = CLASSES_PER_AXIS) -> Classes:
    """Prompts in parts of equally many tokens, and each part again by generated tokens.

    The rates are those of the trace's duration; requests that all arrive at once count as
    arriving within one second.
    """
    prompts = _token_parts(requests.prompt, per_axis)
    of = np.zeros(len(requests), np.int64)
    for part in range(per_axis):
        rows = np.flatnonzero(prompts == part)
        of[rows] = part * per_axis + _token_parts(requests.generate[rows], per_axis)
    _, of = np.unique(of, return_inverse=True)
    count = np.bincount(of)
    duration = requests.duration or 1.0
    return Classes(
        prompt=np.bincount(of, requests.prompt) / count,
        generate=np.bincount(of, requests.generate) / count,
        per_s=count / duration,
        of=of.astype(np.int64),
    )


def _token_parts(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Parts 0, 1, ... of equally many tokens, the shortest first; equal lengths stay together."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    first = np.searchsorted(ordered, lengths, side="left")
    before = np.where(first > 0, share[first - 1], 0.0)
    return np.minimum((before * count).astype(np.int64), count - 1)


# settings


def list_step_costs(
    deployment: Deployment,
    requests: Requests,
    limits: PlanLimits,
    rules: Rules,
    admission: Admission,
) -> list[StepCosts]:
    """Step costs of all settings that the user admits and that leave room for a cache.

    Raises
    ------
    InputError
        If weights leave none.
    InfeasibleError
        If no technique is admitted.
    """
    found: list[StepCosts] = []
    reason: InputError | None = None
    wanted: set[str] = set()
    admission.check(deployment)
    for t in admission.candidates():
        for settings, option in _list_options(t, deployment, requests, limits, admission):
            if option:
                wanted.add(option.partition(" ")[0])
                continue
            costs = StepCosts.for_requests(settings, deployment, rules, requests, limits.gpu_memory)
            try:
                assert costs.capacity > 0
            except InputError as error:
                reason = error
                continue
            found.append(costs)
    if not found and reason is not None:
        raise reason
    if not found:
        others = f"; {' or '.join(sorted(wanted))} admits others" if wanted else ""
        raise InfeasibleError(f"none of the admitted techniques can run here{others}")
    return found


def _list_options(
    technique: Technique,
    deployment: Deployment,
    requests: Requests,
    limits: PlanLimits,
    admission: Admission,
) -> Iterator[tuple[Technique, str]]:
    """Settings of a technique that do something there, each with the option that it lacks."""
    if technique.refuses(deployment):
        return
    mean = round(float(requests.prompt.mean())), max(round(float(requests.generate.mean())), 2)
    longest = int((requests.prompt + requests.generate).max())
    for some in admission.settings(technique, deployment, *mean, differ=True):
        for settings in some.rows():
            if does_nothing(settings) and ("gamma" in settings.settings or not admission.only):
                continue
            known = admission.evidence(settings, deployment, longest)
            if admission.loss(known) > limits.loss:
                yield settings, needed_option(known)
            elif settings.assumes and limits.assumed < 1:
                yield settings, "--acceptance"
            else:
                yield settings, ""


def find_unadmitted(
    deployments: Iterable[Deployment], requests: Requests, limits: PlanLimits, admission: Admission
) -> dict[str, str]:
    """Find techniques that were asked for by name and that other options keep out.

    Returns
    -------
    dict
        For each of them an option that would admit one of its settings.
    """
    found: dict[str, str] = {}
    each = list(deployments)
    for t in admission.candidates() if admission.only else ():
        lacking = [y for d in each for _, y in _list_options(t, d, requests, limits, admission)]
        if lacking and all(lacking):
            found[t.name] = min(lacking)
    return found


# what a setting costs each class

NODES_PER_OCTAVE = 2  # nodes per octave of the estimate's step costs


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


def load_coefficients(options: list[StepCosts], classes: Classes) -> Loads:
    """Coefficients from the engine's own step costs, straight lines in the batch.

    The line of a round goes through a batch of one and the largest that memory and rules allow.
    """
    timed = (costs.with_density(NODES_PER_OCTAVE, work=False) for costs in options)
    columns = [_option_load(costs, classes) for costs in timed]
    names = vars(columns[0])
    return Loads(**{k: np.stack([getattr(x, k) for x in columns], axis=-1) for k in names})


def _option_load(costs: StepCosts, classes: Classes) -> Loads:
    t = costs.tables
    middle = classes.prompt + classes.generate / 2
    blocks = np.ceil(middle / costs.rules.block_tokens).astype(np.int64)
    blocks = np.minimum(blocks, len(t.gpu_bytes) - 1)  # longer requests are refused
    gpu, host = t.gpu_bytes[blocks].astype(float), t.host_bytes[blocks].astype(float)
    weight = classes.decoded_per_s / max(classes.decoded_per_s.sum(), 1e-300)
    fit = min(
        costs.capacity / max(float(weight @ gpu), 1.0),
        costs.room.host_capacity / max(float(weight @ host), 1.0),
    )
    most = int(np.clip(fit, 2, max(costs.rules.max_seqs, 2)))
    few, many = 1, min(most, t.costs.round.shape[0] - 1)
    at_few = simple_pass_seconds(t, batch=few, context=middle)
    at_many = simple_pass_seconds(t, batch=many, context=middle)
    each = np.maximum(at_many - at_few, 0.0) / max(many - few, 1)
    fixed = max(float(weight @ (at_few - each)), 0.0)
    ttft = _prompt_seconds(costs, classes.prompt)
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
    )


def _prompt_seconds(costs: StepCosts, prompts: Array) -> Array:
    """Each of some prompts alone, in the parts that the rules make of it. (n,) [s]"""
    chunked = costs.rules.prefill == "chunked"
    part = costs.rules.max_tokens // costs.tables.lanes
    size = float(part) if chunked else max(float(prompts.max()), 1.0)
    parts = np.maximum(np.ceil(prompts / size), 1).astype(np.int64)
    of = np.repeat(np.arange(prompts.size), parts)
    place = np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)
    last = place == parts[of] - 1
    start = place * size
    took = simple_pass_seconds(
        costs.tables,
        tokens=np.round(np.minimum(size, prompts[of] - start)),
        start=start,
        finished=last,
        after=np.where(last, prompts[of], 0.0),
    )
    return np.bincount(of, weights=took, minlength=prompts.size).astype(float)
