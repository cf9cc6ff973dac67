"""Results of a simulation: latencies, throughput, goodput, memory, a timeline and checks.

In a closed loop each of a number of clients sends its next request as soon as the last answer is
complete. The first answers have staggered lengths, so that the clients are out of phase, and only
requests during which all clients are busy are counted.
"""

from collections.abc import Callable
from dataclasses import field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers
from kvsim.prediction.generate import check_workload
from kvsim.prediction.service import Service
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import (
    ABORTED,
    FINEST_GAP,
    FINISHED,
    GAP_BINS,
    GAP_RATIO,
    HOST,
    MEMORIES,
    NVME,
    POOLS,
    REFUSED,
    TIER_LINKS,
)
from kvsim.serving.rules import Rules
from kvsim.serving.servable import REFUSAL_REASONS, count_refusals, find_refusals, longest_request
from kvsim.serving.simulate import Run, simulate
from kvsim.serving.tables import COST_RESOURCES
from kvsim.traces.requests import Requests

MAX_LISTED_REFUSALS = 5  # refused requests that are listed
QUEUE_GROWTH = 0.02  # of the arrivals' time, by which the last quarter may wait longer
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@frozen
class Targets:
    """Latency targets of a request; infinite if none was set."""

    ttft: float = np.inf  # [s]
    tpot: float = np.inf  # [s]
    share: float = 0.9  # of the requests, that must meet both


@frozen
class Outcome:
    """Metrics of a simulated run."""

    run: Run
    targets: Targets = field(default_factory=Targets)

    @property
    def finished(self) -> np.ndarray:
        """Whether each request received all its tokens. (n,)"""
        return np.asarray(self.run.progress.status == FINISHED)

    @property
    def refused(self) -> np.ndarray:
        """Whether each request was rejected, as longer than the context or the memory. (n,)"""
        return np.asarray(self.run.progress.status == REFUSED)

    @property
    def refused_by(self) -> dict[str, int]:
        """Number of rejected requests by reason."""
        if not self.refused.any():
            return dict.fromkeys(REFUSAL_REASONS, 0)
        found = find_refusals(longest_request(self.run.costs), self.run.requests)
        return count_refusals(found[self.refused])

    @property
    def aborted(self) -> np.ndarray:
        """Whether the client of each request disconnected before its end. (n,)"""
        return np.asarray(self.run.progress.status == ABORTED)

    @property
    def _around_s(self) -> Array:
        """Time that each request spends outside the engine, in server and client. (n,) [s]"""
        server = self.run.costs.deployment.stack.server
        return np.asarray(server.request_overhead(self.run.requests.prompt.astype(float)))

    @property
    def ttft_s(self) -> Array:
        """Time to the first token of each request; NaN if it received none. (n,) [s]"""
        return np.asarray(self.run.progress.first - self.run.progress.arrival + self._around_s)

    @property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN for answers of one token. (n,) [s]"""
        more = self.run.requests.generate - 1
        span = self.run.progress.last - self.run.progress.first
        return np.asarray(np.divide(span, more, out=np.full(span.size, np.nan), where=more > 0))

    @property
    def latency_s(self) -> Array:
        """Time from the arrival to the last token of each request. (n,) [s]"""
        return np.asarray(self.run.progress.last - self.run.progress.arrival + self._around_s)

    @property
    def queue_s(self) -> Array:
        """Time from the arrival to the first pass of each request. (n,) [s]"""
        return np.asarray(self.run.progress.started - self.run.progress.arrival)

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the end of the last replica's work. [s]"""
        if not len(self.run.requests):
            return 0.0
        return float(self.run.replicas.clock.max() - self.run.requests.arrival[0])

    @property
    def meets_targets(self) -> np.ndarray:
        """Whether each request finished within the TTFT and TPOT targets. (n,)"""
        slow = (self.ttft_s > self.targets.ttft) | (self.tpot_s > self.targets.tpot)
        return self.finished & ~slow

    @property
    def kv_peak_share(self) -> float:
        """Largest share of its KV cache memory that a replica used."""
        return float(self.run.replicas.peak.max() / max(self.run.world.limits.gpu, 1))

    @property
    def busy_share(self) -> float:
        """Share of the time in which a replica computes, averaged over replicas."""
        total = self.duration_s * self.run.replicas.clock.size
        return float(self.run.bins.seconds.sum() / total) if total else 0.0

    @property
    def mean_running(self) -> float:
        """Mean number of requests in prefill or decode per replica, idle times included."""
        total = self.duration_s * self.run.replicas.clock.size
        progress = self.run.progress
        return float(np.nansum(progress.last - progress.started) / total) if total else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Utilisation of each resource over the run (0 to 1), averaged over replicas.

        The links between GPU and host include transfers of stored prefix blocks.
        """
        total = self.duration_s * self.run.replicas.clock.size
        used = dict(zip(COST_RESOURCES, self.run.bins.use.sum(axis=(0, 1)), strict=True))
        d = self.run.costs.deployment
        for link in ("h2d", "d2h"):
            used[link] += self.link_bytes[link] / d.gpus / d.bandwidth[link]
        return {k: float(s / total) if total else 0.0 for k, s in used.items()}

    @property
    def mean_batch(self) -> float:
        """Mean number of decoding sequences while a replica computes. [sequences]"""
        busy = self.run.bins.seconds.sum()
        return float(self.run.bins.running.sum() / busy) if busy else 0.0

    @property
    def output_tokens(self) -> int:
        """Number of generated tokens. [tokens]"""
        return int(self.run.replicas.emitted.sum())

    @property
    def prefix_hits(self) -> dict[str, float]:
        """Share of prompt tokens found in each memory when requests first started."""
        found = self.run.replicas.found.sum(axis=0)
        tokens = max(int(self.run.requests.prompt.sum()), 1)
        return {name: float(n / tokens) for name, n in zip(MEMORIES, found, strict=True)}

    @property
    def link_bytes(self) -> dict[str, float]:
        """Bytes of prefix blocks moved over each link, all GPUs together. [B]"""
        moved = self.run.replicas.link_bytes.sum(axis=0) * self.run.costs.deployment.gpus
        return {name: float(size) for name, size in zip(TIER_LINKS, moved, strict=True)}

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Size of the prefix blocks in each memory beside the GPUs' at the end. [B]"""
        pools = self.run.world.pools
        each = int(self.run.world.limits.unit_bytes) * self.run.costs.deployment.gpus
        held = {
            name: int(pools.count[place:-1:POOLS].sum()) * each
            for name, place in (("host", HOST), ("nvme", NVME))
        }
        return held | {"remote": int(pools.count[-1]) * each}

    @property
    def usd(self) -> float | None:
        """Price of the fleet for the duration of the run; None if unknown. [USD]"""
        d = self.run.costs.deployment
        if d.hardware.price is None:
            return None
        hours = self.duration_s / 3600
        return float(d.hardware.price * d.gpus * self.run.replicas.clock.size * hours)

    @property
    def busy_request_per_s(self) -> float:
        """Completed requests per second, from the first quarter of them to the third.

        The mean of a whole run is lower where it is short: it begins and ends with few requests.
        """
        ends = self.run.progress.last[self.finished]
        early, late = np.quantile(ends, [0.25, 0.75]) if ends.size else (0.0, 0.0)
        return float(0.5 * ends.size / (late - early)) if late > early else 0.0

    def grows(self, times: Array, least: float = 0.0) -> bool:
        """Return whether times grow over the run, as where more requests come than are served.

        The median of the last quarter of the requests is compared with that of the first.

        Parameters
        ----------
        times
            A time of each request; those that are not finite are left out. (n,) [s]
        least
            Growth that is not counted, however short the run. [s]
        """
        known = times[np.isfinite(times)]
        if known.size < 4:  # too few to have a first and a last quarter
            return False
        first, last = (float(np.median(x)) for x in np.array_split(known, 4)[::3])
        return last - first > max(QUEUE_GROWTH * float(self.run.requests.duration), least)

    def gaps(self) -> dict[str, float | None]:
        """Quantiles of the time between tokens, to the 1 % of the histogram's bins. [s]"""
        counts = self.run.gaps.sum(axis=0)
        total = counts.sum()
        if not total:
            return dict.fromkeys(QUANTILES)
        below = np.cumsum(counts) / total
        bins = {name: int(np.searchsorted(below, q)) for name, q in QUANTILES.items()}
        return {name: float(FINEST_GAP * GAP_RATIO ** (i + 0.5)) for name, i in bins.items()}

    def summary(self) -> dict[str, object]:
        """Return all metrics by their names in the JSON output."""
        run, requests = self.run, self.run.requests
        duration, limits = self.duration_s, self.run.world.limits
        made, usd = self.output_tokens, self.usd
        finished = int(self.finished.sum())
        aborted = int(self.aborted.sum())
        prompts = int(requests.prompt.sum())
        return {
            "technique": str(run.costs.technique),
            "replicas": int(run.replicas.clock.size),
            "requests": len(requests),
            "finished": finished,
            "refused": int(self.refused.sum()),
            "refused_by": self.refused_by,
            "max_model_len": run.costs.context,
            "refused_rows": (np.flatnonzero(self.refused)[:MAX_LISTED_REFUSALS] + 1).tolist(),
            "aborted": aborted,
            "unfinished": len(requests) - finished - aborted - int(self.refused.sum()),
            "duration_s": duration,
            "output_tok_s": made / duration if duration else None,
            "request_per_s": finished / duration if duration else None,
            "goodput_per_s": int(self.meets_targets.sum()) / duration if duration else None,
            "good_share": float(self.meets_targets.mean()) if len(requests) else None,
            "ttft_s": spread(self.ttft_s),
            "tpot_s": spread(self.tpot_s),
            "gap_s": self.gaps(),
            "latency_s": spread(self.latency_s),
            "queue_s": spread(self.queue_s),
            "busy_share": self.busy_share,
            "utilisation": self.utilisation,
            "mean_batch": self.mean_batch,
            "kv_capacity_bytes": int(limits.gpu),
            "kv_peak_bytes": int(run.replicas.peak.max()),
            "kv_peak_share": self.kv_peak_share,
            "preemptions": int(run.replicas.preemptions.sum()),
            "prefix_hit_share": float(run.progress.hits.sum() / prompts) if prompts else None,
            "prefix_hits": self.prefix_hits,
            "link_bytes": self.link_bytes,
            "stored_bytes": self.stored_bytes,
            "usd": usd,
            "usd_per_million_tokens": usd / made * 1e6 if usd is not None and made else None,
            "table_error": run.costs.error,
        }


def spread(values: Array) -> dict[str, float | None]:
    """Return the mean and the quantiles of the values that are finite.

    Parameters
    ----------
    values : the values. (n,)

    Returns
    -------
    dict
        Value by name; None for each if no value is finite.
    """
    known = values[np.isfinite(values)]
    if not known.size:
        return {"mean": None, **dict.fromkeys(QUANTILES)}
    quantiles = np.quantile(known, list(QUANTILES.values()))
    named = dict(zip(QUANTILES, map(float, quantiles), strict=True))
    return {"mean": float(known.mean()), **named}


def faults(run: Run, whole: bool = True) -> list[str]:
    """Check a run for violations of the simulator's invariants.

    Parameters
    ----------
    run : the simulated run.
    whole : whether it was simulated to the end, so that no request may be unfinished.

    Returns
    -------
    list of str
        The violations; empty if there are none.
    """
    p, requests, replicas = run.progress, run.requests, run.replicas
    pools = run.world.pools
    done = p.status == FINISHED
    made = int(requests.generate[done].sum()) + int(p.made[~done].sum())
    rules: dict[str, Callable[[], object]] = {
        "a request is neither finished, refused nor aborted": lambda: (
            not whole or (done | (p.status >= REFUSED)).all()
        ),
        "a request starts before it arrives": lambda: not (p.started < p.arrival).any(),
        "a first token comes before its start": lambda: not (p.first < p.started).any(),
        "a last token comes before the first": lambda: not (p.last < p.first).any(),
        "finished requests lack tokens": lambda: (p.made == requests.generate)[done].all(),
        "tokens made differ from tokens delivered": lambda: (
            not whole or made == int(replicas.emitted.sum())
        ),
        "more cache is in use than there is": lambda: (replicas.lowest >= 0).all(),
        "blocks were lost or created in a memory": lambda: (
            pools.stored - pools.dropped == _count_held_entries(run)
        ).all(),
        "memory is left over after the last request": lambda: (
            not whole or (_get_final_memory(run) == 0).all()
        ),
    }
    return [fault for fault, holds in rules.items() if not holds()]


def _count_held_entries(run: Run) -> np.ndarray:
    """Count the entries of each memory that are in use or kept. (pools,)"""
    pools = run.world.pools
    entries = run.world.entries
    free = np.zeros(pools.shape[0], np.int64)
    for index, pool in enumerate(pools):
        at = pool.free
        while at >= 0:
            free[index] += 1
            at = entries[at].chain
    return np.asarray(pools.made - free)


def _get_final_memory(run: Run) -> np.ndarray:
    """Return the memory in use at the end, by kind. (4, r) [B]"""
    r = run.replicas
    return np.array([r.private, r.pinned, r.host_private, r.host_swapped])


STRETCHES = 128  # at most: a line of more tells a reader no more


def make_timeline(run: Run) -> dict[str, Array]:
    """Return means over equal stretches of time, of all replicas together.

    Parameters
    ----------
    run : the simulation.

    Returns
    -------
    dict
        ``start_s`` of each stretch [s]; requests that arrived and finished, and prompt tokens
        read, per second; ``waiting``  requests and ``running`` sequences, summed over replicas;
        ``kv_share`` of the memory for caches while a replica computes; and, from 0 to 1,
        ``busy_share`` and the use of each resource at its full rate.
    """
    bins, replicas = run.bins, run.replicas.size
    width = float(run.replicas.bin_width.max())
    used = min(max(int(np.ceil(run.replicas.clock.max(initial=0.0) / width)), 1), GAP_BINS)
    joined = -(-used // STRETCHES)
    firsts = [np.arange(0, GAP_BINS, round(width / own)) for own in run.replicas.bin_width]

    def total(values: Array) -> Array:
        """Sum over replicas in each stretch. (r, BINS, ...) to (stretches, ...)"""
        found = np.zeros(values.shape[1:])
        for own, first in zip(values, firsts, strict=True):  # bins that become one
            found[: first.size] += np.add.reduceat(own, first)
        return np.asarray(np.add.reduceat(found[:used], np.arange(0, used, joined)))

    busy, use = total(bins.seconds), total(bins.use)
    width *= joined
    start = width * np.arange(len(busy))
    edges = np.append(start, start[-1] + width)
    last = run.progress.last[np.isfinite(run.progress.last)]
    arrived, left = (np.histogram(times, edges)[0] for times in (run.progress.arrival, last))
    kept = np.divide(total(bins.cache), busy, out=np.zeros(busy.size), where=busy > 0)
    return {
        "start_s": start,
        "arrivals_per_s": arrived / width,
        "finished_per_s": left / width,
        "prompt_tok_s": total(bins.prompt) / width,
        "waiting": total(bins.waiting) / width,
        "running": total(bins.running) / width,
        "kv_share": kept / max(int(run.world.limits.gpu), 1),
        "busy_share": busy / (width * replicas),
        **dict(zip(COST_RESOURCES, use.T / (width * replicas), strict=True)),
    }


BEFORE, COUNTED, AFTER = 1, 1, 1  # requests of each client that begin the loop, count, and end it


@frozen
class ClosedLoop:
    """Steady state of a number of clients that send their next request without a pause.

    Attributes
    ----------
    costs : step costs of the technique in the deployment.
    clients : number of clients.
    prompt, generate : lengths of each request's prompt and answer. [tokens]
    """

    costs: StepCosts
    clients: int
    prompt: int
    generate: int

    def __post_init__(self) -> None:
        check_workload(np.ones(1), self.prompt, self.generate)

    @cached_property
    def requests(self) -> Requests:
        """The requests of each client, as turns of a conversation without think time."""
        turns = BEFORE + COUNTED + AFTER
        total = self.clients * turns
        parent = np.arange(total) - self.clients
        generate = np.full(total, self.generate, dtype=np.int64)
        shares = (np.arange(self.clients) + 1) / self.clients
        generate[: self.clients] = np.maximum(1, np.ceil(shares * self.generate))
        prompt = np.full(total, self.prompt, dtype=np.int64)
        parent = np.where(parent < 0, -1, parent)
        return Requests(np.zeros(total), prompt, generate, parent=parent, think=np.zeros(total))

    @cached_property
    def outcome(self) -> Outcome:
        """The run.

        Raises
        ------
        InputError
            If the technique cannot run there, or no sequence fits.
        """
        found = Outcome(simulate(self.requests, self.costs))
        if found.refused.any():
            raise InputError(
                f"--concurrency: no sequence of {self.prompt + self.generate:,} tokens fits in the "
                f"memory that weights leave; use fewer tokens, narrower weights or more GPUs"
            )
        return found

    @property
    def _counted(self) -> slice:
        return slice(BEFORE * self.clients, (BEFORE + COUNTED) * self.clients)

    def _mean(self, values: Array) -> float:
        return float(np.nanmean(values[self._counted])) if self.generate > 1 else float("nan")

    @cached_property
    def ttft_s(self) -> float:
        """Mean time to the first token, including queueing. [s]"""
        return float(np.mean(self.outcome.ttft_s[self._counted]))

    @cached_property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN for answers of one token. [s]"""
        return self._mean(self.outcome.tpot_s)

    @cached_property
    def request_s(self) -> float:
        """Mean time from a request to its last token. [s]"""
        return float(np.mean(self.outcome.latency_s[self._counted]))

    @property
    def output_tok_s(self) -> float:
        """Generated tokens per second of all clients, by Little's law. [tokens/s]"""
        return self.clients * self.generate / self.request_s


class Clients(Service):
    """A prediction of a closed loop, in which each batch size is a number of clients.

    Memory is that of the sequences that run at the same time; others wait.
    """

    @property
    def load(self) -> str:
        """Kind of load, as which the errors of measurements are looked up."""
        return "served"

    @cached_property
    def _loops(self) -> list[ClosedLoop]:
        asked = "closed loop", self.prompt, self.generate
        costs = self.technique.cached(self.deployment, asked, self._step_costs)
        return [ClosedLoop(costs, int(n), self.prompt, self.generate) for n in self.batch]

    def _step_costs(self) -> StepCosts:
        longest = self.prompt + self.generate
        rules = Rules(max_seqs=0, max_tokens=0, max_model_len=longest)  # limits: the engine's own
        rules = rules.scale_to(self.deployment)
        return StepCosts(self.technique, self.deployment, rules, longest, self.prompt)

    @property
    def ttft_s(self) -> Array:
        """Mean time to the first token, including queueing. [s]"""
        return np.array([loop.ttft_s for loop in self._loops])

    @property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN if one token is generated. [s]"""
        return np.array([loop.tpot_s for loop in self._loops])

    @property
    def request_s(self) -> Array:
        """Mean time from sending a request to its last token. [s]"""
        return np.array([loop.request_s for loop in self._loops])

    @property
    def output_tok_s(self) -> Array:
        """Generated tokens per second, of all clients. [tokens/s]"""
        return np.array([loop.output_tok_s for loop in self._loops])

    @property
    def decode_tok_s(self) -> Array:
        """Same as ``output_tok_s``, as some clients always decode. [tokens/s]"""
        return self.output_tok_s

    @cached_property
    def buffers(self) -> Buffers:
        """Memory use by tier and buffer, with as many sequences as fit. [B]"""
        running = np.minimum(self.batch, np.maximum(self.max_batch, 1.0))
        return Service(self.technique, self.deployment, running, self.prompt, self.generate).buffers

    @property
    def fits(self) -> NDArray[np.bool]:
        """Whether a single sequence fits; others can wait."""
        return np.asarray(self.max_batch >= 1)
