"""Layers with a recurrent state instead of a cache: bytes, FLOPs and memory of a pass.

Decoding reads a sequence's state and writes it back; a prompt is computed in chunks, within which
tokens attend to one another as in linear attention, and between which states are handed on.
"""

import numpy as np

from kvsim.engine.ops import FP16_BYTES
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import Kernel
from kvsim.models.kinds import CONVOLVED, Recurrence

STEP_FLOPS = {"decay": 5.0, "selective": 6.0, "delta": 7.0}
"""FLOPs per number of a state and token: fading 1, the outer product added 2, its read-out 2; a
selective state makes every number's fading of the token's step; the delta rule reads once more, to
correct what the state recalls of a key."""
SINGLE = 4.0  # bytes of an fp32 number [B]
DEFAULT_KERNEL = Kernel()  # of a stack that says nothing of scans
SCAN_WIDTHS = {"decay": (1.0, 1.0), "delta": (3.0, 2.0)}
"""Products of a chunk's tokens with one another, as wide as a key and as wide as a value: scores
and what they weigh; the delta rule adds products of keys, and of both with their inverse."""


def ops(deployment: Deployment, point: Point) -> list[Op]:
    """Return the convolution and the state update of one layer.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    point
        The pass, or arrays of passes.

    Returns
    -------
    list[Op]
        Ops between the layer's input and output products.

    References
    ----------
    .. [1] T. Dao and A. Gu, "Transformers are SSMs", ICML 2024, section 6.
    .. [2] S. Yang et al., "Parallelizing linear transformers with the delta rule over sequence
       length", NeurIPS 2024, section 3.2.
    """
    r = deployment.shard.recurrence
    assert r is not None
    found = [] if not r.taps else [_convolution(r, point)]
    if r.rule == "selective":
        found.append(_selective(r, point))
    elif r.rule != "convolution":
        scans = deployment.stack.kernels if r.rule == "delta" else {}  # no others were measured
        shares = scans.get("scan", DEFAULT_KERNEL)
        units = deployment.hardware.units or np.inf
        found.append(_scan(r, point, shares, units) if point.prefill else _steps(r, point))
    return [*found, end()]


def end() -> Op:
    """Return an empty op named ``attn``, for which copies that wait for attention can wait.

    Layers with a recurrent state have no attention, but copies for later layers name its end.
    """
    return Op("attn")


def resident(deployment: Deployment, batch: Number, drafts: int) -> Number:
    """Compute the states of one layer, one more per draft for a rejected one to fall back to.

    Parameters
    ----------
    deployment
        Model, machine and software stack.
    batch
        Sequences in the batch. [sequences]
    drafts
        Drafted tokens per round. [tokens]

    Returns
    -------
    Number
        Memory. [B]
    """
    r = deployment.shard.recurrence
    assert r is not None
    return batch * (1 + drafts) * r.state_bytes


def _convolution(r: Recurrence, point: Point) -> Op:
    """Return the convolution over values, keys and queries, with each sequence's latest tokens."""
    kept = 2 * CONVOLVED * point.batch * r.mixed * (r.taps - 1)
    moved = 2 * FP16_BYTES * point.tokens * r.mixed + kept
    return Op("convolution", flops=2.0 * point.tokens * r.mixed * r.taps, bytes={"hbm": moved})


def _steps(r: Recurrence, point: Point) -> Op:
    """Return the op that updates the state token by token and writes it after each."""
    states = r.matrix_bytes * (point.batch + point.tokens)
    through = FP16_BYTES * point.tokens * (r.mixed + r.inner)
    flops = STEP_FLOPS[r.rule] * point.tokens * r.inner * r.key_dim
    return Op(
        "state", kernel="recurrence", flops=flops, bytes={"hbm": states + through}, dtype="fp32"
    )


def _selective(r: Recurrence, point: Point) -> Op:
    """Return the op that updates the state token by token within one kernel, on the chip.

    A prompt's state is written at its end; in decoding after each token, as drafts may fail. Read
    are values, steps, gates, keys and queries, and every number's rate of fading.
    """
    written = point.batch if point.prefill else point.tokens
    states = r.matrix_bytes * (point.batch + written) + SINGLE * r.inner * r.key_dim
    through = FP16_BYTES * point.tokens * (4 * r.inner + r.addressed)
    flops = STEP_FLOPS[r.rule] * point.tokens * r.inner * r.key_dim
    return Op(
        "state", kernel="recurrence", flops=flops, bytes={"hbm": states + through}, dtype="fp32"
    )


def _scan(
    r: Recurrence, point: Point, shares: Kernel = DEFAULT_KERNEL, units: Number = np.inf
) -> Op:
    """Return the op that updates the state chunk by chunk, with the chunks of a head in sequence.

    Kernels that keep a head's state on the chip do not write and read that of every chunk.
    """
    keys, values = SCAN_WIDTHS[r.rule]
    within = 2.0 * r.chunk * r.heads * (keys * r.key_dim + values * r.head_dim)
    between = 2 * 2.0 * r.inner * r.key_dim
    states = 2 * r.matrix_bytes * (shares.input_passes * point.tokens / r.chunk + point.batch)
    through = 2 * FP16_BYTES * point.tokens * (r.mixed + r.inner)
    return Op(
        "state",
        kernel="scan" if r.rule == "delta" else "prompt",
        flops=point.tokens * (within + between),
        bytes={"hbm": states + through},
        columns=point.tokens * r.heads,
        chain=shares.walk * point.new * np.maximum(point.batch * r.heads / units, 1.0),
    )
