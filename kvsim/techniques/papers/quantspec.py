"""QuantSpec: drafts read the upper four bits of the cache, verification all eight.

R. Tiwari, H. Xi, A. Tomar, C. Hooper, S. Kim, M. Horton, M. Najibi, M. W. Mahoney, K. Keutzer,
A. Gholami, "QuantSpec: self-speculative decoding with hierarchical quantized KV cache", ICML 2025,
https://arxiv.org/abs/2502.10424

The model drafts for itself, over one cache with two views (section 4.2):

    C = C_U S + C_L S / 16 + Z,

C_U the upper four bits (asymmetric, rounded to nearest), C_L their error in four more bits
(symmetric), one scale S and zero point Z per group: keys along channels, values along tokens.
A draft reads C_U alone, the target both: eight bits.

The latest tokens are in fp16 in two buffers C_F1 and C_F2 of G tokens each (section 4.3), so that
rejected drafts are taken back without unpacking anything. Here 2 G is ``residual`` and the size of
a group is ``group``; in the paper G is both. Algorithm 1:

1. Prefill; then whole blocks of G tokens of the prompt are packed, so that its last G to 2 G tokens
   stay in fp16 (lines 1 to 3, where G stay, and section 4.3).
2. gamma times: a pass with C_U, C_F1, C_F2 and 4-bit MLP weights drafts a token, whose keys and
   values go to C_F2 (lines 6 to 9).
3. One pass of all drafts and the token before them with both halves verifies (line 10): drafts up
   to the first that fails are accepted, and one token more is the target's own (11 to 22).
4. The rejected ones are cleared from C_F2 (line 16).
5. Once C_F2 is full C_F1 is packed, and C_F2 becomes C_F1 (lines 24 to 27).

Where kvsim departs from the paper: every layer is quantised (algorithm 1 can leave out L_S
sensitive ones), and drafts have the model's own attention weights, with 4 bits in the MLPs alone.

``Quantspec`` has the paper's settings and ``Hierarchical`` the cache. Drafting by the model itself
(steps 2 to 4: the passes, the share that is accepted, what a rejected draft leaves) is
``axes.drafting.Selfdraft``, which MagicDec shares: here it ``reads`` the upper half.
"""

from dataclasses import replace
from typing import ClassVar

from kvsim.engine import ops
from kvsim.engine.formats import Format
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Op
from kvsim.techniques.axes.base import Launches, LayerPass, Part, Storage, Term, pack
from kvsim.techniques.axes.drafting import Acceptance, Selfdraft, acceptance_param
from kvsim.techniques.axes.settings import combine, param


@frozen
class Quantspec(Term):
    """Drafts with the upper 4 bits of an 8-bit cache and 4-bit MLP weights.

    The cache is hierarchical (4+4 bits), and the output is that of the model with an 8-bit cache. A
    round that finds too little room in the
    full-precision buffer drafts fewer tokens, about once each time half of it fills up; such short
    rounds are not modelled.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec: self-speculative decoding with hierarchical quantized KV
       cache", ICML 2025, sections 4.2 and 4.3, algorithm 1; acceptance from table 6,
       https://arxiv.org/abs/2502.10424
    """

    name: ClassVar[str] = "quantspec"

    gamma: int = param(4, "tokens drafted per round", high=16)
    acceptance: Acceptance = acceptance_param()
    group: int = param(128, "numbers that share a scale", low=8, high=1024, gentler=-1)
    residual: int = param(256, "full-precision buffer [tokens]", low=2, high=1e5, gentler=1)
    weight_bits: float = param(4, "bits per MLP weight of the draft", choices=(4, 16))

    candidates = combine(gamma=(1, 2, 4, 6))  # the paper's

    def pieces(self) -> tuple[Part, ...]:
        """Return the hierarchical cache, and drafts that read its upper half."""
        # step 2: gamma passes over C_U with 4-bit MLPs; step 3: one of gamma + 1 tokens over both
        # halves; steps 3 and 4: accepted tokens stay, rejected ones leave the fp16 buffer
        drafts = Selfdraft(self.gamma, self.acceptance, "upper", weight_bits=self.weight_bits)
        return Hierarchical(self.group, self.residual), drafts


@frozen
class Hierarchical(Storage):
    """Stores upper and lower four bits with shared scales, and recent tokens in full precision.

    Tokens are packed in blocks of half the buffer, whose halves swap roles when one is packed.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec: self-speculative decoding with hierarchical quantized KV
       cache", ICML 2025, section 4.2.
    """

    name = "hierarchical"
    by_token = False  # keys of a group of tokens share their scales
    preset = False
    launches = Launches(prefill={"attn": 3, "quantise": 50}, decode={"attn": 12, "quantise": 42})

    group: int = param(128, "numbers that share a scale", low=8, high=1024)
    residual: int = param(256, "full-precision buffer [tokens]", low=2, high=1e5)

    @property
    def stored(self) -> Format:
        """The format of upper and lower bits, with the last G to 2 G tokens in fp16."""
        half = self.residual // 2  # G tokens: C_F1 is always full, C_F2 fills up
        tails = {"k_tail": half, "v_tail": half, "k_block": half, "v_block": half}
        return Format(8, self.group, **tails, late=True)

    @property
    def upper(self) -> "_UpperHalf":
        """The upper four bits of the cache, which drafts read."""
        return _UpperHalf(self.group, self.residual)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the op that packs C_F1, spread over the rounds that fill C_F2."""
        if at.p.prefill:
            return []
        # step 5: C_F1 is packed once a round's accepted tokens and one more have filled C_F2
        every = self.residual / 2 / (1.0 + at.drafting.accepted)  # rounds per packing
        return ops.quantise(at.d, at.staying, self.stored, every=every)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return the op that packs the prompt after its attention; nothing in decoding."""
        return pack(at) if at.p.prefill else []  # step 1

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return ops.prompt_kv(at.d, at.p)


@frozen
class _UpperHalf(Hierarchical):
    """The upper four bits alone, as drafts read them; a draft packs nothing."""

    name = "upper"
    launches = Launches(draft={"attn": 12})

    @property
    def stored(self) -> Format:
        """C_U with S and Z: four bits per number with the scales of all eight."""
        return replace(super().stored, bits=4)

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return no ops: a draft's tokens stay in the full-precision buffer."""
        return []
