"""Where caches and weights live: the axis and its default, the GPU."""

from typing import ClassVar

from kvsim.frozen import frozen
from kvsim.graph import Buffers, Number, Op
from kvsim.techniques.layers import LayerPass, attend
from kvsim.techniques.terms import Axis, Part


@frozen
class Placement(Part):
    """Where cached tokens, weights and hidden states live; the defaults keep all on the GPU."""

    name = "gpu"
    axis: ClassVar[Axis] = "placement"

    @property
    def exact(self) -> bool:
        """Moving numbers does not change them."""
        return True

    @property
    def k_host(self) -> Number:
        """Share of the cached keys that lives in host memory and is copied to the GPU."""
        return 0.0

    @property
    def v_host(self) -> Number:
        """Share of the cached values that lives in host memory and is copied to the GPU."""
        return 0.0

    @property
    def on_cpu(self) -> Number:
        """Share of the cached tokens that the CPU attends to."""
        return 0.0

    @property
    def recomputes(self) -> bool:
        """Whether some keys and values are recomputed from layer inputs."""
        return False

    @property
    def streams(self) -> bool:
        """Whether copies run ahead of layers, or the CPU attends."""
        return False

    def weights_alone(self) -> "Placement":
        """The same for weights and hidden states, with caches on the GPU."""
        return self

    @property
    def tiles(self) -> int:
        """Parts of the batch that pass through a layer one after another."""
        return 1

    def runtime(self, at: LayerPass) -> list[Op]:
        """Fixed time of the software that moves caches."""
        return []

    def fetch(self, at: LayerPass) -> list[Op]:
        """What brings the cache to the GPU in decoding."""
        return []

    def store(self, at: LayerPass) -> list[Op]:
        """What sends new tokens home."""
        return []

    def waits(self, at: LayerPass) -> tuple[str, ...]:
        """Ops that attention waits for."""
        return ()

    def attend(self, at: LayerPass) -> list[Op]:
        """Attention of a decoding pass."""
        return attend(at)

    def finish(self, at: LayerPass) -> list[Op]:
        """What else is sent home once the prompt has been attended to."""
        return []

    def ahead(self, at: LayerPass) -> list[Op]:
        """Copies of weights and hidden states, which start before the layer does."""
        return []

    def weights_wait(self) -> tuple[str, ...]:
        """Ops that the layer's first product waits for."""
        return ()

    def output_wait(self, at: LayerPass) -> tuple[str, ...]:
        """Ops that the output projection waits for."""
        return ()

    def cache(self, at: LayerPass) -> Buffers:
        """What one layer's storage keeps, by tier. [B]"""
        return {"gpu": at.storage.resident(at)}

    def drafts(self, at: LayerPass) -> Buffers:
        """Room for a round's drafts in the layer's own cache. [B]"""
        return {"gpu": {"kv": sum(drafted(at))}} if at.drafting.room else {}

    def weights(self, size: float) -> Buffers:
        """Weights of one layer of that size, by tier. [B]"""
        return {"gpu": {"weights": size}}


def drafted(at: LayerPass) -> tuple[Number, Number]:
    """Keys and values of the drafts that a layer's own cache has room for. [B]"""
    tokens = at.p.batch * at.drafting.room
    k, v = at.storage.number(at)
    return tokens * at.d.shard.k_width * k, tokens * at.d.shard.v_width * v
