"""What a fleet is asked to serve: targets, and the requests of a trace by class and window.

Requests are grouped into classes by prompt length, generated tokens and prefix reuse, and the day
is cut into windows of equal length. All that the programme reads of a trace are the rates of the
classes in the windows; the simulation plays the requests themselves.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.traces.requests import Requests
from kvsim.traces.resample import draw_day, scale_clients
from kvsim.traces.statistics import leading_hits

# targets


@frozen
class ClassTarget:
    """Targets of prompts above a length, in place of those of all requests.

    Attributes
    ----------
    above
        Prompts of more tokens, up to the next class. [tokens]
    ttft, tpot
        Longest time to first token and per token; infinite where the user set nothing. [s]
    """

    above: int
    ttft: float = np.inf
    tpot: float = np.inf


@frozen
class FleetTargets:
    """What a share of all requests must meet, and of each class of prompts.

    Attributes
    ----------
    ttft, tpot
        Longest time to first token and per token; infinite where the user set nothing. [s]
    share
        Of the requests of each class, for each of the two alone.
    longer
        Classes of longer prompts with targets of their own, the shortest first.
    """

    ttft: float = np.inf
    tpot: float = np.inf
    share: float = 0.9
    longer: tuple[ClassTarget, ...] = ()

    @property
    def classes(self) -> tuple[ClassTarget, ...]:
        """Every class, that of the shortest prompts first."""
        return (ClassTarget(0, self.ttft, self.tpot), *self.longer)

    @property
    def uniform(self) -> "FleetTargets":
        """The longest of each target, for all requests alike."""
        return FleetTargets(
            max(x.ttft for x in self.classes), max(x.tpot for x in self.classes), self.share
        )

    def classify(self, prompt: NDArray[np.int64]) -> NDArray[np.int64]:
        """The class of each prompt length, as ``each`` counts them. (n,)"""
        bounds = np.array([x.above for x in self.longer], np.int64)
        return np.searchsorted(bounds, prompt, side="left")

    def list_limits(self, prompt: NDArray[np.int64]) -> tuple[Array, Array]:
        """TTFT and TPOT that each request must be within. (n,) [s]"""
        mine = self.classify(prompt)
        ttft = np.array([x.ttft for x in self.classes])
        tpot = np.array([x.tpot for x in self.classes])
        return ttft[mine], tpot[mine]

    def times(self, name: str, factor: float) -> "FleetTargets":
        """The same with TTFT or TPOT so many times as long in each class."""
        own, *longer = (replace(x, **{name: factor * getattr(x, name)}) for x in self.classes)
        return replace(self, ttft=own.ttft, tpot=own.tpot, longer=tuple(longer))


def as_time(seconds: float) -> str:
    """A target or what is reached of it, in the unit that fits."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


# traces

Counts = NDArray[np.int64]
MAX_WINDOWS = 24
MIN_WINDOW_SECONDS = 300.0  # of a window [s]
MIN_WINDOW_REQUESTS = 100  # requests in a window, on average
# Share of a prompt that other requests had before, from which it counts as reused.
REUSED_SHARE = 0.5
RARE_CLASS = 20  # requests; a class of fewer is part of its neighbour
CLASSES_PER_AXIS = 3  # classes by prompt, and of each of those by generated tokens
BLOCKS_OF_REQUEST = 12  # prefix blocks that take as long to play as a request without any
GOLDEN_RATIO = (5**0.5 - 1) / 2  # multiples of the golden ratio fill an interval most evenly


def count_work(requests: Requests) -> int:
    """Count the requests without prefix blocks that take as long to play.

    Parameters
    ----------
    requests
        The requests.
    """
    ids = requests.block_ids
    return max(len(requests), 0 if ids is None else len(ids) // BLOCKS_OF_REQUEST)


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
    hours
        How long each window lasts. (w,) [h]
    """

    requests: Requests
    of: NDArray[np.int64]
    window: NDArray[np.int64]
    session: NDArray[np.int64]
    prompt: Array
    generate: Array
    reuse: Array
    hours: Array

    @cached_property
    def rate(self) -> Array:
        """Requests per second by window and class. (w, c) [1/s]"""
        shape = len(self.hours), self.classes
        place = np.ravel_multi_index((self.window, self.of), shape)
        count = np.bincount(place, minlength=shape[0] * shape[1]).reshape(shape)
        return np.asarray(count / (3600 * self.hours[:, None]))

    @cached_property
    def mean(self) -> Array:
        """Requests per second by class, over all windows. (c,) [1/s]"""
        return np.asarray(self.hours @ self.rate / self.hours.sum())

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.prompt)

    @property
    def work(self) -> int:
        """Requests without prefix blocks that take as long to play."""
        return count_work(self.requests)

    def varied(self, load: float = 1.0, day: int = 0) -> "Traffic":
        """The same traffic of more or fewer clients, on another day.

        Parameters
        ----------
        load
            Clients, in times of the trace's.
        day
            0 is the trace; every other number another day of it.
        """
        some, rows = scale_clients(self.requests, load)
        if day:
            some, drawn = draw_day(some, day)
            rows = rows[drawn]
        if some is self.requests:
            return self
        width, last = 3600 * float(self.hours[0]), len(self.hours) - 1
        window = np.minimum((some.arrival / width).astype(np.int64), last)
        of, session = self.of[rows], some.sessions
        return replace(self, requests=some, of=of[session], window=window, session=session)

    def of_window(self, index: int) -> "Traffic":
        """The requests of one window, when they arrive; turns without their parents are first."""
        rows = np.flatnonzero(self.window == index)
        requests = self.requests.take(rows)
        return replace(
            self,
            requests=requests,
            of=self.of[rows],
            window=np.zeros(len(rows), np.int64),
            session=requests.sessions,
            hours=self.hours[index : index + 1],
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
            evenly = np.mod((np.arange(len(rows)) + 0.5) * GOLDEN_RATIO, 1.0)
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
    of, session = _group_requests(requests), requests.sessions
    if targets is not None and targets.longer:
        parts = len(targets.classes) * of + targets.classify(requests.prompt)
        of = np.unique(parts, return_inverse=True)[1].astype(np.int64)
    hits = np.minimum(leading_hits(requests) * requests.block_tokens, requests.prompt)
    reused = hits / requests.prompt
    if hits.any():
        of = _merge_rare_classes(2 * of + (reused >= REUSED_SHARE))
    of = _classes_of_sessions(of, session, requests.prompt)
    count = np.bincount(of)
    duration = requests.duration or MIN_WINDOW_SECONDS  # all at once are no load for long
    if not windows:
        by_time, by_count = int(duration / MIN_WINDOW_SECONDS), len(requests) // MIN_WINDOW_REQUESTS
        windows = max(min(MAX_WINDOWS, by_time, by_count), 1)
    width = duration / windows
    window = np.minimum((requests.arrival - requests.arrival[0]) / width, windows - 1)
    return Traffic(
        requests=requests,
        of=of,
        window=window.astype(np.int64),
        session=session,
        prompt=np.bincount(of, requests.prompt) / count,
        generate=np.bincount(of, requests.generate) / count,
        reuse=np.bincount(of, reused) / count,
        hours=np.full(windows, width / 3600),
    )


def _group_requests(requests: Requests) -> NDArray[np.int64]:
    """Prompts in parts of equally many tokens, and each part again by generated tokens. (n,)"""
    prompts = _token_parts(requests.prompt)
    of = np.zeros(len(requests), np.int64)
    for part in range(CLASSES_PER_AXIS):
        rows = np.flatnonzero(prompts == part)
        of[rows] = part * CLASSES_PER_AXIS + _token_parts(requests.generate[rows])
    return np.unique(of, return_inverse=True)[1].astype(np.int64)


def _token_parts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Parts 0, 1, ... of equally many tokens, the shortest first; equal lengths stay together."""
    if not lengths.size:
        return np.zeros(0, np.int64)
    ordered = np.sort(lengths)
    share = np.cumsum(ordered) / ordered.sum()
    first = np.searchsorted(ordered, lengths, side="left")
    before = np.where(first > 0, share[first - 1], 0.0)
    return np.minimum((before * CLASSES_PER_AXIS).astype(np.int64), CLASSES_PER_AXIS - 1)


def _merge_rare_classes(of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Classes numbered 0, 1, ...; the rare ones join their twin that differs in reuse alone."""
    count = np.bincount(of)
    of = np.where((count < RARE_CLASS)[of] & (of % 2 == 1), of - 1, of)
    return np.unique(of, return_inverse=True)[1].astype(np.int64)


def _classes_of_sessions(
    of: NDArray[np.int64], session: NDArray[np.int64], prompt: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The class of the longest prompt of each request's session."""
    by_length = np.argsort(prompt, kind="stable")
    longest = np.zeros(len(of), np.int64)
    longest[session[by_length]] = by_length  # the last one written stays
    return np.unique(of[longest[session]], return_inverse=True)[1].astype(np.int64)
