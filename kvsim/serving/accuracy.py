"""How far the tables are from direct evaluation of the engine."""

from collections.abc import Callable, Mapping

import numpy as np

from kvsim.graph import Array
from kvsim.serving import spend
from kvsim.serving.passes import Passes
from kvsim.serving.tables import COSTS, Tables

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

    def rounds(t: Tables) -> Array:
        pairs = zip(batch, context, strict=True)
        return np.array([spend.round_s(t, int(b), c) for b, c in pairs])

    def prompts(t: Tables) -> Array:
        return np.array([_pass_s(t, 0, 0.0, n, s) for n, s in zip(new, start, strict=True)])

    def mixed(t: Tables) -> Array:
        points = zip(batch, context, new, start, strict=True)
        return np.array([_pass_s(t, int(b), c, n, s) for b, c, n, s in points])

    found: dict[str, tuple[Callable[[Tables], Array], Array]] = {
        "rounds": (rounds, passes.round(batch, context)),
        "prompts": (prompts, passes.prompt(new, start)),
    }
    if passes.mixes_plainly:
        found["mixed"] = (mixed, passes.mixed(batch, context, new, start))
    return found


def _pass_s(tables: Tables, batch: int, context: float, new: float, start: float) -> float:
    """A pass over decoding sequences and one prompt's last part, as the simulator costs it. [s]"""
    total = np.zeros(len(COSTS))
    spend.add_pass(tables, total, spend.Decoding(batch, context, 0.0), spend.Prompts(int(new), 1))
    spend.add_chunk(tables, total, new, start)
    return float(total[0])


def worst(found: Samples, tables: Tables) -> dict[str, float]:
    """Largest relative error of each kind."""
    return {
        kind: float(np.max(np.abs(read(tables) / direct - 1)))
        for kind, (read, direct) in found.items()
    }


def _log_uniform(random: np.random.Generator, most: float) -> Array:
    """Whole numbers from 1 to ``most``, as many in every octave."""
    return np.floor(np.exp(random.uniform(0, np.log(most + 1), SAMPLES)))
