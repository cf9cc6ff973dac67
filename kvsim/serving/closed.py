"""A closed loop: so many clients, each of which sends its next request when it has the last answer.

The simulator plays it. Clients begin with answers of unequal length, so that their later requests
are spread over time as in a long run; what counts are requests beside which all clients are busy.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers
from kvsim.prediction.generate import check_workload
from kvsim.prediction.service import Service
from kvsim.serving.costs import StepCosts
from kvsim.serving.outcome import Outcome
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.traces.requests import Requests

BEFORE, COUNTED, AFTER = 1, 1, 1  # requests of each client that begin the loop, count, and end it


@frozen
class ClosedLoop:
    """The steady state of a number of clients that never wait between requests."""

    costs: StepCosts
    clients: int
    prompt: int
    generate: int

    def __post_init__(self) -> None:
        check_workload(np.ones(1), self.prompt, self.generate)

    @cached_property
    def requests(self) -> Requests:
        """Each client's requests, as turns of a session without thinking."""
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
        """Mean time to the first token, in the queue included. [s]"""
        return float(np.mean(self.outcome.ttft_s[self._counted]))

    @cached_property
    def tpot_s(self) -> float:
        """Mean time per token after the first; NaN where there is none. [s]"""
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
    """A prediction whose times are those of a closed loop, played; each batch is its clients.

    Memory is that of as many sequences as run at once: what finds no room waits.
    """

    @property
    def of_clients(self) -> bool:
        """Whether the batch is clients of a closed loop."""
        return True

    @cached_property
    def _loops(self) -> list[ClosedLoop]:
        asked = "closed loop", self.prompt, self.generate
        costs = self.technique.cached(self.deployment, asked, self._step_costs)
        return [ClosedLoop(costs, int(n), self.prompt, self.generate) for n in self.batch]

    def _step_costs(self) -> StepCosts:
        longest = self.prompt + self.generate
        rules = Rules(max_model_len=longest).scale_to(self.deployment)
        return StepCosts(self.technique, self.deployment, rules, longest, self.prompt)

    @property
    def ttft_s(self) -> Array:
        """Mean time to the first token, waiting included. [s]"""
        return np.array([loop.ttft_s for loop in self._loops])

    @property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN when only one is generated. [s]"""
        return np.array([loop.tpot_s for loop in self._loops])

    @property
    def request_s(self) -> Array:
        """Mean time from a request to its last token. [s]"""
        return np.array([loop.request_s for loop in self._loops])

    @property
    def output_tok_s(self) -> Array:
        """Generated tokens per second of all clients. [tokens/s]"""
        return np.array([loop.output_tok_s for loop in self._loops])

    @property
    def decode_tok_s(self) -> Array:
        """The same: some clients always decode. [tokens/s]"""
        return self.output_tok_s

    @cached_property
    def buffers(self) -> Buffers:
        """Resident bytes by tier and buffer with as many sequences as have room. [B]"""
        running = np.minimum(self.batch, np.maximum(self.max_batch, 1.0))
        return Service(self.technique, self.deployment, running, self.prompt, self.generate).buffers

    @property
    def fits(self) -> NDArray[np.bool]:
        """Whether one sequence does: others wait until there is room."""
        return np.asarray(self.max_batch >= 1)
