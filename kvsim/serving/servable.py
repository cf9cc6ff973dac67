"""Whether a request can be served, decided here for every command, and why not.

An engine takes a request if its prompt and answer are within the context that it was started with,
which is the model's unless ``--max-model-len`` says otherwise, and if the cache of an idle replica
holds all of it. What else limits a replica, such as sequences and tokens of a pass, makes requests
wait but refuses none.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.models.model import Model
from kvsim.serving.kv_budget import ReplicaMemory
from kvsim.serving.records import Records, Request
from kvsim.serving.rules import Rules
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests

REFUSAL_REASONS = ("context", "cache")
"""Why a request is refused: longer than the context, or larger than the KV cache."""


class Longest(NamedTuple):
    """Length of the longest request that a replica accepts, by limiting reason.

    Attributes
    ----------
    context
        Most prompt and generated tokens by the engine's context length. [tokens]
    cached
        Most tokens that the KV cache of an idle replica holds. [tokens]
    """

    context: int
    cached: int


def longest_request(costs: ReplicaMemory, memory: tuple[int, int] | None = None) -> Longest:
    """Find the longest request that a replica accepts.

    Parameters
    ----------
    costs : cost model of the replica.
    memory : GPU and host memory for caches, if not all that the replica has. [B]

    Returns
    -------
    Longest
        The limit by each reason. [tokens]
    """
    room, rules = costs.room, costs.rules
    gpu, host = memory or (room.capacity, costs.host_capacity)
    held = (room.prompt_bytes <= gpu) & (room.host_bytes <= host)
    blocks = np.count_nonzero(held) - 1  # more blocks never need less
    return Longest(costs.context, int(blocks) * rules.block_tokens)


def find_refusals(most: Longest, requests: Requests | Records[Request]) -> NDArray[np.int8]:
    """Determine which requests are refused, and why.

    Parameters
    ----------
    most : the longest request that a replica accepts.
    requests : the requests.

    Returns
    -------
    array
        For each request 0 if it is accepted, otherwise 1 plus an index into ``REFUSAL_REASONS``.
        (n,)
    """
    length = requests.prompt + requests.generate
    # the last token is delivered and never cached
    return np.where(length > most.context, 1, np.where(length - 1 > most.cached, 2, 0)).astype(
        np.int8
    )


def count_refusals(found: NDArray[np.int8]) -> dict[str, int]:
    """Count refused requests by reason.

    Parameters
    ----------
    found : codes that :func:`find_refusals` returns. (n,)
    """
    return {name: int((found == 1 + i).sum()) for i, name in enumerate(REFUSAL_REASONS)}


def describe_refusals(counts: Mapping[str, int], model: str, context: int) -> str:
    """Describe how many requests are refused, and why.

    Parameters
    ----------
    counts : rejected requests by reason.
    model : name of the model.
    context : length of the longest request that the engine accepts. [tokens]

    Returns
    -------
    str
        A clause; empty if none is rejected.
    """
    said = {
        "context": f"longer than the {context:,} tokens that {model} accepts",
        "cache": "larger than the KV cache",
    }
    return "; ".join(
        f"{n:,} request{'s' * (n > 1)} refused: {said[why]}" for why, n in counts.items() if n
    )


MANY_LEFT_OUT = 0.1  # share of requests from which those left out deserve a sentence


def describe_left_out(count: int, total: int, model: Model, most: int = 0) -> tuple[str, str]:
    """Describe how many requests are omitted because they exceed the context.

    Parameters
    ----------
    count : omitted requests, including later turns of their conversations.
    total : all requests, with those.
    model : the model.
    most : context that engines are started with; 0 for the model's. [tokens]

    Returns
    -------
    tuple of str
        A clause to follow the description of the requests, and a sentence; one of them is empty,
        both if none is omitted.
    """
    if not count:
        return "", ""
    accepted = f"longer than the {most or model.max_context:,} tokens that {model.name} accepts"
    if count <= MANY_LEFT_OUT * total:
        return f", {count:,} of {total:,} left out ({accepted})", ""
    told = f"{count:,} of {total:,} requests are {accepted} and are left out"
    return "", f"{told}, so the plan covers the rest only."


def why_refused(
    technique: Technique, deployment: Deployment, prompt: int, generate: int
) -> str | None:
    """Return why an idle server with usual settings refuses one request.

    Parameters
    ----------
    technique : the technique.
    deployment : model, machine and software.
    prompt : length of the prompt. [tokens]
    generate : tokens generated. [tokens]

    Returns
    -------
    str or None
        One of ``REFUSAL_REASONS``; None if it is served.
    """

    def find() -> str | None:
        one = Requests(np.zeros(1), np.array([prompt]), np.array([generate]))
        rules = Rules().scale_to(deployment)
        if prompt + generate > deployment.model.max_context:
            return REFUSAL_REASONS[0]
        costs = ReplicaMemory.for_requests(technique, deployment, rules, one)
        try:
            reason = int(find_refusals(longest_request(costs), one)[0])
        except InputError:  # weights leave no cache
            return REFUSAL_REASONS[1]
        return REFUSAL_REASONS[reason - 1] if reason else None

    return technique.cached(deployment, ("refused", prompt, generate), find)


def within_context(requests: Requests, model: Model, most: int = 0) -> tuple[Requests, int]:
    """Omit requests that exceed the context, and later turns of their conversations.

    Parameters
    ----------
    requests : the requests.
    model : the model.
    most : context that engines are started with; 0 for the model's. [tokens]

    Returns
    -------
    tuple
        The remaining requests, and the number of omitted ones.

    Raises
    ------
    InfeasibleError
        If no request remains.
    """
    context = most or model.max_context
    kept = requests.prompt + requests.generate <= context
    if requests.parent is not None:
        for row in np.flatnonzero(requests.parent >= 0).tolist():  # turns come after their parents
            kept[row] &= kept[requests.parent[row]]
    left_out = int((~kept).sum())
    if left_out == len(requests):
        shortest = int((requests.prompt + requests.generate).min())
        which = "it has" if left_out == 1 else f"the shortest of {left_out:,} has"
        raise InfeasibleError(
            f"no request can be served: {which} {shortest:,} tokens, more than the {context:,} "
            f"that {model.name} accepts; give shorter requests, choose a model with a longer "
            "context, or give the --max-model-len that engines are started with"
        )
    return (requests.take(np.flatnonzero(kept)) if left_out else requests), left_out
