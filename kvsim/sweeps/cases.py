"""What chunks of a sweep are evaluated for, and the columns that each kind answers with."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Hardware, Stack
from kvsim.models.model import Model
from kvsim.sweeps.spec import SPREAD, Value
from kvsim.traces.requests import Requests


@frozen
class Points:
    """A stretch of the points of two axes, the last of which varies first.

    It is sent to other processes, so it holds axes and not the points.

    Attributes
    ----------
    batches, contexts
        The axes; of batches, those that occur.
    first, size
        Where the stretch begins, and its points.
    """

    batches: Array
    contexts: Array
    first: int
    size: int

    @property
    def spread(self) -> tuple[Array, Array]:
        """Batch and context of each point. (n,)"""
        row, column = np.divmod(np.arange(self.first, self.first + self.size), self.contexts.size)
        return self.batches[row], self.contexts[column]


def divide_points(batches: Array, contexts: Array, most: int) -> Iterator[Points]:
    """Divide the points of two axes into stretches of limited size.

    Parameters
    ----------
    batches, contexts
        The values of the axes; contexts vary first.
    most
        Most points of a stretch.

    Yields
    ------
    Points
        The stretches in order; together they have every point once.
    """
    width, total = contexts.size, batches.size * contexts.size
    for first in range(0, total, most):
        size = min(most, total - first)
        row, last = first // width, (first + size - 1) // width
        yield Points(batches[row : last + 1].copy(), contexts, first - row * width, size)


@frozen
class Case:
    """What a chunk is evaluated for.

    Attributes
    ----------
    values
        One value per axis that chunks are split by.
    points
        Of predictions: those of the chunk.
    """

    values: dict[str, Value]
    model: Model
    hardware: tuple[Hardware, ...]
    stack: Stack
    points: Points | None
    requests: Requests | None

    def deployment(self, gpu: int = 0, tp: int = 0) -> Deployment:
        """Build the deployment of the model on one of the GPUs.

        Parameters
        ----------
        gpu
            Index of the GPU in ``hardware``.
        tp
            Tensor-parallel GPUs; 0 for the value of the case.

        Returns
        -------
        Deployment
            The model, hardware and stack.

        Raises
        ------
        InputError
            If the model cannot be divided so, or weights have no such format.
        """
        degree = tp or int(self.values["tp"])
        pp, dp, ep = (int(self.values.get(name, 1)) for name in SPREAD)
        weights = str(self.values["weights"])
        return Deployment(self.model, self.hardware[gpu], self.stack, weights, degree, pp, dp, ep)

    def number(self, name: str) -> float:
        """Look up the value of a numeric axis.

        Parameters
        ----------
        name
            The axis.

        Returns
        -------
        float
            The value, in the axis's unit.
        """
        return float(self.values[name])


SEPARATOR = "+"  # of several GPUs that a fleet may be of
Columns = dict[str, Any]
COLUMNS: dict[str, dict[str, type]] = {
    "predict": {
        "batch": int, "context": int, "ttft_s": float, "tpot_s": float, "decode_tok_s": float,
        "gpu_bytes": float, "host_bytes": float, "fits": bool, "reason": str,
    },
    "plan": {
        "technique": str, "batch": int, "ttft_s": float, "tpot_s": float, "output_tok_s": float,
        "gpu_bytes": float, "host_bytes": float, "usd_per_million_tokens": float, "reason": str,
    },
    "simulate": {
        "finished": int, "refused": int, "ttft_p50_s": float, "ttft_p90_s": float,
        "ttft_p99_s": float, "tpot_p50_s": float, "tpot_p90_s": float, "tpot_p99_s": float,
        "latency_p99_s": float, "good_share": float, "goodput_per_s": float, "output_tok_s": float,
        "busy_share": float, "kv_peak_share": float, "prefix_hit_share": float, "preemptions": int,
        "usd": float, "hosts_used": str, "reason": str,
    },
    "capacity": {
        "fleet": str, "replicas": int, "gpus": int, "usd_per_hour": float, "ttft_s": float,
        "tpot_s": float, "relaxation_usd_per_hour": float, "likelihood": float,
        "hosts_used": str, "reason": str,
    },
}  # fmt: skip
"""The results of each kind; what does not exist is null, and the reason says why.

``hosts_used`` names the GPUs whose host memory keeps caches, with ``SEPARATOR`` between several.
"""


def no_answer(kind: str, reason: str) -> Columns:
    """Build the row of a case without an answer.

    Parameters
    ----------
    kind
        A key of ``COLUMNS``.
    reason
        Why there is none.

    Returns
    -------
    dict
        Empty texts and NaN by column, and the reason.
    """
    return {name: "" if of is str else np.nan for name, of in COLUMNS[kind].items()} | {
        "reason": reason
    }
