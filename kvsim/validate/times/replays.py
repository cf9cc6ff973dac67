"""Rounds that were replayed as CUDA graphs, and what is predicted of those very rounds.

A graph reads the room that its cache has, not the tokens that are in it; and a short run has some
rounds and not others, as those in which a block of keys is packed. So a prediction for such rounds
is that of the work they dispatch, in place of the mean over a generation.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import steady_seconds
from kvsim.frozen import frozen
from kvsim.graph import Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.prediction.memory import decode_point
from kvsim.techniques.technique import Technique
from kvsim.validate.counts.check import RandomPrompts
from kvsim.validate.run import Generation


@frozen
class Replay:
    """What one replayed round does."""

    decoded: int  # tokens before it, as far as attention reads [tokens]
    op_shares: Mapping[str, float]  # how much of an op it does; 1 for those that are not named

    @classmethod
    def of(cls, run: Generation) -> "Replay":
        """The round that a generation does next."""
        impl = run.impl
        decoded = run.generate if impl.reads_all_slots else run.done[0]
        return cls(decoded - 1, impl.op_shares(run.cached))


def replayed_seconds(
    deployment: Deployment, technique: Technique, work: RandomPrompts, replays: Sequence[Replay]
) -> float:
    """Time per token of these rounds, each of which gives one. [s]"""
    return fmean(_seconds(deployment.replayed, technique, work, one) for one in replays)


def _seconds(d: Deployment, technique: Technique, work: RandomPrompts, replay: Replay) -> float:
    def duration(op: Op, deployment: Deployment) -> Number:
        return seconds(op, deployment) * replay.op_shares.get(op.name, 1.0)

    point = decode_point(work.batch, work.prompt, work.generate, float(replay.decoded))
    (step,) = technique.cycle(d, point).steps
    return float(np.ravel(steady_seconds(step, d, duration))[0])
