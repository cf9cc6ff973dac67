"""QuantSpec: self-speculative decoding over two views of one quantised cache.

R. Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
ICML 2025, https://arxiv.org/abs/2502.10424.

Every cached number is 8 bits in two halves of 4: C8 = 2**4 C_U + C_L (section 4.2), so

    C_U S4 + Z4                     what drafts read: the upper halves alone, INT4
    C_U S4 + C_L S4 / 2**4 + Z4     what verification reads: both halves, INT8

C_U is rounded to the nearest of 16 levels from the least number to the greatest, C_L is what this
has missed, rounded to [-8, 7] sixteenths of a level (``kernels.quantise``, ``hierarchical=True``).
Keys share a scale by channel, values by token, in groups of G numbers.

Algorithm 1, and where it stands here:

- lines 1 to 3, the prompt: read in full precision, packed but for its latest G to 2 G tokens, which
  stay in the full-precision buffers C_F1 and C_F2 (``Hierarchical.fill``)
- lines 4 to 9, drafts: gamma passes of the model itself with weights of 4 bits over the upper
  halves and both buffers; their keys and values go into C_F2 (``Quantspec.propose``)
- line 10, verification: one pass of the full weights over both halves writes its own keys and
  values over those of the drafts (``drafting.SpeculativeDrafter.decode_round``)
- lines 11 to 22, a draft stays while the target would have drawn it, and the target's own token
  follows (``drafting.verify_likeliest`` and ``verify_drawn``); rejected ones are simply overwritten
- lines 24 to 27, when the buffers are full after a round: C_F1 is packed, C_F2 becomes C_F1
  (``Hierarchical.commit``)

Where this departs: MLPs alone have weights of 4 bits, rounded to nearest, where the authors' come
from a calibrated quantiser; no layer is left out as sensitive (L_S = 0).
"""

from types import MappingProxyType

from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.quantspec import Hierarchical as Settings
from kvsim.validate.model.attention import Seen
from kvsim.validate.parts.drafting import SelfDrafter
from kvsim.validate.parts.packed import PackedStore
from kvsim.validate.parts.store import CacheRoom, RunningGeneration, SlotRange
from kvsim.validate.transfer import to_device

SMALL_SETTINGS = ("gamma=2,group={group},residual={two_groups},weight_bits={weight_bits}",)
BY_HALVES = "half a buffer is packed at once; the prediction spreads it over the rounds"


class Quantspec(SelfDrafter):
    """Drafts by the model itself, with narrower weights and the upper halves of its own cache."""

    def ready(self) -> None:
        """Let drafts read the upper halves, where that is what they read."""
        for layer in self.run.layers:
            if self.reads == "upper" and isinstance(layer.kv, Hierarchical):
                layer.kv.drafts_read_upper = True

    def propose(self, generation: RunningGeneration, tokens: Tensor, ahead: int) -> Tensor:
        """DRAFT of line 7: ``weights`` gives it MLPs of 4 bits, ``Hierarchical.attend`` C_U."""
        return generation.forward(tokens, "draft", ahead=ahead)


class Hierarchical(PackedStore):
    """Keys and values in two halves of 4 bits, behind two full-precision buffers of G tokens.

    Both buffers are one ring of 2 G tokens, so that C_F2 becomes C_F1 without a copy. A round adds
    no more tokens than the ring takes, and packs only when it is over. So a token's cache is the
    same however the rounds fall.
    """

    buffers_drafts = True
    differences = MappingProxyType({"quantise": BY_HALVES})

    def __init__(self, room: CacheRoom) -> None:
        part = room.part
        assert isinstance(part, Settings)
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
        """All whole buffers but the latest, C_F1, which is always in full precision [tokens]."""
        return max(tokens // self.half - 1, 0) * self.half

    def packed_values(self, tokens: int) -> int:
        """As many as of keys [tokens]."""
        return self.packed_keys(tokens)

    def packed_by(self, span: SlotRange) -> tuple[int, ...]:
        """The tokens before the pass: nothing is packed until its round is over."""
        return tuple(end - span.new for end in span.ends)

    def append(self, keys: Tensor, values: Tensor, span: SlotRange) -> None:
        """Put the new tokens of a draft or of verification into C_F2."""
        self.add(keys, values, span)

    def attend(self, queries: Tensor, span: SlotRange, seen: Seen) -> Tensor:
        """Attend to C_U in a draft, to C_U and C_L in verification, and to both buffers."""
        upper = span.draft and self.drafts_read_upper
        return self._attend_packed(queries, span, upper=upper).out.to(queries.dtype)

    def room_left(self, tokens: int) -> int:
        """Tokens that C_F2 still takes until it has to be packed [tokens]."""
        return 2 * self.half - (tokens - self.packed_keys(tokens))

    def commit(self, before: list[int], after: list[int]) -> None:
        """Lines 24 to 27: pack C_F1 where C_F2 is full, now that drafts are verified."""
        counts = enumerate(zip(before, after, strict=True))
        full = [i for i, (old, new) in counts if self.packed_keys(new) > self.packed_keys(old)]
        if full:
            begins = to_device([self.packed_keys(n) for n in before], self.room.device)
            for side in (self.k, self.v):
                self.pack(side, full, begins, self.half)
