"""Fleets that were proved by simulation, and what a search found."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.fleet.arrays import Counts, Offers
from kvsim.planner.fleet.play import Played


@frozen
class Proven:
    """A fleet that meets the targets in simulation.

    Attributes
    ----------
    running, share
        Replicas by window and kind (w, j), and what they serve (w, c, j).
    cost
        Mean price. [USD/h]
    """

    running: Counts
    reserved: Counts
    share: Array
    cost: float
    played: Played

    @property
    def replicas(self) -> Counts:
        """The most that run at once. (j,)"""
        return np.asarray(self.running.max(axis=0))


@frozen
class Found:
    """The answer of a search.

    Attributes
    ----------
    fleet
        The cheapest fleet that was proven.
    bound
        What parts of replicas would cost. [USD/h]
    proposals, simulations
        How many fleets the programme proposed, and how many were simulated.
    mixes
        How many mixes of replicas were simulated in one window of a schedule.
    gap
        Cost above the programme's own bound, relative.
    """

    fleet: Proven
    offers: Offers
    bound: float
    proposals: int
    simulations: int
    gap: float
    seconds: float
    mixes: int = 0
