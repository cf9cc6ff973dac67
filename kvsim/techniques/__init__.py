"""Techniques as compositions of selection, storage, placement and drafting; see ``notation``.

One file per paper; :data:`TECHNIQUES` holds them by name. May import the engine and what lies
below it.
"""

from kvsim.techniques.notation import TechniqueMapping, parse, parse_several, register_technique
from kvsim.techniques.technique import Technique, compose

TECHNIQUES = TechniqueMapping()


def candidates(acceptance: float | None = None) -> list[Technique]:
    """Return every technique with its defaults.

    Parameters
    ----------
    acceptance : measured, accepted over drafted tokens, for those that draft.
    """
    found = [parse(name) for name in TECHNIQUES]
    if acceptance is None:
        return found
    return [t.with_rounds(acceptance=acceptance) if t.drafts else t for t in found]


__all__ = [
    "TECHNIQUES",
    "Technique",
    "candidates",
    "compose",
    "parse",
    "parse_several",
    "register_technique",
]
