"""Simulation of a request trace on a fleet of equal replicas."""

from collections.abc import Iterator

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.serving.core import fetch, jit_entry, share
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import (
    GAP_BINS,
    GAPS,
    NO_INDEX,
    REFUSED,
    Bin,
    Integers,
    Records,
    Replica,
    Request,
    Told,
    World,
    make,
)
from kvsim.serving.scheduler import (
    CACHE_AND_LOAD,
    LEAST_LOADED,
    MAX_PASSES_PER_CALL,
    ROUND_ROBIN,
    ROUTES,
    check_only_decodes,
    choose_replica,
    has_work,
    next_completion,
    receive,
    step,
)
from kvsim.serving.servable import find_refusals, longest_request
from kvsim.serving.sessions import play_turns, queue_first_turns
from kvsim.serving.tables import Tables
from kvsim.serving.tiers import fetch_blocks
from kvsim.serving.world import ArrivalOrder, Course, make_world
from kvsim.techniques import parse
from kvsim.techniques.acceptance import probability
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import Acceptance, AttentionTrace
from kvsim.traces.requests import Requests

REQUESTS_PER_CALL = 16384  # requests between two looks at what else happens, such as Ctrl-C
FEWEST_PER_CALL, CALLS = 1024, 8  # requests of a call at least, and calls that a trace has then
FETCH_AHEAD = 8  # arrivals between two steps of asking for what a request will need


@frozen
class Run:
    """The final state of every request and replica.

    Attributes
    ----------
    requests : the simulated trace.
    costs : step costs of the technique in the deployment.
    world : final state of the simulation.
    """

    requests: Requests
    costs: StepCosts
    world: World

    @property
    def progress(self) -> Records[Request]:
        """Results of the requests, an array for each field of ``records.Request``. (n,)"""
        return self.world.requests

    @property
    def replicas(self) -> Records[Replica]:
        """State and totals of the replicas, an array for each field of ``records.Replica``. (r,)"""
        return self.world.replicas

    @property
    def bins(self) -> Records[Bin]:
        """Timelines of the replicas, an array for each field of ``records.Bin``. (r, BINS)"""
        return self.world.bins.reshape(-1, GAP_BINS)  # type: ignore[no-any-return]

    @property
    def gaps(self) -> Array:
        """Histogram of the times between tokens. (r, GAPS)"""
        return self.world.gaps.reshape(-1, GAPS)


def usual_route(costs: StepCosts, requests: Requests) -> str:
    """Return how routers that engines ship choose a replica by default.

    The balancer of ``vllm serve --data-parallel-size`` takes the one with the fewest unfinished
    requests [1]_. Where replicas keep prefixes, the defaults of SGLang's gateway and of vLLM's
    router weigh prefix hits against load [2]_, as llm-d does.

    Parameters
    ----------
    costs
        Say whether replicas keep prefixes.
    requests
        Say whether prompts have any in common.

    References
    ----------
    .. [1] ``DPLBAsyncMPClient`` in vllm/v1/engine/core_client.py of vLLM 0.33
    .. [2] https://docs.sglang.io/advanced_features/router.html, ``cache_aware``
    """
    keeps = costs.rules.prefix_caching and requests.block_ids is not None
    return ROUTES[CACHE_AND_LOAD if keeps else LEAST_LOADED]


def simulate(
    requests: Requests,
    costs: StepCosts,
    replicas: int = 1,
    route: str = "",
    rate: Array | None = None,
    until: float = np.inf,
    told: Told = lambda world: None,
) -> Run:
    """Simulate a trace on a number of replicas.

    The goodput of N replicas under targets is
    ``Outcome(simulate(requests, costs, N), Targets(ttft, tpot)).summary()["goodput_per_s"]``,
    and the share of requests within both targets is ``["good_share"]``.

    Parameters
    ----------
    route : how requests are routed: in turn, to the replica with the fewest unfinished requests,
        with most of the prefix, or with the fewest prompt tokens to prefill before the first token;
        of equals to the least loaded. By default as ``usual_route`` returns.
    rate : tokens per decoding round of each request; None for the technique's mean. (n,)
    until : passes that would begin later are not simulated. [s]
    told : called now and then with the state of the simulation.

    Raises
    ------
    InputError
        For an unknown route, no replicas, or rules that the technique cannot keep.
    """
    route = route or usual_route(costs, requests)
    if route not in ROUTES:
        raise InputError(f"--route: got {route[:40]!r}; expected one of {', '.join(ROUTES)}")
    if not 1 <= replicas <= 10**5:
        raise InputError(f"--replicas: got {replicas}; expected 1 to 100,000")
    each = np.full(len(requests), costs.rate) if rate is None else rate
    world = make_world(requests, costs, replicas, each)
    play_world(world, costs, (ROUTES.index(route), until), told)
    return Run(requests, costs, world)


def play_world(world: World, costs: StepCosts, how: tuple[int, float], told: Told) -> None:
    """Simulate until all requests are done.

    Parameters
    ----------
    world : idle replicas and requests that are still to arrive, changed in place.
    costs : step costs of the technique in the deployment.
    how : index of the route in ``ROUTES``, and the time from which on no pass begins. [s]
    told : called now and then with the state of the simulation.
    """
    route, until = how
    course = make(Course, 1, route=route, until=until)[0]
    course.together = route != ROUND_ROBIN or costs.rules.remote_cache > 0
    tables, whole = share(costs.tables), share(world)
    if world.turns.size:
        queue_first_turns(world, course, costs)
        while not play_turns(tables, whole, course):
            told(world)
        return
    due = np.zeros(world.replicas.size)
    for order in (*_orders(world, course, costs), np.zeros(0, np.int64)):
        course.next, course.ending = 0, not order.size
        coming = ArrivalOrder(order, due)
        while not play(tables, whole, course, coming):
            told(world)
        told(world)


def _orders(world: World, course: Course, costs: StepCosts) -> Iterator[Integers]:
    """Yield requests in order of arrival, in pieces; independent replicas are simulated in turn."""
    progress = world.requests
    in_time = progress.arrival < course.until
    refused = find_refusals(longest_request(costs), progress) > 0
    progress.status[refused & in_time] = REFUSED
    coming = np.flatnonzero((progress.status != REFUSED) & in_time)
    if course.route == ROUND_ROBIN:
        progress.replica[coming] = np.arange(coming.size) % world.replicas.size
    piece = min(max(coming.size // CALLS, FEWEST_PER_CALL), REQUESTS_PER_CALL)
    piece *= 1 if course.together else world.replicas.size
    for first in range(0, coming.size, piece):
        order = coming[first : first + piece]
        if not course.together:
            order = order[np.argsort(progress.replica[order], kind="stable")]
        yield order


@jit_entry
def play(tables: Tables, world: World, course: Course, coming: ArrivalOrder) -> bool:
    """Simulate the arrival of requests in a given order, and the passes between arrivals.

    After the last arrival the remaining passes are simulated. The function also returns after many
    passes and is then called again. Replicas that share only a remote store are simulated
    independently while they only decode.

    Parameters
    ----------
    tables : times of passes and memory of sequences.
    world : state of the simulation, changed in place.
    course : how far the run has come.
    coming : requests in the order of their arrival, and when each replica is due. [s]

    Returns
    -------
    bool
        False if it has to be called again.
    """
    order, due = coming.order, coming.due
    while True:
        until, first, last, asked = course.until, 0, world.replicas.size, NO_INDEX
        if course.next < order.size:
            request = world.requests[order[course.next]]
            until, asked = request.arrival, request.replica
            if not course.together:
                first, last = asked, asked + 1
        elif not course.ending:
            return True
        for index in range(first, last):
            if due[index] >= until and index != asked and not course.ending:
                continue
            replica = world.replicas[index]
            enough = replica.passes + MAX_PASSES_PER_CALL
            while replica.clock < until and has_work(replica):
                if replica.passes == enough:
                    return False
                step(tables, world, replica, until)
            due[index] = replica.clock
            if course.route == LEAST_LOADED:
                due[index] = next_completion(tables, world, replica)
            alone = course.together and course.route == ROUND_ROBIN
            if alone and check_only_decodes(world, replica):
                due[index] = np.inf
        if course.next == order.size:
            return True
        if course.route == LEAST_LOADED:  # the others' loads do not change before they are due
            chosen = choose_replica(world, world.requests[order[course.next]], LEAST_LOADED)
            replica = world.replicas[chosen]
            enough = replica.passes + MAX_PASSES_PER_CALL
            while replica.clock < until and has_work(replica):
                if replica.passes == enough:
                    return False
                step(tables, world, replica, until)
            world.requests[order[course.next]].replica = chosen
        receive(world, course.route, order[course.next])
        arrived = world.requests[order[course.next]]
        due[arrived.replica] = 0.0
        course.next += 1
        soon = course.next + 4 * FETCH_AHEAD
        if soon < order.size:
            fetch(world.requests, order[soon])
            for stage in range(3 if world.places.size > 0 else 0):
                soon -= FETCH_AHEAD
                fetch_blocks(world, world.requests[order[soon]], stage)


def find_acceptance(technique: Technique, trace: AttentionTrace) -> Acceptance | None:
    """Return the measured acceptance of a technique's drafts.

    Parameters
    ----------
    technique : the technique.
    trace : measurements by technique.

    Returns
    -------
    Acceptance or None
        None for a technique without drafts.

    Raises
    ------
    InputError
        If the technique drafts tokens and was not measured with these settings.
    """
    if not technique.drafts:
        return None
    for found in trace.acceptance:
        other = parse(found.technique)
        if _drafts(other) == _drafts(technique):
            return found
    known = ", ".join(found.technique for found in trace.acceptance) or "none"
    raise InputError(f"--acceptance: {technique} was not measured; the file has {known}")


def with_acceptance(technique: Technique, measured: Acceptance | None) -> Technique:
    """Return a technique whose acceptance is the measured mean.

    Parameters
    ----------
    technique : the technique.
    measured : measured acceptance; None leaves the technique unchanged.

    Raises
    ------
    InputError
        If the settings state another acceptance, or this number of drafts was not measured.
    """
    if measured is None:
        return technique
    gamma = technique.drafts
    if not isinstance(technique.settings["acceptance"], str):
        raise InputError(
            f"--acceptance: {technique.name} sets "
            f"acceptance={technique.settings['acceptance']}; omit one"
        )
    return technique.with_rounds(acceptance=(measured.tokens(gamma) - 1) / gamma)


def _drafts(technique: Technique) -> str:
    """Return the technique with one draft per round and an acceptance rate of 1."""
    return str(technique.with_rounds(drafts=1, acceptance=1.0))


def draw_rates(
    costs: StepCosts, generate: Integers, seed: int, measured: Acceptance | None = None
) -> Array:
    """Draw the mean tokens per decoding round of each request, round by round.

    Without a measurement, a round accepts drafts up to the first that fails, and each fails
    independently with the one probability at which rounds yield the technique's mean. Techniques
    without drafts yield one token per round.

    Parameters
    ----------
    costs : step costs of the technique in the deployment.
    generate : tokens that each request generates. (n,) [tokens]
    seed : seed of the random numbers.
    measured : acceptance by position, where it was measured.

    Returns
    -------
    array
        Tokens per round of each request. (n,) [tokens]
    """
    gamma = costs.technique.drafts
    if gamma == 0:
        return np.ones(generate.size)
    random = np.random.default_rng(seed)
    accept = 0.0 if measured else probability((costs.rate - 1) / gamma, gamma)

    def draw(count: int) -> Integers:
        """Tokens of so many rounds."""
        if measured:
            return measured.draw(random, gamma, count)
        fails = random.geometric(max(1 - accept, 1e-12), count)  # trials to the first
        return np.asarray(np.minimum(fails - 1, gamma) + 1)

    rounds, left = np.zeros(generate.size), np.asarray(generate - 1)
    going = np.flatnonzero(left > 0)
    while going.size:
        rounds[going] += 1
        left[going] -= draw(going.size)
        going = going[left[going] > 0]
    more = generate - 1
    return np.divide(more, rounds, out=np.ones(generate.size), where=rounds > 0)
