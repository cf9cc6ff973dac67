"""Steady-state continuous batching of equal requests at a given number of running sequences.

Every sequence that ends makes room for the next request, whose prompt is read at once while the
others wait; so the running sequences are spread evenly over their generation. What a round takes
is the mean over all contexts, as in a batch that starts together; what differs is when prompts are
read, and that only one group of them is read at a time.
"""

from functools import cached_property

import numpy as np

from kvsim.engine.timeline import makespan
from kvsim.graph import Array, Buffers, Number, Step
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, largest_batch, prefill_point, served_buffers


class Service(Prediction):
    """Steady state of a server with a constant number of running sequences.

    ``batch`` holds numbers of running sequences. TTFT is that of a request that can start at once:
    it waits for the decoding round in progress, and then its prompt is read. TPOT includes the
    reading of other sequences' prompts, of which there is one per running sequence and generation.
    A technique that divides a batch into parts reads one prompt for each part at a time.
    """

    @property
    def _group(self) -> int:
        """Prompts that are read together: by every rank, and in every part. [sequences]"""
        return self.technique.tiles() * self.deployment.dp

    @cached_property
    def prefill_s(self) -> Array:
        """Time to read one group of prompts, with the one-off work after prefill. [s]"""
        asked = "reading seconds", self.prompt, self.generate
        return self._squeeze(self.technique.cached(self.deployment, asked, self._reading))

    def _reading(self) -> Number:
        batch = float(self._group)
        p = prefill_point(batch, self.prompt, self.generate)
        total: Number = makespan(self.technique.prefill(self.deployment, p), self.deployment)
        behind = decode_point(batch, self.prompt, self.generate, 0.0)
        for step in self.technique.predecoding(self.deployment, behind):
            total = total + makespan(step, self.deployment)
        return total

    def passes(self) -> list[tuple[Step, float]]:
        """Return the passes of one generation: decoding rounds, and prompts read meanwhile.

        Returns
        -------
        list of tuple[Step, float]
            Each pass with the number of its repetitions.
        """
        t, d, group = self.technique, self.deployment, float(self._group)
        batch, rounds = float(self.batch[0]), (self.generate - 1) / t.tokens_per_round
        read = prefill_point(group, self.prompt, self.generate)
        return [
            *((step, rounds) for step in self.middle_round if rounds),
            (t.prefill(d, read), batch / group),
        ]

    @property
    def between_s(self) -> Array:
        """Zero: one-off work is part of reading a prompt. [s]"""
        return np.zeros(self.batch.size)

    @property
    def round_s(self) -> Array:
        """Mean decoding time per token, without waiting for prompts; 0 for a single token. [s]"""
        return self.decode_s / max(self.generate - 1, 1)

    @property
    def ttft_s(self) -> Array:
        """Time to the first token of a request that can start at once. [s]"""
        around = self.deployment.stack.server.request_overhead(self.prompt)
        return self.round_s + self.prefill_s + around

    @property
    def interruptions_s(self) -> Array:
        """Total time that a sequence waits while prompts of other sequences are read. [s]

        With pipeline stages, a prompt delays other sequences only while it is in one stage.
        """
        others = np.maximum(self.batch / self._group - 1, 0.0)
        return np.asarray(others * (self.prefill_s * self.deployment.stage_share))

    @property
    def tpot_s(self) -> Array:
        """Mean time per token after the first; NaN when only one is generated. [s]"""
        if self.generate == 1:
            return self.decode_s * np.nan
        return self.round_s + self.interruptions_s / (self.generate - 1)

    @property
    def request_s(self) -> Array:
        """Time from arrival to the last token. [s]"""
        return self.ttft_s + self.decode_s + self.interruptions_s

    @property
    def output_tok_s(self) -> Array:
        """Generated tokens per second, prompts included. [tokens/s]"""
        turn = self.decode_s + self.prefill_s + self.interruptions_s
        return self.batch * self.generate / turn

    @property
    def requests_per_s(self) -> Array:
        """Requests that are served per second. [1/s]"""
        return self.output_tok_s / self.generate

    @cached_property
    def buffers(self) -> Buffers:
        """Largest resident bytes by memory tier and buffer. [B]

        Every sequence counts with its full length while a group of prompts is read; engines that
        reserve less have to preempt sequences.
        """
        tables = served_buffers(
            self.technique, self.deployment, self._column, self.prompt, self.generate
        )
        return {
            tier: {name: self._squeeze(size) for name, size in buffers.items()}
            for tier, buffers in tables.items()
        }

    @cached_property
    def max_batch(self) -> Array:
        """Most sequences that fit, 0 if none does. [sequences]"""
        t, d = self.technique, self.deployment
        gpu, host = d.hardware.gpu_memory, d.hardware.host_memory
        return self._squeeze(
            largest_batch(t, d, self.prompt, self.generate, gpu, host, served=True)
        )
