"""ZipCache: salient tokens at higher precision, found by a few probe queries.

Y. He, L. Zhang, W. Wu, J. Liu, H. Zhou, B. Zhuang, "ZipCache: accurate and efficient KV cache
quantization with salient token identification", NeurIPS 2024, https://arxiv.org/abs/2405.14256

Saliency: a tenth of the queries, the latest 5 % and 5 % at random, are probes; their scores

    A_probe = softmax(Q_probe K^T / sqrt(d_k))                                       (equation 9)

are computed apart, so that all attention can be fused. A token's saliency is the sum of its column
of A_probe over the number of probes that see it (equation 8, with A_probe for A).

Packing: the salient share r of the tokens at ``high`` bits, the rest at ``low``; in both sets keys
per channel, and values per token after each channel was divided by c_i = sqrt(max |X_i|)
(equation 6, algorithm 1). For one set of l tokens that makes 3 h d + 2 b l parameters: scales, zero
points and factors c of b sequences and h heads of width d (table 1).

Prefill (algorithm 2): probes, saliency, fused attention, then both sets are packed.
Decoding (algorithm 3): new tokens wait in fp16. Of every 100 those after the 95th but for the last,
and others at random with 5 %, are probes. After the hundredth the 100 are ranked by their saliency,
split and packed.

Where kvsim departs from the paper:

- Attention reads packed numbers in the kernels of its stack, where the released code unpacks the
  whole cache at every step; the paper's stack has that as ``packed_cache.unpack_bytes``.
- Each KV head ranks the tokens for itself, by the mean over its query heads; the paper does not say
  whether heads share a ranking.
- Probes in decoding are charged as a share ``probe`` of all steps, and the packing of a window is
  spread evenly over its steps.
"""

import numpy as np

from kvsim.engine import ops
from kvsim.engine.formats import Format, averaged, mixed_bits, separable_parameters
from kvsim.frozen import frozen
from kvsim.graph import Array, Buffers, Channel, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass
from kvsim.techniques.axes.settings import make_axis, param
from kvsim.techniques.axes.storage import WholeStorage


@frozen
class Zipcache(WholeStorage):
    """Stores salient tokens in higher precision and the others at few bits.

    Keys are quantised per channel, values per token with channel-wise scaling factors.

    References
    ----------
    .. [1] Y. He et al., "ZipCache: accurate and efficient KV cache quantization with salient
       token identification", NeurIPS 2024, section 4, equation 9, algorithms 2 and 3,
       https://arxiv.org/abs/2405.14256
    """

    name = "zipcache"
    launches = Launches(
        prefill={"attn": 3, "probe": 20, "quantise": 182}, decode={"attn": 23, "probe": 15}
    )

    salient: Number = param(
        0.6, "share of tokens at high precision", high=1, whole=False, gentler=1
    )
    high: float = param(4, "bits per number of salient tokens", choices=(2, 4, 8, 16), gentler=1)
    low: float = param(
        2, "bits per number of the other tokens", choices=(1, 2, 4, 8, 16), gentler=1
    )
    probe: float = param(0.1, "share of queries used as probes", high=1, whole=False, gentler=1)
    window: int = param(
        100, "new tokens kept in fp16 until they are packed", low=1, high=1e5, gentler=1
    )

    candidates = (  # saliency ratios around the paper's
        {"salient": make_axis(0.2, 0.4, 0.6, 0.8)},
        {"salient": 1.0, "high": 4, "low": 4},
    )

    @property
    def _bits(self) -> Number:
        return mixed_bits(self.salient, self.high, self.low)

    @property
    def stored(self) -> Format:
        """Format of the mean width, as kernels read it; ``_packed`` adds scales."""
        return averaged(self._bits)

    @property
    def by_token(self) -> bool:
        """Whether tokens can be read one by one: packed keys cannot, as they share scales."""
        return self.exact

    @property
    def exact(self) -> bool:
        """Whether both widths are 16 bits, so that nothing is packed."""
        return bool(np.all(np.asarray(self._bits) == 16))

    @property
    def _mixed(self) -> Array:  # 1 where there are tokens of both widths, else 0
        salient = np.asarray(self.salient)
        return ((salient > 0) & (salient < 1)).astype(float)

    def _packed(
        self, deployment: Deployment, batch: Number, first: Number, later: Number, times: Number
    ) -> Number:
        """Return the size of packed tokens with their scales, zero points and factors. [B]

        The number of salient tokens is rounded for the prompt and for each window. A width that no
        token has needs no parameters.

        Parameters
        ----------
        deployment : model, machine and software.
        batch : sequences.
        first : packed tokens of each prompt. [tokens]
        later : packed tokens of each sequence since then. [tokens]
        times : number of times that tokens were packed: once for the prompt and once for each
            window.
        """
        m, windows = deployment.shard, later / self.window
        # Split(K, p, r) of algorithms 2 and 3: r of the prompt, and r of every later window
        salient = np.round(self.salient * first), np.round(self.salient * self.window)
        high = salient[0] + windows * salient[1]
        low = first - salient[0] + windows * (self.window - salient[1])
        numbers = batch * m.kv_width * (high * self.high + low * self.low) / 8
        # ChannelQuant makes a scale and a zero point per channel of K, CSTQuant a c_i per channel
        # of V, for each set of tokens packed together; and two per token of V (table 1)
        sets = times * ((np.asarray(high) > 0) + 1.0 * (np.asarray(low) > 0))
        parameters = ops.FP16_BYTES * separable_parameters(
            batch, m.kv_width / 2, first + later, sets
        )
        return numbers + parameters * (np.asarray(self._bits) < 16)

    def _count_unpacked(self, at: LayerPass) -> Number:
        """Count a sequence's tokens that wait in fp16 while a pass attends. [tokens]

        The pass packs them afterwards if they fill the window.
        """
        p = at.p
        if p.prefill:
            return 0.0
        waiting: Number = np.maximum(p.context - p.prompt, 0.0) % self.window + p.new
        return np.minimum(at.kept_tokens, waiting)

    def _ages(self, at: LayerPass) -> tuple[Number, Number, Number]:
        """Count the kept tokens of the prompt, packed since, and still in fp16. [tokens]"""
        tokens, fresh = at.kept_tokens, self._count_unpacked(at)
        later = np.maximum(tokens - fresh - at.kept_of_prompt, 0.0)
        return tokens - fresh - later, later, fresh

    def number_bytes(self, at: LayerPass) -> tuple[Number, Number]:
        """Return the mean size of a cached value, for keys and for values, without scales. [B]"""
        size = np.asarray(self._bits) / 8
        return size, size

    def transfer_bytes(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Return the packed size of some tokens' keys and values, without scales. [B]"""
        size = at.p.batch * at.d.shard.kv_width / 2 * tokens * np.asarray(self._bits) / 8
        return size, size

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the op that packs the prompt, or a share of one that packs a window.

        In decoding each step is charged with 1 / ``window`` of the packing.
        """
        if self.exact:
            return []
        p = at.p
        window = 1 if p.prefill else self.window
        tokens = at.selection.count_kept_prompt(at) - p.context if p.prefill else self.window
        packed = self._packed(at.d, p.batch, tokens, 0.0, 1)
        moved = (ops.kv_bytes(at.d.shard, p.batch * tokens) + packed) / window
        return [Op("quantise", kernel="quantise", bytes={"hbm": moved}, launches=1.0 / window)]

    def extra_bytes(self, at: LayerPass) -> Number:
        """Return the bytes that attention reads beyond the mean width. [B] These are scales, zero
        points, factors and the fp16 window.
        """
        if at.p.prefill:
            return 0.0
        m, batch, stored = at.d.shard, at.p.batch, self.stored
        first, later, fresh = self._ages(at)
        times = 1 + np.ceil(later / self.window)
        packed = self._packed(at.d, batch, first, later, times)
        plain = ops.kv_bytes(m, batch * at.kept_tokens)
        return packed + ops.kv_bytes(m, batch * fresh) - plain * stored.number / ops.FP16_BYTES

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the ops that probe and rank tokens; the ranking is spread over a window."""
        probes = self._probes(at, at.kept_tokens, self._count_unpacked(at))
        if self.exact:
            return probes
        return probes + ops.id_lists(at.d, at.p.batch, 1 if at.p.prefill else self.window)

    def _probes(self, at: LayerPass, tokens: Number, fresh: Number) -> list[Op]:
        """Return the ops that score tokens by the probes, and that rank them.

        Probes of the prompt are multiplied with all its keys. In decoding a share of the steps
        probes: the attention kernel writes its scores of the tokens that wait in fp16. These are
        ranked once per window.

        Parameters
        ----------
        at : the pass through the layer.
        tokens : kept tokens per sequence. [tokens]
        fresh : of these the ones that wait in fp16. [tokens]
        """
        m, p = at.d.shard, at.p
        heads, width = p.batch * m.heads, m.k_width / m.cached_heads
        window = 1 if p.prefill else self.window
        ranked = p.batch * m.cached_heads * (tokens if p.prefill else float(self.window))
        rank = ops.top_k("saliency", ranked / window, every=window)
        if not p.prefill:
            scores = ops.SCORE * heads * fresh * self.probe
            moved: dict[Channel, Number] = {"hbm": scores}
            return [Op("probe", bytes=moved, launches=self.probe), rank]
        # A_probe (equation 9): probes x all keys, a softmax, and sums per column (equation 8)
        probes = np.maximum(np.round(self.probe * p.new), self.probe > 0)
        pairs = probes * tokens
        read = ops.FP16_BYTES * (p.batch * m.k_width * tokens + heads * width * probes)
        scores = 2 * ops.SCORE * heads * pairs  # before and after the softmax
        sums = 4.0 * p.batch * m.cached_heads * tokens * (probes > 0)
        flops = 2.0 * heads * width * pairs
        moved = {"hbm": read * (probes > 0) + scores + sums}
        return [Op("probe", kernel="attention", flops=flops, bytes=moved), rank]

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """Return the memory of packed tokens, the fp16 window, saliency and lists of tokens. [B]

        The result of attention does not depend on the order of tokens. Only software that restores
        their order keeps lists of which are salient (``selection.id_list``).
        """
        d, p, m, tokens = at.d, at.p, at.d.shard, at.kept_tokens
        below: Array = (np.asarray(self._bits) < 16).astype(float)
        heads = p.batch * m.cached_heads * below
        windows = np.floor(np.maximum(p.context - p.prompt, 0.0) / self.window)
        first = np.minimum(tokens, at.kept_of_prompt)
        later = np.minimum(tokens - first, windows * self.window)
        later = np.where(below, later, tokens - first)  # nothing waits to be packed at 16 bits
        listed = self._mixed * (d.stack.selection.id_list > 0)
        return {
            "kv": self._packed(d, p.batch, first, later, 1 + windows),
            "fp16 window": ops.kv_bytes(m, p.batch * self.window) * below,
            "indices": d.stack.selection.index_bytes * heads * tokens * listed,
            "saliency": 4.0 * heads * self.window,
        }

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return {} if self.exact else ops.prompt_kv(at.d, at.p)
