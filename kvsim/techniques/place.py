"""Placement: shares of cache, weights and hidden states on the GPU and on the host.

One family, of which full, offload, kvpr, flexgen and fastdecode are corners. Of a layer's cached
tokens one share stays on the GPU, one is copied to it in every step, a part of these is recomputed
from layer inputs instead, and one is attended to by the CPU. Copies for the next layer that loads
run beside the compute of this one, through two buffers.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from kvsim.engine import ops
from kvsim.engine.buffers import layer_weights
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Channel, Number, Op
from kvsim.techniques import recompute
from kvsim.techniques.layers import LayerPass, attend, resident_kv
from kvsim.techniques.placed_shares import PlacedShares, some
from kvsim.techniques.placement import drafted

pinned = partial(ops.copy, kernel="copy")
FREE = "attn@-2"  # a buffer is free when attention two loads earlier has read it
ROW_OR_COLUMN = ("row", "column")


@frozen
class Place(PlacedShares):
    """Shares of each layer's cache, weights and hidden states that live on the host.

    By rows (``parts`` 1) the batch passes through all layers at once; by columns each layer serves
    the parts of the batch in turn, and its streamed weights arrive spread evenly over them.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen: high-throughput generative inference of large language
       models with a single GPU", ICML 2023, sections 3.2 and 4.2.
    .. [2] C. Jiang et al., "KVPR", ACL Findings 2025, section 3.
    .. [3] J. He and J. Zhai, "FastDecode", arXiv:2403.11421, section 4.
    """

    name = "place"
    preset = False

    def on_host(self, at: LayerPass) -> Number:
        """Tokens per sequence whose keys are on the host before this pass. [tokens]"""
        return self.host_share * _before(at)

    def load(self, at: LayerPass, tokens: Number | None = None) -> Op:
        """Copy of the host's share, or of so many tokens per sequence, to the GPU."""
        if tokens is None:
            k, v = at.storage.moved(at, _before(at))
            size = self.k_host * k + self.v_host * v
        else:
            size = sum(at.storage.moved(at, tokens), 0.0)
        return ops.copy("load_kv", "h2d", size, launches=2, after=(FREE,), ahead=True)

    def fetch(self, at: LayerPass) -> list[Op]:
        """What brings the host's part of the cache into GPU memory."""
        if not self.loads:
            return []
        if self.recomputes:
            return recompute.fetch(self, at, recompute.recomputed(self, at))
        widened: list[Op] = []
        if at.storage.read != at.storage.stored:
            tokens = at.p.batch * self.v_host * _before(at)
            widened = ops.quantise(at.d, tokens, at.storage.stored, "dequantise")
        return [self.load(at), *(replace(op, after=("load_kv",)) for op in widened)]

    def store(self, at: LayerPass) -> list[Op]:
        """New tokens go home."""
        d, p, m = at.d, at.p, at.d.shard
        cpu = self.cpu_share if p.prefill else 0.0  # in decoding sent along with the queries
        if not self.loads and not some(cpu):
            return []
        drafting = at.drafting.drafts or not at.parts.keeps
        new = p.tokens if drafting else at.staying  # sent before it is known which drafts stay
        if p.prefill and at.selection.evicts != "never":
            new = p.batch * np.minimum(p.new, at.selection.prompt_kept(at))
        stored = p.batch * at.kept if d.stack.offload.store_layer else new
        k, v = at.storage.number(at)
        size = stored * (self.k_host * m.k_width * k + self.v_host * m.v_width * v)
        if self.recomputes and p.prefill:
            size = size * (1 - recompute.spared(self, at))
        size = size + cpu * ops.kv_bytes(m, new)
        after = ("qkv",)
        if at.storage.stored.packs:
            after = ("quantise",)
        elif p.prefill and at.selection.evicts != "never":
            after = ("compact",)
        sync = d.stack.offload.blocking_store and not p.prefill
        return [ops.copy("store_kv", "d2h", size, launches=2, after=after, sync=sync)]

    def finish(self, at: LayerPass) -> list[Op]:
        """Layer inputs go home too where decoding recomputes from them."""
        return recompute.store_inputs(self, at) if self.recomputes and at.p.prefill else []

    def waits(self, at: LayerPass) -> tuple[str, ...]:
        """The loaded tokens; where the whole layer is stored, it is before attention."""
        if not self.loads:
            return ()
        loaded = () if at.p.prefill else ("load_kv",)
        return (*loaded, "store_kv") if at.d.stack.offload.store_layer else loaded

    def runtime(self, at: LayerPass) -> list[Op]:
        """Fixed time of a layer that keeps some share of its cache on the host."""
        if some(self.cpu_share) and not at.p.prefill:
            return ops.runtime(at.d)
        return ops.runtime(at.d, self.v_host) if self.loads else []

    def attend(self, at: LayerPass) -> list[Op]:
        """On the GPU, on the CPU, or each over the KV heads of its share."""
        share, p, m = self.cpu_share, at.p, at.d.shard
        here = attend(at, self.waits(at))
        if not some(share):
            return here
        queries = ops.HALF * p.tokens * m.heads * m.head_dim
        whole = next(op for op in here if op.name == "attn")
        kept = ops.kv_bytes(m, p.batch * at.kept)
        read: dict[Channel, Number] = {"dram": share * (kept + 2 * queries)}
        alone = bool(np.all(share == 1))
        name = "attn" if alone else "attn_cpu"
        sent = share * (queries + ops.kv_bytes(m, p.tokens) * at.shape.keeps)
        return [
            ops.copy("send_qkv", "d2h", sent, after=("qkv",)),
            *([] if alone else [_share(op, 1 - share) for op in here]),
            Op(name, "cpu", "cpu", share * whole.flops, read, after=("send_qkv",)),
            ops.copy("return_out", "h2d", share * queries, after=(name,)),
        ]

    @property
    def _returned(self) -> tuple[str, ...]:
        """While the CPU attends for one part of the batch, the GPU goes on with the one before."""
        return ("return_out@-1" if self.parts > 1 else "return_out",)

    def output_wait(self, at: LayerPass) -> tuple[str, ...]:
        """Where the CPU attends, its answer."""
        return self._returned if some(self.cpu_share) and not at.p.prefill else ()

    def ahead(self, at: LayerPass) -> list[Op]:
        """Copies of weights and hidden states, where those live on the host."""
        found, d = [], at.d
        if some(self.weights_host):
            size = self.weights_host * layer_weights(d, at.shape) / self.parts
            found.append(pinned("load_weights", "h2d", size, after=(FREE,), ahead=True))
        if self.states_host:
            states = self.states_host * ops.HALF * at.p.tokens * d.shard.hidden
            found.append(pinned("load_states", "h2d", states, ahead=True))
            found.append(pinned("store_states", "d2h", states))
        return found

    def weights_wait(self) -> tuple[str, ...]:
        """The copy of streamed weights, where any are streamed."""
        return ("load_weights",) if some(self.weights_host) else ()

    # what is resident where

    def cache(self, at: LayerPass) -> Buffers:
        """Each share where it lives; layer inputs on the host."""
        whole = at.storage.resident(at)
        if not self.loads and not some(self.cpu_share):
            return {"gpu": whole}
        here, (k, v) = at.storage.sides(at), at.storage.home(at)
        stay = 1 - self.k_host - self.cpu_share, 1 - self.v_host - self.cpu_share
        gpu = whole | {"kv": stay[0] * here[0] + stay[1] * here[1] + at.storage.tail(at)}
        loaded = self.k_host * k + self.v_host * v
        host: dict[str, Number] = {}
        if self.recomputes:
            first, last = recompute.first_and_last(self, at)
            inputs = at.p.batch * last * recompute.input_width(at.d)
            loaded = loaded * (1 - first / np.maximum(self.host_share * at.kept, 1.0))
            host["layer inputs"] = inputs * at.storage.stored.k_number
        return {"gpu": gpu, "host": {"kv": loaded + self.cpu_share * (k + v)} | host}

    def drafts(self, at: LayerPass) -> Buffers:
        """Each share where it lives."""
        if not at.drafting.room:
            return {}
        k, v = drafted(at)
        gpu = (1 - self.k_host - self.cpu_share) * k + (1 - self.v_host - self.cpu_share) * v
        if not self.loads and not some(self.cpu_share):
            return {"gpu": {"kv": gpu}}
        return {"gpu": {"kv": gpu}, "host": {"kv": k + v - gpu}}

    def once(self, at: LayerPass) -> Buffers:
        """Two buffers for copies from the host, and a column's hidden states."""
        d, p = at.d, at.p
        gpu: dict[str, Number] = {}
        if self.loads and not at.selection.chooses:
            gpu["kv buffers"] = 2 * self._buffer(at)
        if some(self.cpu_share):  # of a prompt two layers, one computed while the other leaves
            leaving = 2 * ops.kv_bytes(d.shard, p.tokens) if p.prefill else 0.0
            gpu["kv on the way out"] = self.cpu_share * leaving
        if some(self.weights_host):
            largest = max(layer_weights(d, s) for block, _ in d.shard.layout for s in block)
            gpu["weight buffers"] = 2 * self.weights_host * largest
        others = self.parts if self.parts > 1 and not some(self.cpu_share) else 0
        states = others * ops.HALF * p.tokens * d.shard.hidden
        if not others:
            return {"gpu": gpu}
        gpu["hidden states"] = (1 - self.states_host) * states
        return {"gpu": gpu, "host": {"hidden states": self.states_host * states}}

    def _buffer(self, at: LayerPass) -> Number:
        """GPU memory that one layer's copy from the host fills. [B]"""
        drafts = drafted(at)
        size = self.k_host * drafts[0] + self.v_host * drafts[1]
        if self.recomputes:
            return size + recompute.buffer(self, at)
        k, v = at.storage.home(at)
        return size + self.k_host * k + self.v_host * v

    def scratch(self, at: LayerPass) -> Number:
        """A packed layer is widened to fp16 for attention; what is recomputed is joined to it."""
        size: Number = 0.0
        if not self.loads:
            return size
        if at.storage.read != at.storage.stored and not at.p.prefill:
            size = resident_kv(at, at.storage.read)
        return size + recompute.scratch(self, at) if self.recomputes else size

    def weights(self, size: float) -> Buffers:
        """Weights on both sides."""
        if not some(self.weights_host):
            return {"gpu": {"weights": size}}
        host = self.weights_host * size
        return {"gpu": {"weights": size - host}, "host": {"weights": host}}

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """How much is recomputed, or why nothing is."""
        return recompute.notes(self, at) if self.recomputes else ()


def _share(op: Op, share: Number) -> Op:
    """A share of an op's work."""
    moved: dict[Channel, Number] = {channel: share * n for channel, n in op.bytes.items()}
    return replace(op, flops=share * op.flops, bytes=moved)


def _before(at: LayerPass) -> Number:
    """Cached tokens per sequence before the pass. [tokens]"""
    return at.kept if at.d.stack.cache.static else np.maximum(at.kept - at.p.new, 0.0)
