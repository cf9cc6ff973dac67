"""The request rate that an engine carries: the largest at which its targets are kept in play.

Requests with drawn lengths arrive one by one, and the serving simulator plays them at one rate
after another. Passes take as long as nine in ten measured ones do at most, by the ledger of errors:
what prompts need is multiplied by the factor of TTFT, what decoding needs by that of TPOT. So a
rate found here is kept with the likelihood that was asked for, and the rate without the factors is
the stretch.
"""

from dataclasses import replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from kvsim.errors import InputError
from kvsim.evidence.ledger import WITHIN_80, evidence_for
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.search import smallest_count
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome, Targets
from kvsim.serving.simulate import simulate
from kvsim.techniques.technique import Technique
from kvsim.traces.requests import Requests
from kvsim.traces.workload import DrawnTraffic

ARRIVALS = 2000
"""Requests of one play. The share within the targets then has a standard error of 0.7 points where
it is 0.9, and at 5 % above what an engine carries the queue is longer than usual targets at the
end."""

FURTHER_DRAWS = 8
"""Draws of the requests from which the times of a choice are, beside the first."""

FIRST_SEED = 1000  # of them
LOWERED = 1.03  # ratio of rates where the further draws do not keep the targets
MOST_LOWERED = 24  # times: half the rate keeps no more where long prompts alone are late
SIMULTANEOUS = 1e-3  # s; requests that come within it come together
DIPS = (1, 2, 3, 5)
"""Finest steps above a rate that is kept, at which more is tried: 3 of 251 searches then found more
(seed 77 of benchmarks/plans.py), 1, 1 and 9 %."""
NEXT_RATE = 1.03  # ratio of the first rate tried to one that is kept
RATE_STEP = 1.01  # ratio of two rates between which the search stops
MAX_REPLICAS = 512
IDLE = 1e-4  # of what seems possible: a rate at which requests hardly ever meet


@frozen
class Load:
    """What requests look like, whatever their rate.

    Attributes
    ----------
    requests
        Requests that arrive once a second on average.
    words
        Their lengths and reuse, in words.
    traffic
        What they were drawn from; None for a trace.
    per_s
        The rate that is to be carried, a trace's own; 0 where the largest is asked for. [1/s]
    left_out
        Requests of the trace that no engine takes because they exceed the context.
    asked
        What is to be carried where that is a trace with more or fewer clients.
    caution
        A sentence on requests that are left out, where they are many.
    """

    requests: Requests
    words: str
    traffic: DrawnTraffic | None = None
    per_s: float = 0.0
    left_out: int = 0
    asked: Requests | None = None
    caution: str = ""

    def at(self, per_s: float) -> Requests:
        """Return the same load at another mean rate.

        Arrival times are scaled. Conversations over some hours are drawn anew, as the pauses
        between their turns do not shrink: a higher rate means more conversations at once in a
        shorter trace.

        Parameters
        ----------
        per_s
            Mean rate of requests. [1/s]
        """
        drawn = self.traffic
        if drawn is not None and drawn.turns > 1 and drawn.hours is not None:
            return replace(drawn, rate=per_s, hours=drawn.hours / per_s).draw()
        return self.requests.scaled(per_s)

    @cached_property
    def longest(self) -> int:
        """Most prompt and generated tokens of a sequence. [tokens]"""
        return int((self.requests.prompt + self.requests.generate).max())

    @property
    def prompt(self) -> float:
        """Mean length of the prompts. [tokens]"""
        return float(self.requests.prompt.mean())

    @property
    def generate(self) -> float:
        """Mean generated tokens. [tokens]"""
        return float(self.requests.generate.mean())

    @property
    def reuses(self) -> bool:
        """Whether prompts share prefixes."""
        return self.requests.block_ids is not None


def draw_load(traffic: DrawnTraffic, words: str, count: int = ARRIVALS, seed: int = 0) -> Load:
    """Draw requests that arrive once a second on average.

    Parameters
    ----------
    traffic
        Lengths, bursts and reuse.
    words
        The same in words.
    count
        Requests, about.
    seed
        The same seed draws the same requests.
    """
    hour = replace(traffic, rate=1.0, hours=count / 3600)
    return Load(hour.draw(seed), words, hour)


def load_of_trace(
    requests: Requests, words: str, left_out: int = 0, asked: Requests | None = None
) -> Load:
    """A trace's requests as if one arrived a second on average.

    Parameters
    ----------
    requests
        The trace.
    words
        What answers call it.
    left_out
        Requests of the trace that are not among them.
    asked
        What is to be carried; the requests at their own rate if None.

    Raises
    ------
    InputError
        For an empty trace.
    """
    if not len(requests):
        raise InputError("--trace: no requests; expected at least one")
    rate = trace_rate(requests)
    per_s = rate if asked is None else trace_rate(asked)
    return Load(requests.scaled(1 / rate), words, None, per_s, left_out, asked)


def trace_rate(requests: Requests) -> float:
    """Mean rate of a trace; those that all arrive at once count as arriving within a second. [1/s]

    Parameters
    ----------
    requests
        The trace.
    """
    return len(requests) / (requests.duration or 1.0)


@frozen
class ServiceLevel:
    """Latency targets that a rate has to meet, and how surely.

    Attributes
    ----------
    ttft, tpot
        Targets for a request's first token and for its mean time per further token; infinite where
        there is none. [s]
    share
        Share of requests that have to meet both targets, 0 to 1.
    sure
        Probability, given the error of predictions, that this share is reached, 0 to 1.
    """

    ttft: float
    tpot: float
    share: float = 0.9
    sure: float = 0.9

    @property
    def targets(self) -> Targets:
        """The targets of a good request."""
        return Targets(self.ttft, self.tpot, self.share)


@frozen
class Slower:
    """Factors on what is predicted, which a share of what is measured stays below."""

    prefill: float = 1.0
    decode: float = 1.0

    def apply(self, costs: StepCosts) -> StepCosts:
        """Costs whose passes take so much longer."""
        return costs.slowed(self.prefill, self.decode)


def known_factors(deployment: Deployment, technique: Technique, sure: float) -> Slower:
    """Find how much longer passes may take than predicted.

    Parameters
    ----------
    deployment, technique
        What is predicted.
    sure
        Likelihood with which measured times are below; 0.5 gives factors of 1.
    """
    reach = NormalDist().inv_cdf(sure) / WITHIN_80
    found = (evidence_for(deployment, technique.name, kind) for kind in ("prefill", "decode"))
    return Slower(*(max(known.high**reach, 1.0) for known in found))


@frozen
class Carried:
    """What an engine does with requests at one rate.

    Attributes
    ----------
    slower
        Factors on predicted times, with which ``each_per_s`` is the largest rate.
    each_per_s
        Requests per second of one replica. [1/s]
    load, asked
        The requests, and what they must keep.
    draws
        Plays of several draws of the requests at that rate; empty where the load's own will do.
    """

    costs: StepCosts
    replicas: int
    slower: Slower
    each_per_s: float
    load: Load
    asked: ServiceLevel
    draws: tuple[Outcome, ...] = ()

    @cached_property
    def played(self) -> tuple[Outcome, ...]:
        """Plays at that rate in which passes take as long as predicted, made when wanted."""
        if self.draws:
            return self.draws
        return (Outcome(simulate(self.load.at(self.each_per_s), self.costs), self.asked.targets),)

    @property
    def share(self) -> float:
        """Share of the requests within both targets. [1]"""
        return float(np.mean([o.meets_targets.mean() for o in self.played]))

    @property
    def ttft(self) -> dict[str, float]:
        """Quantiles of the TTFT, by name as ``p50``. [s]"""
        return quantiles(np.concatenate([o.ttft_s for o in self.played]))

    @property
    def tpot(self) -> dict[str, float]:
        """Quantiles of the TPOT, by name as ``p50``. [s]"""
        return quantiles(np.concatenate([o.tpot_s for o in self.played]))

    @property
    def running(self) -> float:
        """Mean sequences in prefill or decode, of one replica, idle times included. [sequences]"""
        return float(np.mean([o.mean_running for o in self.played]))

    @property
    def batch(self) -> float:
        """Mean sequences that decode at once while a replica computes. [sequences]"""
        return float(np.mean([o.mean_batch for o in self.played]))

    @property
    def hits(self) -> float:
        """Share of the prompt tokens that were found in the cache. [1]"""
        return self.played[0].prefix_hits.get("gpu", 0.0)

    @property
    def refused(self) -> int:
        """Requests that are larger than the cache."""
        return int(self.played[0].refused.sum())

    @property
    def deployment(self) -> Deployment:
        """One replica's model, machine and software."""
        return self.costs.deployment

    @property
    def technique(self) -> Technique:
        """The technique that all replicas run."""
        return self.costs.technique

    @property
    def per_s(self) -> float:
        """Requests per second of all replicas. [1/s]"""
        return self.replicas * self.each_per_s

    @property
    def output_tok_s(self) -> float:
        """Generated tokens per second of all replicas. [tokens/s]"""
        return self.per_s * self.load.generate

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.deployment.gpus

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all GPUs; None where it is not known. [USD/h]"""
        price = self.deployment.hardware.price
        return None if price is None else price * self.gpus

    @property
    def usd_per_request(self) -> float | None:
        """Price of a request at that rate; None where it is not known. [USD]"""
        usd = self.usd_per_hour
        return None if usd is None else usd / 3600 / self.per_s


class RateSearch:
    """Plays of one load under one demand, and the largest rates that they find."""

    def __init__(self, load: Load, asked: ServiceLevel) -> None:
        self.load, self.asked, self.plays = load, asked, 0

    def play(self, costs: StepCosts, per_s: float) -> Outcome:
        """The requests at a rate on one replica."""
        self.plays += 1
        return Outcome(simulate(self.load.at(per_s), costs), self.asked.targets)

    def kept(self, costs: StepCosts, per_s: float) -> float:
        """Share of the requests within both targets at a rate; none where the queue only grows."""
        o = self.play(costs, per_s)
        if not np.isfinite(self.asked.ttft):  # no TTFT shows that the queue grows
            latency = o.latency_s
            if not np.isfinite(latency).all() or o.grows(latency):
                return 0.0
        return float(o.meets_targets.mean())

    def largest(
        self,
        costs: StepCosts,
        guess: float,
        step: float = RATE_STEP,
        least: float = 0.0,
        kept: float = 0.0,
    ) -> float:
        """Find the largest rate at which enough requests are within both targets.

        Parameters
        ----------
        costs
            Times of passes.
        guess
            Where to begin. [1/s]
        step
            Ratio of two rates between which the search stops.
        least
            The least rate that is of interest, where the search then begins. [1/s]
        kept
            A rate that is known to keep the targets; 0 if none is. [1/s]

        Returns
        -------
        float
            The rate; 0 where not even requests that hardly meet keep the targets, or not the least
            rate. [1/s]
        """

        def meets(rate: float) -> bool:
            return self.kept(costs, rate) >= self.asked.share

        low, high, factor = kept, least or guess, 1.3
        if kept:
            high = max(guess, kept * NEXT_RATE)
            factor = high / kept
        if kept or meets(high):
            low = kept or high
            while meets(high := low * factor):
                low, factor = high, factor**2
                if self.load.at(low).duration < SIMULTANEOUS:
                    # so few meet the targets at any rate: it is bounded by how fast they are served
                    served = self.play(costs, low)
                    return max(kept, float(served.finished.sum()) / served.duration_s)
        elif least:
            return 0.0
        else:
            floor = guess * IDLE
            while (low := max(high / factor, floor)) > floor and not meets(low):
                if high == guess and not meets(floor):
                    return 0.0
                high, factor = low, factor**2
        while high / low > step:
            middle = (low * high) ** 0.5
            if meets(middle):
                low = middle
            else:
                high = middle
        # one rate may miss what the next one keeps, as other requests meet
        higher = DIPS if step <= RATE_STEP else ()
        return max((r for n in higher if meets(r := low * step**n)), default=low)

    def carried(
        self,
        costs: StepCosts,
        guess: float,
        slower: Slower,
        replicas: int = 1,
        step: float = RATE_STEP,
        least: float = 0.0,
        kept: float = 0.0,
    ) -> Carried | None:
        """Find what an engine carries; None if it cannot keep the targets.

        Each of several replicas is taken to get its share of the requests at random, as if it went
        to any of them whatever the queues.

        Parameters
        ----------
        costs
            Times of passes.
        guess
            Where to begin the search, for one replica. [1/s]
        slower
            How much longer passes may take than predicted.
        replicas
            Equal engines that serve.
        step
            Ratio of two rates between which the search stops.
        least
            The least rate of one replica that is of interest; None if it carries less. [1/s]
        kept
            A rate that it is known to carry; 0 if none is. [1/s]
        """
        rate = self.largest(slower.apply(costs), guess, step, least, kept)
        if not rate:
            return None
        return Carried(costs, replicas, slower, rate, self.load, self.asked)

    def typical(self, found: Carried) -> Carried:
        """What is carried, with the times of further draws of the requests, too.

        The late tenth of one draw differs by a tenth from that of the next. Where enough requests
        were within the targets only in the first, as long ones fill the cache in others, the rate
        is lowered until they are on average.
        """
        drawn = self.load.traffic
        if drawn is None or self.load.left_out:
            return found
        seeds, count = range(FIRST_SEED, FIRST_SEED + FURTHER_DRAWS), len(self.load.requests)
        others = [RateSearch(draw_load(drawn, "", count, seed), self.asked) for seed in seeds]
        for lower in range(MOST_LOWERED):
            found = replace(found, each_per_s=found.each_per_s / (LOWERED if lower else 1.0))
            every = *found.played, *(o.play(found.costs, found.each_per_s) for o in others)
            if np.mean([o.meets_targets.mean() for o in every]) >= self.asked.share:
                break
        return replace(found, draws=every)

    def stretch(self, found: Carried) -> float:
        """The largest rate of one replica if passes take as long as predicted. [1/s]"""
        if found.slower == Slower():
            return found.each_per_s
        rate = self.largest(found.costs, 1.2 * found.each_per_s, kept=found.each_per_s)
        return self.typical(replace(found, each_per_s=rate, draws=())).each_per_s

    def replicas_for(self, found: Carried) -> int:
        """Fewest replicas that keep the targets at the load's own rate, with slower passes.

        Parameters
        ----------
        found
            What one of them carries.
        """
        costs, load = found.slower.apply(found.costs), self.load
        requests = load.at(load.per_s) if load.asked is None else load.asked

        def meets(count: int) -> bool:
            self.plays += 1
            run = simulate(requests, costs, count)
            kept = Outcome(run, self.asked.targets).meets_targets.mean()
            return bool(kept >= self.asked.share)

        guess = max(round(self.load.per_s / found.each_per_s), 1)
        return smallest_count(meets, guess, MAX_REPLICAS, 1.5)

    def alone(self, costs: StepCosts) -> float:
        """Mean time of a request that meets no other, if passes take as long as predicted. [s]"""
        latency = self.play(costs, IDLE).latency_s
        return float(latency[np.isfinite(latency)].mean())


def quantiles(times: Array) -> dict[str, float]:
    """Quantiles of the times that are known, by name; 0 where none is. [s]

    Parameters
    ----------
    times
        One of each request, NaN where there is none. (n,) [s]
    """
    known = times[np.isfinite(times)]
    names = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {k: float(np.quantile(known, q)) if known.size else 0.0 for k, q in names.items()}
