"""How far apart two techniques must be for their difference to mean anything."""

from kvsim.evidence.ledger import typical_error
from kvsim.machines.deployment import Deployment
from kvsim.techniques.technique import Technique

PLACES = {"full", "offload", "kvpr", "flexgen", "fastdecode", "place"}
"""Techniques that move the same ops to other places: only full KV's error is between them."""


def between(deployment: Deployment, one: Technique, other: Technique) -> float:
    """Known relative error between two techniques: the larger one's, on rows that no fit saw."""
    names = {"full" if _places(t) else t.name for t in (one, other)}
    return max(typical_error(deployment, name) for name in names)


def _places(technique: Technique) -> bool:
    """Whether a technique, or each of its layers, only moves caches and weights."""
    return technique.exact and {term.name for term in technique.terms} <= PLACES
