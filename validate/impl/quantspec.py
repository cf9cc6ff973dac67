"""QuantSpec: drafts read the upper four bits of the cache, verification all eight."""

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.base import Technique
from kvsim.techniques.quantspec import Quantspec as Settings
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.packed import Packed
from kvsim.validate.impl.speculation import Speculative
from kvsim.validate.kernels.weights import int4_matrix
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import LayerWeights, Linear, Matrix
from kvsim.validate.tally import Kind
from kvsim.validate.transfer import to_device


class Quantspec(Speculative, Packed):
    """A hierarchical cache behind a double full-precision buffer, and a draft with INT4 MLPs.

    The buffer holds 2 G tokens, G of them always. A round drafts no more than fit in it; once it
    is full after a verification, its first half is packed. So a token's cache is the same
    however the rounds fall, and the output is that of the 8-bit target.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025, sections 4.2 and 4.3, algorithm 1. The draft's
       weights are rounded to nearest; the authors' came from a calibrated quantiser.
    """

    differences: ClassVar[dict[str, str]] = {
        "quantise": "half a buffer is packed at once; the prediction spreads it over the rounds",
    }

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Two drafts, and groups that fit the head."""
        groups = f"group={run.group},residual={2 * run.group}"
        return [f"gamma=2,{groups},weight_bits={run.weight_bits}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.term(Settings)
        super().__init__(technique, decoder, lengths, generate)
        self.half = settings.residual // 2
        if settings.residual % 2 or self.half % settings.group:
            raise InputError(
                f"quantspec: residual={settings.residual} is not twice a multiple of "
                f"group={settings.group}, so that its halves would not fill groups of keys; "
                f"choose one that is"
            )
        self.sides(2 * self.half, 4, settings.group, hierarchical=True)
        drafts = self.gamma > 0 and settings.weight_bits == 4
        layers = decoder.weights.layers if drafts else ()
        self._draft = [replace(w, up=narrow(w.up), down=narrow(w.down)) for w in layers]

    def packed_keys(self, tokens: int) -> int:
        """All halves but the one that is always in full precision."""
        return max(tokens // self.half - 1, 0) * self.half

    def packed_values(self, tokens: int) -> int:
        """Tokens whose values are packed: as many as of keys. [tokens]"""
        return self.packed_keys(tokens)

    def room(self, cached: list[int]) -> int:
        """What the buffer takes until it has to be packed."""
        return min(2 * self.half - (n - self.packed_keys(n)) for n in cached)

    def settled(self, before: list[int], after: list[int]) -> None:
        """Pack the first half of full buffers."""
        full = [
            i
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if self.packed_keys(new) > self.packed_keys(old)
        ]
        if not full:
            return
        begins = to_device([self.packed_keys(n) for n in before], self.decoder.device)
        for sides in zip(self.k, self.v, strict=True):
            with self.tally.op("quantise") as marks:
                for side in sides:
                    side.pack(marks, full, begins, self.half)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Append to the buffer; a draft reads the upper halves alone."""
        with self.tally.op("attn") as marks:
            self.k[layer].append(keys, step.positions)
            self.v[layer].append(values, step.positions)
            marks.writes(keys, values)
            upper = step.kind == "draft"
            return self.look(marks, layer, queries, step, list(step.starts), upper=upper).out.to(
                queries.dtype
            )

    def weights(self, layer: int, kind: Kind) -> LayerWeights:
        """A draft has MLPs of its own."""
        if kind == "draft" and self._draft:
            return self._draft[layer]
        return super().weights(layer, kind)

    def resident(self) -> Resident:
        """Cache and buffer, and the draft's MLPs."""
        held = super().resident()
        matrices = [m for w in self._draft for m in (w.up, w.down)]
        if matrices:  # biases are the model's own
            held["gpu"]["draft weights"] = [t for m in matrices for t in m.tensors()[:2]]
        return held


def narrow(matrix: Matrix) -> Matrix:
    """A matrix rounded to four bits."""
    assert isinstance(matrix, Linear)
    return int4_matrix(matrix.weight, matrix.bias)
