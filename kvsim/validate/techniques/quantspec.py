"""QuantSpec: self-speculative decoding over two views of one quantised cache.

R. Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
ICML 2025, https://arxiv.org/abs/2502.10424.

Every cached number is 8 bits in two halves of 4: C8 = 2**4 C_U + C_L (section 4.2), so

    C_U S4 + Z4                     what drafts read: the upper halves alone, INT4
    C_U S4 + C_L S4 / 2**4 + Z4     what verification reads: both halves, INT8

C_U is rounded to the nearest of 16 levels from the least number to the greatest. C_L is the error
of that, rounded to sixteenths of a level from -8 to 7 (``kernels.quantise``,
``hierarchical=True``).
Keys share a scale by channel, values by token, in groups of G numbers.

Algorithm 1, and where it stands here:

- lines 1 to 3, the prompt: read in full precision, packed but for its latest G to 2 G tokens, which
  stay in the full-precision buffers C_F1 and C_F2 (``Hierarchical.fill``)
- lines 4 to 9, drafts: gamma passes of the model itself with weights of 4 bits over the upper
  halves and both buffers; their keys and values go into C_F2 (``SelfDrafter.weights``,
  ``Hierarchical.attend``)
- line 10, verification: one pass of the full weights over both halves writes its own keys and
  values over those of the drafts (``drafting.SpeculativeDrafter.decode_round``)
- lines 11 to 22, a draft stays while the target would have drawn it, and the target's own token
  follows (``drafting.verify_likeliest`` and ``verify_drawn``); rejected ones are simply overwritten
- lines 24 to 27, when the buffers are full after a round: C_F1 is packed, C_F2 becomes C_F1
  (``Hierarchical.commit``)

Where this departs from the paper: of the drafts' weights those of MLPs alone have 4 bits, rounded
to nearest, where the authors' come from a calibrated quantiser; every layer is quantised, where
algorithm 1 can leave out L_S sensitive ones.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.quantspec import Hierarchical as Settings
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.drafting import SelfDrafter
from kvsim.validate.parts.packed import PackedStore
from kvsim.validate.parts.store import CacheRoom, SlotRange
from kvsim.validate.transfer import to_device

SMALL_SETTINGS = ("gamma=2,group={group},residual={two_groups},weight_bits={weight_bits}",)
BY_HALVES = "half a buffer is packed at once; the prediction spreads it over the rounds"


class Quantspec(SelfDrafter):
    """Drafter that uses the model with 4-bit MLPs and the upper halves of its packed cache."""

    def ready(self) -> None:
        """Let drafts read only the upper halves of packed numbers, if ``reads`` is ``upper``."""
        for layer in self.run.layers:
            if self.reads == "upper" and isinstance(layer.kv, Hierarchical):
                layer.kv.drafts_read_upper = True


class Hierarchical(PackedStore):
    """Storage in two halves of 4 bits, with two full-precision buffers of G recent tokens.

    Both buffers are one ring of 2 G tokens, so that C_F2 becomes C_F1 without a copy. A round adds
    no more tokens than fit in the ring, and nothing is packed before it ends. What a token attends
    to therefore does not depend on where rounds begin.
    """

    buffers_drafts = True
    differences = MappingProxyType({"quantise": BY_HALVES})

    def __init__(self, room: CacheRoom) -> None:
        part = room.settings(Settings)
        self.half = part.residual // 2  # G, of one buffer [tokens]
        if part.residual % 2 or self.half % part.group:
            raise InputError(
                f"{part.name}: residual={part.residual} is not twice a multiple of "
                f"group={part.group}, so that its halves would not fill groups of keys; "
                f"choose one that is"
            )
        super().__init__(room, part.residual, 4, part.group, hierarchical=True)
        self.drafts_read_upper = False

    def packed_keys(self, tokens: int) -> int:
        """Return the number of packed keys in a sequence of some tokens. [tokens]

        These are all whole blocks of G tokens but the latest, C_F1.
        """
        return max(tokens // self.half - 1, 0) * self.half

    def packed_values(self, tokens: int) -> int:
        """Return the number of packed values, which equals that of packed keys. [tokens]"""
        return self.packed_keys(tokens)

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """Return each sequence's tokens before the pass, which determine what is packed. [tokens]

        Nothing is packed until the round is over.
        """
        return tuple(end - span.new for end in span.ends)

    def op_shares(self, ends: list[int]) -> Mapping[str, float]:
        """Return none: how many tokens a round of drafts adds is known when it ends."""
        return {}

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Put the new tokens of a draft or of verification into C_F2."""
        self.add(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to C_U in a draft, to C_U and C_L in verification, and to both buffers."""
        upper = span.draft and self.drafts_read_upper
        return self._attend_packed(queries, span, upper=upper).out.to(queries.dtype)

    def room_left(self, tokens: int) -> int:
        """Return how many tokens fit in C_F2 before C_F1 has to be packed. [tokens]"""
        return 2 * self.half - (tokens - self.packed_keys(tokens))

    def commit(self, before: list[int], after: list[int]) -> None:
        """Pack the older buffer C_F1 if C_F2 is full, once drafts are verified (lines 24 to 27)."""
        counts = enumerate(zip(before, after, strict=True))
        full = [i for i, (old, new) in counts if self.packed_keys(new) > self.packed_keys(old)]
        if full:
            begins = to_device([self.packed_keys(n) for n in before], self.room.device)
            for side in (self.k, self.v):
                self.pack(side, begins, self.half, full)
