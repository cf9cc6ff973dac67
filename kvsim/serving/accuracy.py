"""How far the tables are from direct evaluation of the engine."""

from collections.abc import Callable, Mapping

import numpy as np

from kvsim.graph import Array, Number
from kvsim.serving import spend
from kvsim.serving.passes import Passes
from kvsim.serving.tables import Tables

Samples = Mapping[str, tuple[Callable[[Tables], Array], Array]]
"""By kind of pass: what tables say of random points, and what direct evaluation says. [s]"""

SAMPLES = 200  # points of each kind


def samples(passes: Passes, max_seqs: int, longest: int, longest_chunk: int) -> Samples:
    """Random passes of each kind; those of both kinds where their ops can be stated."""
    random = np.random.default_rng(0)
    batch = random.integers(1, max_seqs, SAMPLES, endpoint=True).astype(float)
    context = _log_uniform(random, longest)
    new = _log_uniform(random, longest_chunk)
    start = np.minimum(_log_uniform(random, longest) - 1, longest - new)
    one: Mapping[str, Number] = {"tokens": new, "start": start, "finished": 1}

    def rounds(tables: Tables) -> Array:
        return spend.pass_seconds(tables, batch=batch, context=context)

    def prompts(tables: Tables) -> Array:
        return spend.pass_seconds(tables, **one)

    def mixed(tables: Tables) -> Array:
        return spend.pass_seconds(tables, batch=batch, context=context, **one)

    found: dict[str, tuple[Callable[[Tables], Array], Array]] = {
        "rounds": (rounds, passes.round(batch, context)),
        "prompts": (prompts, passes.prompt(new, start)),
    }
    if passes.mixes_plainly:
        found["mixed"] = (mixed, passes.mixed(batch, context, new, start))
    return found


def worst(found: Samples, tables: Tables) -> dict[str, float]:
    """Largest relative error of each kind."""
    return {
        kind: float(np.max(np.abs(read(tables) / direct - 1)))
        for kind, (read, direct) in found.items()
    }


def _log_uniform(random: np.random.Generator, most: float) -> Array:
    """Whole numbers from 1 to ``most``, as many in every octave."""
    return np.floor(np.exp(random.uniform(0, np.log(most + 1), SAMPLES)))
