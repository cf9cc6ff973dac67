"""CacheGen: a prompt's cache is kept on the host as a coded stream, for whoever asks for it again.

Y. Liu et al., "CacheGen: KV cache compression and streaming for fast large language model serving",
SIGCOMM 2024, section 5, https://arxiv.org/abs/2310.07240

1. Of every ten tokens the first is an anchor, in 8 bits; of the others the difference to it is
   quantised, in three thirds of the layers ever more coarsely (sections 5.1 and 5.2).
2. An arithmetic coder with a table per layer and channel turns the symbols into a stream, which
   leaves for the host. It takes about 2.1 bits per number: 3.5 to 4.3 times less than 8 bits
   (abstract).
3. A later request loads and decodes the stream in place of reading the prompt. Decoding attends to
   16-bit numbers.
"""

from dataclasses import replace
from math import ceil
from typing import Self

import numpy as np

from kvsim.engine import ops
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Channel, Number, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Parts, Placement
from kvsim.techniques.axes.settings import param

ANCHORS = 255  # symbols of an anchor: 8 bits about zero
ENTRY = 2.0  # bytes of a table's entry [B]


@frozen
class Cachegen(Placement):
    """Encodes the prompt's cache on the host, from where a later request loads it.

    References
    ----------
    .. [1] Y. Liu et al., "CacheGen: KV cache compression and streaming for fast large language
       model serving", SIGCOMM 2024, sections 5.1 and 5.2, https://arxiv.org/abs/2310.07240.
    """

    name = "cachegen"
    preset = True
    launches = Launches(prefill={"encode": 40, "decode_stream": 20})

    bits: float = param(2.1, "bits per number in the stream", low=0.1, high=16, whole=False)
    levels: int = param(
        32, "quantisation levels of differences in the first third of layers", low=4, high=256
    )
    load: bool = param(False, "the prompt is read back from its stream", choices=(True, False))

    planned = False  # a plan does not know who asks for a prompt again

    @property
    def exact(self) -> bool:
        """Always true of the request that computes the prompt; later ones load a lossy copy."""
        return not self.load

    @property
    def symbols(self) -> int:
        """Number of symbols of the coder, symmetric about zero."""
        return 2 * max(self.levels // 2 - 1, 1) + 1

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the first layers of the second and of the last third of the model."""
        layers = deployment.model.layers
        firsts = {ceil(layers * third / 3) for third in (1, 2)}
        return tuple(sorted(first for first in firsts if first < layers))

    def for_layer(self, index: int, deployment: Deployment) -> Self:
        """Return the coder of one layer: half the levels in the second third, then a quarter."""
        third = 3 * index // deployment.model.layers
        return replace(self, levels=self.levels >> third) if third else self

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the cache cannot be coded, or an empty string: it needs 16-bit heads."""
        if deployment.shard.latent:
            return f"{self.name} encodes the keys and values of heads, not a latent cache"
        if parts.storage.stored.packs:
            return f"{self.name} encodes fp16 numbers, but {parts.storage.name} packs them"
        return ""

    def _room(self, at: LayerPass, tokens: Number) -> Number:
        """Return the size of the encoded stream of some tokens of the batch. [B]"""
        return np.ceil(self.bits / 8 * tokens * (at.d.shard.k_width + at.d.shard.v_width))

    def finish(self, at: LayerPass) -> list[Op]:
        """Return the ops that encode the prompt and copy the stream to the host."""
        new = at.p.batch * np.minimum(at.p.new, at.kept_of_prompt)
        room, numbers = self._room(at, new), ops.kv_bytes(at.d.shard, new)
        moved: dict[Channel, Number] = {"hbm": numbers + room}
        coded = Op("encode", kernel="quantise", bytes=moved)
        sent = ops.copy("store_kv", "d2h", room, after=("encode",))
        if not self.load:
            return [coded, sent]
        back = ops.copy("load_stream", "h2d", room, after=("store_kv",))
        decoded = Op("decode_stream", kernel="quantise", bytes=moved, after=("load_stream",))
        return [coded, sent, back, decoded]

    def cache(self, at: LayerPass) -> Buffers:
        """Return the cache and the coder's tables on the GPU, and the stream on the host. [B]"""
        widths = at.d.shard.k_width + at.d.shard.v_width
        tables = ENTRY * widths * (ANCHORS + self.symbols)
        room = self._room(at, at.p.batch * at.kept_of_prompt)
        gpu = {**at.storage.resident(at), "symbol tables": tables}
        return {"gpu": gpu, "host": {"kv": room}}

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's encoded stream while it is sent; 0 in decoding. [B]"""
        room = self._room(at, at.p.batch * at.kept_of_prompt)
        return {"gpu": {"stream": room if at.p.prefill else 0.0 * room}}

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return remarks on the copies of a later request, and on the assumed time of the coder."""
        layers = len(at.d.model.caches)
        size = layers * float(np.max(self._room(at, at.p.batch * at.kept_of_prompt)))
        return (
            f"a later request with these prompts loads {size / 2**30:.3g} GiB in place of reading "
            f"them, and loses some quality, as the stream is quantised; the bits per number depend "
            f"on the text, and {self.bits:g} are assumed",
            "the encoder is assumed to be as fast as packing; it was not measured",
        )
