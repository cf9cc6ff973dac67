"""Requests of a trace by class and by window of the day."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.planner.classes import classes_of
from kvsim.planner.fleet.arrays import Demand
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.traces.requests import Requests
from kvsim.traces.statistics import leading_hits

MOST_WINDOWS = 24
SHORTEST = 300.0  # of a window [s]
FEWEST = 100  # requests in a window, on average
REUSED = 0.5  # share of a prompt that other requests had before, from which it counts as reused
RARE = 20  # requests; a class of fewer is part of its neighbour
TURN = (5**0.5 - 1) / 2  # multiples of the golden ratio fill an interval most evenly


@frozen
class Traffic:
    """A trace whose requests have a class and a window.

    Attributes
    ----------
    requests
        The trace.
    of, window
        The class and the window of each request. (n,)
    session
        The first turn of each request's session, itself where it is none. (n,)
    prompt, generate, reuse
        Of each class: mean lengths [tokens], and the share of its prompts seen before. (c,)
    demand
        Rates by window and class.
    """

    requests: Requests
    of: NDArray[np.int64]
    window: NDArray[np.int64]
    session: NDArray[np.int64]
    prompt: Array
    generate: Array
    reuse: Array
    demand: Demand

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.prompt)

    def part(self, index: int) -> Requests:
        """The requests of one class, when they arrive."""
        return self.requests.take(np.flatnonzero(self.of == index))

    def of_window(self, index: int) -> "Traffic":
        """The requests of one window, when they arrive; turns without their parents are first."""
        rows = np.flatnonzero(self.window == index)
        requests, mine = self.requests.take(rows), slice(index, index + 1)
        return replace(
            self,
            requests=requests,
            of=self.of[rows],
            window=np.zeros(len(rows), np.int64),
            session=requests.sessions,
            demand=Demand(self.demand.rate[mine], self.demand.hours[mine]),
        )

    def dispatched(self, share: Array) -> NDArray[np.int64]:
        """Which kind of replica each request goes to, so that classes keep their shares.

        Turns of a session go where its first one went.

        Parameters
        ----------
        share : of each class in each window, by kind; they add up to 1. (w, c, j)
        """
        kind = np.zeros(len(self.requests), np.int64)
        for c in range(self.classes):
            rows = np.flatnonzero((self.of == c) & (self.session == np.arange(len(kind))))
            evenly = np.mod((np.arange(len(rows)) + 0.5) * TURN, 1.0)
            upto = np.cumsum(share[self.window[rows], c], axis=1)
            upto[:, -1] = 1.0
            kind[rows] = (evenly[:, None] >= upto).sum(axis=1)
        return kind[self.session]


def traffic_of(
    requests: Requests, windows: int = 0, targets: FleetTargets | None = None
) -> Traffic:
    """Classes by prompt, generated tokens and reuse, and windows of equal length.

    All turns of a session are of the class of the turn with the longest prompt, because they stay
    on one kind of replica.

    Parameters
    ----------
    windows : how many; 0: as many as are long enough and have requests enough.
    targets : prompts whose targets differ are of different classes.
    """
    of, session = classes_of(requests).of, requests.sessions
    if targets is not None and targets.longer:
        parts = len(targets.each) * of + targets.of(requests.prompt)
        of = np.unique(parts, return_inverse=True)[1].astype(np.int64)
    hits = np.minimum(leading_hits(requests) * requests.block_tokens, requests.prompt)
    reused = hits / requests.prompt
    if hits.any():
        of = _merged(2 * of + (reused >= REUSED))
    of = _of_sessions(of, session, requests.prompt)
    count = np.bincount(of)
    duration = requests.duration or SHORTEST  # requests that come at once are no load for long
    if not windows:
        by_time, by_count = int(duration / SHORTEST), len(requests) // FEWEST
        windows = max(min(MOST_WINDOWS, by_time, by_count), 1)
    width = duration / windows
    window = np.minimum((requests.arrival - requests.arrival[0]) / width, windows - 1)
    window = window.astype(np.int64)
    rate = np.zeros((windows, len(count)))
    np.add.at(rate, (window, of), 1 / width)
    return Traffic(
        requests=requests,
        of=of,
        window=window,
        session=session,
        prompt=np.bincount(of, requests.prompt) / count,
        generate=np.bincount(of, requests.generate) / count,
        reuse=np.bincount(of, reused) / count,
        demand=Demand(rate, np.full(windows, width / 3600)),
    )


def _merged(of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Classes numbered 0, 1, ...; the rare ones join their twin that differs in reuse alone."""
    count = np.bincount(of)
    rare = (count < RARE) & (np.arange(len(count)) >= 0)
    of = np.where(rare[of] & (of % 2 == 1), of - 1, of)
    return np.unique(of, return_inverse=True)[1].astype(np.int64)


def _of_sessions(
    of: NDArray[np.int64], session: NDArray[np.int64], prompt: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The class of the longest prompt of each request's session."""
    by_length = np.argsort(prompt, kind="stable")
    longest = np.zeros(len(of), np.int64)
    longest[session[by_length]] = by_length  # the last one written stays
    return np.unique(of[longest[session]], return_inverse=True)[1].astype(np.int64)
