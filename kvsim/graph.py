"""What a technique states: operating points, ops, steps and decoding rounds; resident bytes.

Nothing here computes time. All numbers may be scalars or arrays that broadcast with the
point's batch and context; SI units throughout.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.frozen import frozen

Array = NDArray[np.floating]
Number = float | Array

Stream = Literal["gpu", "h2d", "d2h", "cpu", "disk_read", "disk_write"]
"""In-order queues of work: GPU kernels, copies to the GPU, copies to the host, host threads, and
copies between the host and a drive behind it."""

Channel = Literal["hbm", "dram", "h2d", "d2h", "link", "disk_read", "disk_write"]
"""What bytes move through: GPU memory, host memory, the host link's two directions, GPU to GPU,
and the drive's two directions."""

Tier = Literal["gpu", "host", "disk"]

Buffers = Mapping[Tier, Mapping[str, Number]]
"""Resident bytes by tier and buffer name. [B]"""


@frozen
class Point:
    """One forward pass over a batch of sequences, or arrays of such passes.

    One set of formulas serves every phase: decode has ``new = 1``, speculative verification
    ``new = gamma + 1``, prefill ``context = 0`` and ``new = prompt``.
    """

    batch: Number  # sequences in the batch [sequences]
    context: Number  # tokens cached per sequence before this pass [tokens]
    new: Number  # query tokens per sequence in this pass [tokens]
    prompt: Number  # tokens per sequence in the prompt [tokens]
    max_length: Number  # prompt and all generated tokens, what a static cache is sized for [tokens]
    prefill: bool = False  # whether this pass reads the prompt
    beside: bool = False  # whether a part of a prompt is read in the same pass
    ranks: Number | None = None  # tokens that all data-parallel ranks bring to routed experts, over
    # those of this one (None: as many as there are ranks)

    @property
    def length(self) -> Number:
        """Tokens cached per sequence after this pass. [tokens]"""
        return self.context + self.new

    @property
    def tokens(self) -> Number:
        """Query tokens of the whole batch. [tokens]"""
        return self.batch * self.new


@frozen
class Op:
    """A kernel, a copy or a piece of host work.

    An op without work (FLOPs, bytes, rows, fixed or host time) is not launched and takes no time.

    ``after`` names the ops it waits for besides its own stream's order: ``"qkv"`` in the same
    layer, ``"attn@-2"`` two layers earlier, ``"topk@step-1"`` the same layer one step earlier.
    """

    name: str
    stream: Stream = "gpu"
    kernel: str = "pointwise"  # kernel class, a row of the stack's table
    flops: Number = 0.0  # floating-point operations [FLOP]
    bytes: Mapping[Channel, Number] = field(default_factory=dict)  # bytes by channel [B]
    unpacked: Number = 0.0  # cached numbers that the kernel widens by arithmetic [numbers]
    rows: Number = 0.0  # rows gathered one by one from scattered addresses
    size: Number = np.inf  # rows of a product, attention's new tokens; fills the units
    columns: Number = np.inf  # output columns of a product, a prompt's queries in all heads
    slower: Number = 1.0  # times longer that the kernel's work takes for this shape of heads
    dtype: str = "fp16"  # number format of the arithmetic
    launches: Number = 1.0  # kernels or copies issued; below 1 on average if not every step
    fixed: Number = 0.0  # time that no amount of bandwidth removes [s]
    host: Number = 0.0  # host time to issue it, besides that of its launches and class [s]
    chain: Number = 0.0  # its longest part that nothing divides, however idle the GPU is [s]
    times: Number = 1.0  # how often it is run: passes over parts of a prompt
    after: tuple[str, ...] = ()
    prefetch: bool = False  # issued one layer early, as a prefetch into a double buffer
    sync: bool = False  # the host waits for the end of this op before it issues more

    @property
    def issued(self) -> Number:
        """Share of the steps in which the op is launched at all."""
        if isinstance(self.launches, np.ndarray):
            return np.minimum(1.0, self.launches)
        return min(1.0, self.launches)


@frozen
class Group:
    """A block of consecutive layers, repeated ``count`` times; a layer is its ops in order."""

    layers: tuple[tuple[Op, ...], ...]
    count: int


@frozen
class Step:
    """One forward pass: groups of layers in order, then the head."""

    groups: tuple[Group, ...]
    head: tuple[Op, ...]


@frozen
class Cycle:
    """One decoding round: the passes it consists of and the tokens it yields per sequence."""

    steps: tuple[Step, ...]
    tokens: Number
