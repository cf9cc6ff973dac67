"""Keys and values in fp8, widened inside the attention kernel."""

from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.graph import Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import Launches, LayerPass, Parts, Storage, pack

FP8 = Format(bits=8)


@frozen
class Fp8(Storage):
    """FP8 KV cache with one scale per tensor, as in serving engines.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433.
    """

    name = "fp8"
    launches = Launches(prefill={"attn": 3, "quantise": 6}, decode={"quantise": 6, "attn": 9})

    @property
    def stored(self) -> Format:
        """Format of the cache: 8 bits and no further parameters."""
        return FP8

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the op that converts new keys and values to fp8."""
        return pack(at)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the GPU has no fp8 cache, or an empty string: engines need Ampere or later."""
        if deployment.hardware.flops.keys() & {"fp8", "bf16"}:
            return ""
        return f"{deployment.hardware.name} is older than Ampere, so engines have no fp8 cache"
