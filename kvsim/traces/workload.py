"""Traffic described without a trace: lengths, a rate or users, and prefix reuse."""

from dataclasses import replace
from math import ceil, log, log2

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces.lengths import draw_lengths
from kvsim.traces.requests import LONGEST_REQUEST, Floats, Integers, Requests
from kvsim.traces.synthetic import Empirical, Lengths, Prefixes, Steady

BLOCK_TOKENS = 16  # of a prefix block, as engines share them [tokens]
SHARED_STEPS = 64
"""Steps of a prefix to which its end is rounded: each block is found, used and given up by itself,
and plays of long prompts took six times as long with blocks of 16 tokens."""
LARGEST_BLOCK = 256  # of a drawn prefix, which what other memories store is a multiple of [tokens]
REUSE_DISTANCE = 20.0  # median requests since the last one with the same prefix
LEAST_SECONDS, LEAST_REQUESTS, MOST_REQUESTS = 600.0, 3_000, 100_000
"""How long drawn traffic lasts if nothing is said: long enough for queues to settle and for a 99th
percentile to rest on thirty requests, and no longer than is played in a second."""
FASTEST_TOKEN = (
    0.004  # that an engine makes, so that no turn is kept back by its nominal arrival [s]
)
CONVERSATIONS_BEFORE = 2.0  # times the length of one that precedes the traffic that is drawn
DEFAULT_THINK = 20.0  # between the turns of a conversation, where nothing is said [s]


@frozen
class DrawnTraffic:
    """Parameters of synthetic traffic.

    Attributes
    ----------
    lengths
        Joint distribution of prompt and generated lengths. [tokens]
    rate
        Mean rate of requests; 0 if users send them. [requests/s]
    users
        Number of clients, each of which waits for its answer and then thinks before it sends the
        next request; 0 if arrivals do not depend on answers.
    think
        Mean time between an answer and the client's next request. [s]
    burst
        Coefficient of variation of the gaps between arrivals; 1 for a Poisson process.
    hours
        Length of the trace; None for a length that suffices. [h]
    cached
        Length of the prefix that all prompts begin with; ``lengths`` include it. [tokens]
    hit_rate
        Share of each prompt that an earlier request had, 0 to 1.
    turns
        Requests per conversation, each of which repeats the conversation so far in its prompt.
    longest
        Longest request that is drawn, prompt and answer together. [tokens]
    answer_seconds
        Rough time that a user waits for an answer, which sets how many requests each user sends.
        [s]
    """

    lengths: Lengths
    rate: float = 0.0
    users: int = 0
    think: float = DEFAULT_THINK
    burst: float = 1.0
    hours: float | None = None
    cached: int = 0
    hit_rate: float = 0.0
    turns: int = 1
    longest: int = LONGEST_REQUEST
    answer_seconds: float = 10.0

    def draw(self, seed: int = 0) -> Requests:
        """Draw the requests; the same seed gives the same requests.

        Parameters
        ----------
        seed
            Seed of the random numbers.

        Returns
        -------
        Requests
            A trace; users and conversations are turns that wait for the one before.

        Raises
        ------
        InputError
            If it would be empty or too large, or conversations cannot have such prompts.
        """
        times, gaps, shares = (np.random.default_rng([seed, part]) for part in range(1, 4))
        first, turns = self._first_arrivals(times)
        count = len(first) * turns
        if not 1 <= count <= 100 * MOST_REQUESTS:
            raise InputError(
                f"--hours: {count:,} requests; expected 1 to {100 * MOST_REQUESTS:,}; change it or "
                "the rate"
            )
        prompt, generate = draw_lengths(self.lengths, count, self.longest, seed)
        if self.cached:
            prompt = self._after_prefix(prompt)
        session, turn = np.divmod(np.arange(count), turns)
        if turns == 1:
            return Requests(first, prompt, generate, *self._blocks(shares, prompt, None))
        think = gaps.exponential(self.think, count) if self.think else np.zeros(count)
        # a turn waits for the one before; here is the earliest that it may come
        since = np.cumsum((think + FASTEST_TOKEN * generate).reshape(-1, turns), axis=1)
        arrival: Floats = first[session] + (since - since[:, :1]).ravel()
        if self.turns > 1:
            prompt = self._conversations(prompt, generate, turn)
        blocks = self._blocks(shares, prompt, (session, turn) if self.turns > 1 else None)
        rows = np.argsort(arrival, kind="stable")  # a trace is in the order of arrival
        place, before = np.argsort(rows), np.where(turn > 0, np.arange(count) - 1, -1)[rows]
        some = replace(
            Requests(np.zeros(count), prompt, generate, *blocks).take(rows, arrival[rows]),
            parent=np.where(before >= 0, place[before], -1),
            think=think[rows],
        )
        return some if self.users else _middle(some, self._seconds(self.rate))

    def _after_prefix(self, prompt: Integers) -> Integers:
        """Prompt lengths of the same mean that all include the shared prefix."""
        mean = float(prompt.mean())
        if mean <= self.cached:
            raise InputError(
                f"--cached: got {self.cached:,}; expected fewer tokens than the {mean:,.0f} of a "
                "prompt on average, which include them; change it or --prompt"
            )
        own = np.rint(prompt * (1 - self.cached / mean)).astype(np.int64)
        longer: Integers = self.cached + np.maximum(own, 1)
        return longer

    def _first_arrivals(self, random: np.random.Generator) -> tuple[Floats, int]:
        """Start of each client or conversation [s], and its number of requests."""
        if self.users:
            each = max(self.think + self.answer_seconds, 1e-3)
            lasts = self._seconds(self.users / each)
            turns = max(ceil(lasts / each), 2)
            if self.turns > 1:
                turns = self.turns * max(ceil(turns / self.turns), 1)
            return np.sort(random.uniform(0.0, each if self.think else 1e-3, self.users)), turns
        lasts = self._seconds(self.rate)
        if self.turns > 1:  # conversations are under way when it begins
            lasts += CONVERSATIONS_BEFORE * self.turns * self.think
        found = Steady(cv=self.burst).draw(random, self.rate / self.turns, None, lasts)
        if not len(found):
            raise InputError("--hours: no request arrives in that time; give a longer one")
        return found - found[0], self.turns

    def _seconds(self, rate: float) -> float:
        """Duration of the trace at a rate of requests. [s]"""
        if self.hours is not None:
            return 3600.0 * self.hours
        return max(min(max(LEAST_SECONDS, LEAST_REQUESTS / rate), MOST_REQUESTS / rate), 1e-6)

    def _conversations(self, prompt: Integers, generate: Integers, turn: Integers) -> Integers:
        """Prompt lengths that include the conversation so far and keep the requested mean."""
        turns = self.turns
        wanted, answers = float(prompt.mean()), float(generate.mean())
        new = (wanted - (turns - 1) / 2 * answers) / ((turns + 1) / 2)
        if new < 1:
            raise InputError(
                f"--turns: after {turns} turns the answers alone are {answers:.0f} tokens each, "
                f"more than prompts of {wanted:.0f} on average; give fewer turns or a longer prompt"
            )
        inside = turn % turns
        own = np.maximum(np.rint(prompt * new / wanted), 1).astype(np.int64)
        both = np.cumsum(own + generate)
        begin = np.maximum.accumulate(np.where(inside == 0, np.arange(len(own)), 0))
        before = both - (own + generate) - (both - (own + generate))[begin]
        cut: Integers = np.minimum(before + own, np.maximum(self.longest - generate, 1))
        return cut

    def _blocks(
        self, random: np.random.Generator, prompt: Integers, talks: tuple[Integers, Integers] | None
    ) -> tuple[Integers | None, Integers | None, int]:
        """Prefix blocks: ids of all requests, where each begins, and tokens per block."""
        if talks is not None:
            return _blocks_of_conversations(prompt, talks[0], talks[1], self.turns)
        if self.cached:
            block = _block_size(self.cached)
            return *_blocks_of_common_start(prompt, self.cached, block), block
        if self.hit_rate:
            depth = Empirical((log(1 + self.hit_rate),) * 105)
            far = -REUSE_DISTANCE / log(2) * np.log(np.maximum(1 - np.linspace(0, 1, 105), 1e-3))
            block = _block_size(float(prompt.mean()))
            reuse = Prefixes(block, (), (depth,), Empirical(tuple(np.log1p(far).tolist())))
            return *reuse.draw(random, prompt), block
        return None, None, 0


def _middle(requests: Requests, seconds: float) -> Requests:
    """The stationary part of a trace, in which conversations begin as often as they end."""
    end = float(requests.arrival[requests.parent < 0][-1]) if len(requests) else 0.0  # type: ignore[operator]
    rows = np.flatnonzero((requests.arrival >= end - seconds) & (requests.arrival < end))
    if not rows.size:
        raise InputError("--hours: no request arrives in that time; give a longer one")
    return requests.take(rows, requests.arrival[rows] - requests.arrival[rows[0]])


def _block_size(prefix: float) -> int:
    """Tokens of a block with which a prefix has about SHARED_STEPS of them. [tokens]"""
    steps = max(prefix / SHARED_STEPS / BLOCK_TOKENS, 1.0)
    return min(BLOCK_TOKENS << int(log2(steps)), LARGEST_BLOCK)


def _blocks_of_common_start(prompt: Integers, cached: int, block: int) -> tuple[Integers, Integers]:
    """Prefix blocks of prompts with a common start."""
    blocks = -(-prompt // block)
    start = np.concatenate([[0], np.cumsum(blocks)])
    inside = np.arange(start[-1]) - np.repeat(start[:-1], blocks)
    common = round(cached / block)
    alike = inside < common
    fresh = common + np.cumsum(~alike) - 1
    return np.where(alike, inside, fresh), start


def _blocks_of_conversations(
    prompt: Integers, session: Integers, turn: Integers, turns: int
) -> tuple[Integers, Integers, int]:
    """Prefix blocks of prompts that repeat their conversation."""
    talk = session * (int(turn.max(initial=0)) // turns + 1) + turn // turns
    blocks = -(-prompt // BLOCK_TOKENS)
    longest = np.zeros(int(talk.max()) + 1, np.int64)
    np.maximum.at(longest, talk, blocks)
    base = np.concatenate([[0], np.cumsum(longest)])[talk]
    start = np.concatenate([[0], np.cumsum(blocks)])
    inside = np.arange(start[-1]) - np.repeat(start[:-1], blocks)
    return np.repeat(base, blocks) + inside, start, BLOCK_TOKENS
