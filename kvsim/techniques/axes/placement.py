"""Placement of caches, weights and hidden states: shares on the host, or on a drive.

One family, of which full, offload, FlexGen, FastDecode, KCache and KVPR are corners. Of a layer's
cached tokens one share stays on the GPU, one is copied to it in every step, and one is attended to
by the CPU. Copies for the next layer that loads run beside the compute of this one, through two
buffers. KVPR's recomputation of a part of the copied share is in ``papers.kvpr``.

A share of what the host has may in turn lie on a drive behind it, which is read and written beside
the copies between host and GPU.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import layer_weights
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Channel, Number, Op, Stream, Tier
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import (
    Launches,
    LayerPass,
    Parts,
    Placement,
    attend,
    draft_bytes,
    resident_kv,
)
from kvsim.techniques.axes.settings import param

copy_pinned = partial(ops.copy, kernel="copy")
BUFFER_FREE = "attn@-2"  # a buffer is free when attention two loads earlier has read it
ROW_OR_COLUMN = ("row", "column")
CPU_CACHE = Launches(decode={"attn": 13})
PARTED_CACHE = Launches(prefill={"attn": 4}, decode={"attn": 4})
STREAMED_WEIGHTS = "load_weights"  # the copy of a layer's weights from the host
DISK = "_disk"  # after the name of a copy: the copy of its part between host and drive
PARTED_WEIGHTS = Launches(
    prefill={"qkv": 3, "out": 3, "up": 3, "down": 3},
    decode={"qkv": 3, "out": 3, "up": 3, "down": 3},
)


@frozen
class HostPlacement(Placement):
    """The shares of each layer's cache, weights and hidden states that are in host memory.

    With ``parts=1`` the whole batch passes through one layer after another (row order). With more,
    each layer processes the parts of the batch in turn (column order), while the next layer's
    weights are streamed evenly.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen: high-throughput generative inference of large language
       models with a single GPU", ICML 2023, sections 3.2 and 4.2, https://arxiv.org/abs/2303.06865
    .. [2] J. He and J. Zhai, "FastDecode", section 4, https://arxiv.org/abs/2403.11421
    """

    name = "place"
    preset = False
    launches = Launches(
        prefill={"attn": 4, "store_inputs": 3},
        decode={"attn": 1, "recompute": 2, "place_recomputed": 9},
    )

    host_share: Number = param(0, "share of cached tokens on the host", high=1, whole=False)
    split: Number | str = param(
        0, "tokens on the host that are recomputed", high=1e7, choices=("auto",)
    )
    cpu_share: Number = param(
        0, "share of cached tokens that the CPU attends to", high=1, whole=False
    )
    values_host: Number = param(0, "share of cached values on the host", high=1, whole=False)
    weights_host: Number = param(0, "share of the weights on the host", high=1, whole=False)
    states_host: float = param(0, "share of the hidden states on the host", high=1, whole=False)
    cache_disk: Number = param(
        0, "share of the host's cached tokens on the disk", high=1, whole=False, quiet=True
    )
    weights_disk: Number = param(
        0, "share of the host's weights on the disk", high=1, whole=False, quiet=True
    )
    states_disk: float = param(
        0, "share of the host's states on the disk", high=1, whole=False, quiet=True
    )
    parts: int = param(1, "parts of the batch in column order", low=1, high=1024)
    gpu_layers: int = param(0, "first layers whose cache stays on the GPU", high=1000)

    @property
    def k_host(self) -> Number:
        """Share of the cached keys that is copied or recomputed."""
        return self.host_share

    @property
    def v_host(self) -> Number:
        """Share of the cached values that is copied or recomputed."""
        if not positive(self.values_host):
            return self.host_share
        return np.maximum(self.host_share, self.values_host)

    @property
    def on_cpu(self) -> Number:
        """Share of the cached tokens that the CPU attends to."""
        return self.cpu_share

    @property
    def loads(self) -> bool:
        """Whether every step copies a part of the cache to the GPU."""
        return positive(self.host_share) or positive(self.values_host)

    @property
    def launch_tables(self) -> tuple[Launches, ...]:
        """Kernels of each op; a cache on both GPU and host needs some for either."""
        parted = (PARTED_CACHE, self.host_share), (PARTED_WEIGHTS, self.weights_host)
        found = [table for table, x in parted if positive(x) and not np.all(x == 1)]
        return (CPU_CACHE if positive(self.cpu_share) else HostPlacement.launches, *found)

    @property
    def tiles(self) -> int:
        """Number of parts into which each layer divides the batch."""
        return self.parts

    @property
    def streams(self) -> bool:
        """Whether copies are prefetched; False if values are fetched after tokens are chosen."""
        moves = (self.host_share, self.cpu_share, self.weights_host, self.states_host)
        return any(map(positive, moves))

    @property
    def fills_drive(self) -> bool:
        """Whether a share of cache, weights or hidden states is on a drive."""
        return any(map(positive, (self.cache_disk, self.weights_disk, self.states_disk)))

    @property
    def streams_weights(self) -> bool:
        """Whether a share of the weights is on the host."""
        return positive(self.weights_host)

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the index of the first layer whose cache is offloaded; empty if that is layer 0.

        Parameters
        ----------
        deployment : model, machine and software.
        """
        first = self._first_offloaded(deployment)
        return (first,) if first else ()

    def for_layer(self, index: int, deployment: Deployment) -> Self:
        """Return the placement of one layer; the first layers keep their cache on the GPU."""
        if index >= self._first_offloaded(deployment):
            return self
        return self.weights_alone()

    def weights_alone(self) -> Self:
        """Return this placement for weights and hidden states, with all caches on the GPU."""
        own = {"host_share": 0, "values_host": 0, "split": 0, "cpu_share": 0, "cache_disk": 0}
        return replace(self, **own, gpu_layers=0)

    def _first_offloaded(self, deployment: Deployment) -> int:
        """Index of the first layer that is offloaded; some runtimes never offload the first."""
        resident = deployment.stack.offload.resident_layers if positive(self.host_share) else 0
        return max(self.gpu_layers, resident)

    @property
    def exceeds(self) -> bool:
        """Whether the shares of the cached tokens add up to more than all of them."""
        return bool(np.any(np.asarray(self.host_share) + self.cpu_share > 1 + 1e-12))

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run: shares above 1 in sum, or storage that the CPU cannot read.

        Parameters
        ----------
        deployment : model, machine and software.
        parts : those of the other axes, in the same layers.
        """
        if self.exceeds:
            return f"host_share and cpu_share={self.cpu_share} of a layer's tokens exceed 1"
        selection, storage = parts.selection, parts.storage
        if self.fills_drive:
            if not deployment.hardware.disk_memory:
                return "a share is on the disk, but the machine has none: give its size with --disk"
            if positive(self.cache_disk) and selection.chooses:
                return f"{selection.name} fetches single tokens, which are not read from a disk"
        if not positive(self.cpu_share):
            return ""
        if deployment.shard.latent:
            return "no CPU attention for a latent cache (MLA)"
        if storage.stored.packs:
            return f"the CPU attends only to fp16, not to {storage.name}"
        if selection.evicts == "always" and selection.scored:
            return f"{selection.name} ranks tokens by scores, which the CPU's attention keeps"
        return ""

    # ops of a layer

    def runtime(self, at: LayerPass) -> list[Op]:
        """Return the fixed time per layer of keeping a part of its cache on the host."""
        if positive(self.cpu_share) and not at.p.prefill:
            return ops.runtime(at.d)
        return ops.runtime(at.d, self.v_host) if self.loads else []

    def load(self, at: LayerPass, tokens: Number | None = None) -> Op:
        """Return the copy of the host's share of a layer's cache to the GPU.

        Parameters
        ----------
        at : the pass through the layer.
        tokens : tokens per sequence to copy in place of the host's share. [tokens]
        """
        if tokens is None:
            k, v = at.storage.transfer_bytes(at, tokens_before(at))
            size = self.k_host * k + self.v_host * v
        else:
            size = sum(at.storage.transfer_bytes(at, tokens), 0.0)
        return ops.copy("load_kv", "h2d", size, launches=2, after=(BUFFER_FREE,), prefetch=True)

    def fetch(self, at: LayerPass) -> list[Op]:
        """Return the ops that copy the host's share to the GPU, and dequantise it if needed."""
        if not self.loads:
            return []
        widened: list[Op] = []
        if at.storage.read != at.storage.stored:
            tokens = at.p.batch * self.v_host * tokens_before(at)
            widened = ops.quantise(at.d, tokens, at.storage.stored, "dequantise")
        loaded = copy_tiers(self.load(at), self.cache_disk)
        return [*loaded, *(replace(op, after=tuple(x.name for x in loaded)) for op in widened)]

    def store(self, at: LayerPass) -> list[Op]:
        """Return the ops that copy new keys and values to the host."""
        d, p, m = at.d, at.p, at.d.shard
        cpu = self.cpu_share if p.prefill else 0.0  # in decoding sent along with the queries
        if not self.loads and not positive(cpu):
            return []
        drafting = at.drafting.drafts or not at.parts.keeps
        new = p.tokens if drafting else at.staying  # sent before it is known which drafts stay
        if p.prefill and at.selection.evicts != "never":
            new = p.batch * np.minimum(p.new, at.selection.count_kept_prompt(at))
        k, v = at.storage.number_bytes(at)
        size = new * (self.k_host * m.k_width * k + self.v_host * m.v_width * v)
        size = size * self.sent_share(at) + cpu * ops.kv_bytes(m, new)
        after = ("qkv",)
        if at.storage.stored.packs:
            after = ("quantise",)
        elif p.prefill and at.selection.evicts != "never":
            after = ("compact",)
        sync = d.stack.offload.blocking_store and not p.prefill
        sent = ops.copy("store_kv", "d2h", size, launches=2, after=after, sync=sync)
        return copy_tiers(sent, self.cache_disk)

    def sent_share(self, at: LayerPass) -> Number:
        """Return the share of new keys and values that is really sent, of those placed on the host.

        Parameters
        ----------
        at : the pass through the layer.
        """
        return 1.0

    def attention_waits(self, at: LayerPass) -> tuple[str, ...]:
        """Return the names of the copies that attention waits for in decoding."""
        if at.p.prefill or not self.loads:
            return ()
        return tier_names("load_kv", self.cache_disk)

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops of attention on the GPU, the CPU or both, each over its KV heads."""
        share, p, m = self.cpu_share, at.p, at.d.shard
        here = attend(at, self.attention_waits(at))
        if not positive(share):
            return here
        queries = ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
        whole = next(op for op in here if op.name == "attn")
        kept = ops.kv_bytes(m, p.batch * at.kept_tokens)
        read: dict[Channel, Number] = {"dram": share * (kept + 2 * queries)}
        alone = bool(np.all(share == 1))
        name = "attn" if alone else "attn_cpu"
        sent = share * (queries + ops.kv_bytes(m, p.tokens) * at.shape.keeps)
        return [
            ops.copy("send_qkv", "d2h", sent, after=("qkv",)),
            *([] if alone else [_scale_op(op, 1 - share) for op in here]),
            Op(name, "cpu", "cpu", share * whole.flops, read, after=("send_qkv",)),
            ops.copy("return_out", "h2d", share * queries, after=(name,)),
        ]

    def output_wait(self, at: LayerPass) -> tuple[str, ...]:
        """Return the names of the copies of the CPU's attention output to the GPU."""
        if not positive(self.cpu_share) or at.p.prefill:
            return ()
        # while the CPU attends for one part of the batch, the GPU goes on with the one before
        return ("return_out@-1" if self.parts > 1 else "return_out",)

    def prefetch(self, at: LayerPass) -> list[Op]:
        """Return the copies of a layer's offloaded weights and hidden states.

        These are the loads of weights and hidden states from the host, which may start before the
        layer, and the stores of new hidden states to the host. If a part is on a drive, the copies
        between host and drive are included.

        Parameters
        ----------
        at : the pass through the layer.

        Returns
        -------
        list of Op
            Copies for one part of the batch; empty if weights and hidden states stay on the GPU.
        """
        found, d = [], at.d
        if positive(self.weights_host):
            size = self.weights_host * layer_weights(d, at.shape) / self.parts
            load = copy_pinned(STREAMED_WEIGHTS, "h2d", size, after=(BUFFER_FREE,), prefetch=True)
            found += copy_tiers(load, self.weights_disk)
        if self.states_host:
            states = self.states_host * ops.FP16_BYTES * at.p.tokens * d.shard.hidden
            load = copy_pinned("load_states", "h2d", states, prefetch=True)
            store = copy_pinned("store_states", "d2h", states)
            found += [x for op in (load, store) for x in copy_tiers(op, self.states_disk)]
        return found

    def weights_wait(self) -> tuple[str, ...]:
        """Return the name of the copy of streamed weights, if there is one."""
        if not positive(self.weights_host):
            return ()
        return tier_names(STREAMED_WEIGHTS, self.weights_disk)

    # what is resident where

    def cache(self, at: LayerPass) -> Buffers:
        """Return the memory of each share, by tier and name. [B]"""
        whole = at.storage.resident(at)
        if not self.loads and not positive(self.cpu_share):
            return {"gpu": whole}
        here, home = at.storage.side_bytes(at), at.storage.host_bytes(at)
        stay = 1 - self.k_host - self.cpu_share, 1 - self.v_host - self.cpu_share
        gpu = whole | {"kv": stay[0] * here[0] + stay[1] * here[1] + at.storage.tail_bytes(at)}
        away = split_tiers(self.loaded_cache(at, home), self.cache_disk)
        host = away["host"]
        return away | {
            "gpu": gpu,
            "host": {**host, "kv": host["kv"] + self.cpu_share * sum(home)},
        }

    def loaded_cache(self, at: LayerPass, home: tuple[Number, Number]) -> dict[str, Number]:
        """Return the bytes of one layer's cache on the host that are copied to the GPU. [B]

        Parameters
        ----------
        home : size of all keys and of all values in the host's format. [B]
        """
        return {"kv": self.k_host * home[0] + self.v_host * home[1]}

    def draft_room(self, at: LayerPass) -> Buffers:
        """Return the memory that a layer's cache reserves for draft tokens, by tier and name. [B]

        Parameters
        ----------
        at : the pass through the layer.
        """
        if not at.drafting.room:
            return {}
        k, v = draft_bytes(at)
        gpu = (1 - self.k_host - self.cpu_share) * k + (1 - self.v_host - self.cpu_share) * v
        if not self.loads and not positive(self.cpu_share):
            return {"gpu": {"kv": gpu}}
        return {"gpu": {"kv": gpu}, "host": {"kv": k + v - gpu}}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of two buffers for copies from the host, and of hidden states. [B]

        Hidden states are kept if parts of the batch pass through a layer one after another.
        """
        d, p = at.d, at.p
        gpu: dict[str, Number] = {}
        if self.loads and not at.selection.chooses:
            gpu["kv buffers"] = 2 * self.load_buffer(at)
        if positive(self.cpu_share):  # of a prompt two layers, one computed while the other leaves
            leaving = 2 * ops.kv_bytes(d.shard, p.tokens) if p.prefill else 0.0
            gpu["kv on the way out"] = self.cpu_share * leaving
        if positive(self.weights_host):
            largest = max(layer_weights(d, s) for block, _ in d.shard.layout for s in block)
            gpu["weight buffers"] = d.stack.offload.weight_buffers * self.weights_host * largest
        others = self.parts if self.parts > 1 and not positive(self.cpu_share) else 0
        states = others * ops.FP16_BYTES * p.tokens * d.shard.hidden
        if not others:
            return {"gpu": gpu}
        gpu["hidden states"] = (1 - self.states_host) * states
        away = {"hidden states": self.states_host * states}
        return split_tiers(away, self.states_disk) | {"gpu": gpu}

    def load_buffer(self, at: LayerPass) -> Number:
        """Return the GPU memory for copying one layer's cache from the host.

        Parameters
        ----------
        at : the pass through the layer.

        Returns
        -------
        float or array
            Size of the buffer. [B]
        """
        k, v = at.storage.host_bytes(at)
        return self.drafted_on_host(at) + self.k_host * k + self.v_host * v

    def drafted_on_host(self, at: LayerPass) -> Number:
        """Return the host's share of a round's drafts in one layer.

        Parameters
        ----------
        at : the pass through the layer.

        Returns
        -------
        float or array
            Their size. [B]
        """
        k, v = draft_bytes(at)
        return self.k_host * k + self.v_host * v

    def scratch(self, at: LayerPass) -> Number:
        """Return the memory of one layer's cache, if attention needs it widened to fp16. [B]"""
        if self.loads and at.storage.read != at.storage.stored and not at.p.prefill:
            return resident_kv(at, at.storage.read)
        return 0.0

    def weights(self, size: float) -> Buffers:
        """Return the memory of a layer's weights, by tier. [B]

        Parameters
        ----------
        size : of the weights. [B]

        Returns
        -------
        Buffers
            Bytes by tier and name. [B]
        """
        if not positive(self.weights_host):
            return {"gpu": {"weights": size}}
        host = self.weights_host * size
        return split_tiers({"weights": host}, self.weights_disk) | {"gpu": {"weights": size - host}}


def copy_tiers(copied: Op, share: Number) -> list[Op]:
    """Return a copy between GPU and host, and the copy between host and drive beside it.

    Data on the drive passes through the host in pieces, so both copies run at once; a drive is
    therefore never faster than the host.

    Parameters
    ----------
    copied : the copy of all data between GPU and host.
    share : share of the data that is on the drive.
    """
    if not positive(share):
        return [copied]
    way: Stream = "disk_read" if copied.stream == "h2d" else "disk_write"
    link: Channel = "h2d" if copied.stream == "h2d" else "d2h"
    size = share * copied.bytes[link]
    name, after = copied.name + DISK, copied.after
    return [copied, copy_pinned(name, way, size, after=after, prefetch=copied.prefetch)]


def tier_names(name: str, share: Number) -> tuple[str, ...]:
    """Return the names of the ops that ``copy_tiers`` makes of a copy.

    Parameters
    ----------
    name : of the copy.
    share : share of the data that is on the drive.
    """
    return (name, name + DISK) if positive(share) else (name,)


def split_tiers(held: Mapping[str, Number], share: Number) -> dict[Tier, Mapping[str, Number]]:
    """Divide offloaded data between the host and the drive. [B]

    Parameters
    ----------
    held : bytes by name. [B]
    share : share that is on the drive.
    """
    if not positive(share):
        return {"host": held}
    return {
        "host": {name: (1 - share) * size for name, size in held.items()},
        "disk": {name: share * size for name, size in held.items()},
    }


def tokens_before(at: LayerPass) -> Number:
    """Return the cached tokens per sequence before the pass.

    Parameters
    ----------
    at : the pass through the layer.

    Returns
    -------
    float or array
        Number of tokens. [tokens]
    """
    return at.kept_tokens if at.d.stack.cache.static else np.maximum(at.kept_tokens - at.p.new, 0.0)


def positive(share: Any) -> bool:
    """Return whether a share, or any of an array of them, is above 0.

    Parameters
    ----------
    share : the share.
    """
    return bool(np.any(share > 0) if isinstance(share, np.ndarray) else share > 0)


def _scale_op(op: Op, share: Number) -> Op:
    """A share of an op's work."""
    moved: dict[Channel, Number] = {channel: share * n for channel, n in op.bytes.items()}
    return replace(op, flops=share * op.flops, bytes=moved)
