"""KCache: keys on the GPU, values in host memory, the best N fetched for every query.

Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, https://arxiv.org/abs/2404.18057

For b sequences of s tokens in a model of hidden size d, whose heads are d_h wide:

1. Prefill attends to everything. The values of every layer but the first ``gpu_layers`` are copied
   to the host while the next layer computes, and leave GPU memory (equations 1 and 2 ask that the
   copy, 2 b s d bytes, is hidden); the keys stay.
2. Decoding computes S = softmax(Q K^T / sqrt(d_h)) over all keys, as always.
3. TopN picks the N largest scores of every batch entry and query head.
4. The values of those tokens, and no others, are copied to the GPU at once: nothing hides that.
5. A = S~ Part(V): the weighted sum over N values, 2 b N d FLOPs in place of 2 b s d (table 1).
   The chosen weights S~ are those of step 2, not normalised again.
   It pays where s / N exceeds the ratio of GPU and host bandwidth (equations 3 and 4).
6. The new token's key stays, its value goes to the host.

The paper has one query head per KV head. Where several share one, each chooses its own N, and no
more rows are fetched than the cache has. The host's share of the values may be packed.

``Kcache`` has the paper's settings; ``TopValues`` does steps 2 to 6 wherever values live.
"""

from typing import ClassVar

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Channel, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Part, Parts, Selection, Term, attend
from kvsim.techniques.axes.placement import HostPlacement
from kvsim.techniques.axes.settings import combine, make_axis, param


@frozen
class Kcache(Term):
    """Keeps keys on the GPU and fetches the values of the top N tokens from host memory.

    The top N tokens are chosen per sequence and query head. Nothing hides the copy: scores,
    selection, copy and weighted sum follow one another.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3, table 1,
       https://arxiv.org/abs/2404.18057
    """

    name: ClassVar[str] = "kcache"

    n: Number = param(128, "values fetched per query head", low=1, high=1e7, gentler=1)
    gpu_layers: int = param(0, "first layers whose values stay on the GPU", high=1000, gentler=1)

    candidates = combine(  # the paper's N, with and without one layer on the GPU
        gpu_layers=(0, 1), n=(make_axis(32, 64, 128, 256),)
    )

    def pieces(self) -> tuple[Part, ...]:
        """Return the selection of values, and their placement on the host."""
        return TopValues(self.n), HostPlacement(values_host=1, gpu_layers=self.gpu_layers)


@frozen
class TopValues(Selection):
    """Reads the top N values per sequence and query head, from the GPU or the host.

    References
    ----------
    .. [1] Q. He and Z. Wu, "Efficient LLM inference with KCache", 2024, section 3,
       https://arxiv.org/abs/2404.18057
    """

    name = "values"
    borrows = False
    preset = False
    chooses = True
    launches = Launches(prefill={"attn": -4}, decode={"attn": 2, "scores": 6, "topk": 2})

    n: Number = param(128, "values read per query head", low=1, high=1e7)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why it cannot run: it needs values apart from keys, and all keys on the GPU."""
        if deployment.shard.latent:
            return "keys and values share one latent (MLA)"
        place = parts.placement
        if np.any(np.asarray(place.k_host) > 0) or place.recomputes or np.any(place.on_cpu):
            return "top values need every key on the GPU: only values can be on the host"
        return ""

    def attend(self, at: LayerPass) -> list[Op]:
        """Return the ops that score all keys, and sum the values of the top N by weight."""
        d, p, m = at.d, at.p, at.d.shard
        place, storage = at.placement, at.storage
        on_host = bool(np.any(np.asarray(place.v_host) > 0))
        _, v_number = storage.number_bytes(at)
        stored_per_token = place.v_host * v_number * m.v_width  # values that go to the host [B]
        stored_after = ("quantise",) if storage.stored.packs else ("qkv",)
        prepare = storage.prepare(at)
        if p.prefill:  # step 1: 2 b s d bytes leave beside the next layer's compute (equation 1)
            store = ops.copy("store_v", "d2h", stored_per_token * p.tokens, after=stored_after)
            return [*prepare, *([store] if on_host else []), *attend(at), *storage.complete(at),
                    *at.drafting.fill_draft_cache(at)]  # fmt: skip
        length = at.cached
        chosen = np.minimum(self.n, length)
        scores = p.tokens * m.heads * length
        # step 4: N rows of every sequence and query head, but no more rows than the cache has
        rows = p.batch * np.minimum(p.new * m.heads * chosen, m.kv_heads * length)
        row_bytes = v_number * rows * m.head_dim
        weight_bytes = ops.FP16_BYTES * p.tokens * m.heads * chosen  # S~, N per query head
        if not on_host:  # a layer whose values stay on the GPU reads the chosen ones there
            # ``attend`` counts the chosen values once per KV head; here each query head has its own
            counted = v_number * p.batch * m.v_width * chosen
            extra_bytes = row_bytes - counted + weight_bytes
            select = ops.top_k("topk", scores)
            return [*prepare, *attend(at, values=chosen, extra_bytes=extra_bytes), select,
                    *storage.complete(at)]  # fmt: skip
        flops = 2.0 * p.tokens * m.heads * m.head_dim * chosen  # step 5: 2 b N d (table 1)
        out_bytes = ops.FP16_BYTES * p.tokens * m.heads * m.head_dim
        # ``attend`` counts new values and an output, which scores alone do not write
        unwritten = ops.FP16_BYTES * m.v_width * p.tokens + out_bytes
        moved: dict[Channel, Number] = {"hbm": row_bytes + weight_bytes + out_bytes}
        fetched = place.v_host * row_bytes
        store = ops.copy("store_v", "d2h", stored_per_token * at.staying, after=stored_after)
        return [
            *ops.runtime(d),
            *prepare,
            # step 2: all keys are read, and the scores of step 3 are written to GPU memory
            *attend(at, name="scores", values=0.0, extra_bytes=-unwritten),
            ops.top_k("topk", scores, sync=d.stack.selection.gather_sync),
            ops.copy("fetch_v", "h2d", fetched, rows=place.v_host * rows, after=("topk",)),
            store,
            Op("attn", "gpu", storage.read.kernel, flops, moved, after=("fetch_v",)),
            *storage.complete(at),
        ]

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return GPU memory that all layers share, by name. [B]

        In decoding it holds the fetched values and their indices, in prefill the values of two
        layers: one is copied to the host while the next is computed.
        """
        m, p, share = at.d.shard, at.p, at.placement.v_host
        if not np.any(np.asarray(share) > 0):
            return {}
        _, v_number = at.storage.number_bytes(at)
        if p.prefill:  # in the stored format
            return {"gpu": {"value buffers": share * 2 * v_number * m.v_width * p.tokens}}
        rows = share * p.tokens * m.heads * np.minimum(self.n, p.max_length)
        return {
            "gpu": {
                "value buffers": rows * (v_number * m.head_dim + at.d.stack.selection.index_bytes)
            }
        }
