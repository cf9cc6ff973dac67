"""How keys and values are stored: bytes, and the tokens a format keeps in full precision."""

import numpy as np

from kvsim.frozen import frozen
from kvsim.graph import Number

FP16_BYTES = 2.0  # bytes of an fp16 number [B]
SCALE_BITS = 32.0  # bits of the fp16 scale and zero point that a group of numbers shares
UNGROUPED = 2.0**60  # quantised, with scales that are counted elsewhere


def bytes_per_number(bits: Number, group: Number = np.inf) -> Number:
    """Return the size of a stored number with its share of a scale and a zero point, as KIVI [1]_.

    Parameters
    ----------
    bits
        Width of a stored number. [bit]
    group
        Numbers that share one scale and zero point; infinite if there are none.

    Returns
    -------
    Number
        Mean size. [B]

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, section 3: asymmetric min-max groups,
       https://arxiv.org/abs/2402.02750
    """
    return (bits + SCALE_BITS / group) / 8


def compression_ratio(
    batch: Number, width: Number, tokens: Number, bits: Number, parameters: Number
) -> Number:
    """Return how many times smaller than fp16 a packed cache is, as ZipCache [1]_.

    Scales and zero points ("quantisation parameters") are stored in fp16.

    Parameters
    ----------
    batch, width, tokens
        Shape of K and of V. [sequences, elements per token, tokens]
    bits
        Average width of a stored number. [bit]
    parameters
        Quantisation parameters of the layer, for K and V together. [numbers]

    Returns
    -------
    Number
        Size in fp16 divided by the packed size.

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, appendix A, https://arxiv.org/abs/2405.14256
    """
    numbers = 2 * batch * width * tokens
    return numbers * 16 / (numbers * bits + 16 * parameters)


def separable_parameters(batch: Number, width: Number, tokens: Number, sets: Number = 1) -> Number:
    """Count the quantisation parameters of channelwise keys and channel-separable tokenwise values.

    There are two per channel of K, one per channel of V and two per token of V [1]_. Tokens that
    are packed together, at one precision and one time, share the parameters of channels.

    Parameters
    ----------
    batch
        Sequences in the batch. [sequences]
    width
        Width of a token's K and of its V, over all heads.
    tokens
        Cached tokens per sequence. [tokens]
    sets
        Number of sets of tokens that were packed together.

    Returns
    -------
    Number
        Quantisation parameters of one layer. [numbers]

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, section 4.1, https://arxiv.org/abs/2405.14256
    """
    return 3 * width * sets + 2 * batch * tokens


def mixed_parameters(batch: Number, width: Number, tokens: Number) -> Number:
    """Count the quantisation parameters of ZipCache's two precisions, as in its tables [1]_.

    The algorithms of the same paper need others: those of ``separable_parameters`` in two sets.

    Parameters
    ----------
    batch
        Sequences in the batch. [sequences]
    width
        Width of a token's K and of its V, over all heads.
    tokens
        Cached tokens per sequence. [tokens]

    Returns
    -------
    Number
        Quantisation parameters of one layer. [numbers]

    References
    ----------
    .. [1] Y. He et al., "ZipCache", NeurIPS 2024, tables 3, A and B,
       https://arxiv.org/abs/2405.14256
    """
    return 4 * width + 4 * batch * tokens


def mixed_bits(salient: Number, high: Number, low: Number) -> Number:
    """Compute the average width of values stored at two precisions.

    Parameters
    ----------
    salient
        Share of the tokens stored at the higher precision.
    high
        Width of a salient token's numbers. [bit]
    low
        Width of all other numbers. [bit]

    Returns
    -------
    Number
        Average width. [bit]
    """
    return salient * high + (1 - salient) * low


@frozen
class Format:
    """Storage format of cached keys and values: packed numbers and recent tokens in fp16.

    The newest tokens (the tail) stay in fp16. A tail has ``k_tail`` (``v_tail``) tokens, plus
    those that do not yet fill a block of ``k_block`` (``v_block``) tokens.

    Attributes
    ----------
    bits
        Width of a packed number. [bit]
    group
        Numbers that share one scale and zero point; infinite if there are none.
    k_tail, v_tail
        Newest keys and values always in fp16. [tokens per sequence]
    k_block, v_block
        Keys and values that are packed together. [tokens per sequence]
    late
        Whether tokens are packed after attention, so that a pass reads the ones it adds in fp16.
    value_bits
        Width of a value's packed number; None for ``bits``. [bit]
    """

    bits: float = 16
    group: float = np.inf
    k_tail: int = 0
    v_tail: int = 0
    k_block: int = 1
    v_block: int = 1
    late: bool = False
    value_bits: float | None = None

    @property
    def v_bits(self) -> float:
        """Bits per element of packed values; ``bits`` if values have no separate width. [bit]"""
        return self.bits if self.value_bits is None else self.value_bits

    @property
    def packs(self) -> bool:
        """Whether any number is stored below 16 bits."""
        return self.bits < 16 or self.v_bits < 16

    @property
    def kernel(self) -> str:
        """Kernel class of attention over this format, as calibrated machines name it."""
        if not self.packs:
            return "attention"
        # fp8 widens in registers, without scales
        plain = all(b == 16 or (b == 8 and np.isinf(self.group)) for b in self._side_bits)
        return "attention-fp8" if plain else "lowbit"

    @property
    def _side_bits(self) -> tuple[float, float]:
        return self.bits, self.v_bits

    @property
    def k_number(self) -> float:
        """Size of a packed number of a key, with its share of scale and zero point. [B]"""
        return _number(self.bits, self.group)

    @property
    def v_number(self) -> float:
        """Size of a packed number of a value, with its share of scale and zero point. [B]"""
        return _number(self.v_bits, self.group)

    @property
    def number(self) -> float:
        """Size of a packed element of a key or value, which must have the same width. [B]"""
        assert self.bits == self.v_bits
        return self.k_number

    def token(self, k_width: float, v_width: float) -> float:
        """Compute the size of one packed token.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.

        Returns
        -------
        float
            Keys and values with their scales. [B]
        """
        return k_width * self.k_number + v_width * self.v_number

    def packing(self, k_width: float, v_width: float) -> float:
        """Compute the bytes that packing or widening one token reads and writes.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.

        Returns
        -------
        float
            Zero for numbers that stay in fp16. [B]
        """
        sides = zip((k_width, v_width), self._side_bits, strict=True)
        return sum(w * (2.0 + _number(b, self.group)) for w, b in sides if b < 16)

    def unpacked(self, k_width: float, v_width: float, tokens: Number) -> Number:
        """Count the packed numbers of one sequence that attention widens.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.
        tokens
            Cached tokens of the sequence. [tokens]

        Returns
        -------
        Number
            Keys and values stored below 16 bits. [numbers]
        """
        sides = zip(self.packed_sides(k_width, v_width, tokens), self._side_bits, strict=True)
        return sum((numbers for numbers, bits in sides if bits < 16), 0.0)

    def read(self, k_width: float, v_width: float, tokens: Number, new: Number = 0.0) -> Number:
        """Return the bytes of one sequence's cache that attention reads in one layer.

        Parameters
        ----------
        k_width, v_width
            Numbers of a token's key and of its value, all heads together.
        tokens
            Cached tokens of the sequence. [tokens]
        new
            How many of ``tokens`` are added by this pass. [tokens]

        Returns
        -------
        Number
            Bytes read from the packed blocks and the fp16 tail. [B]
        """
        own = new if self.late else 0.0
        k, v = self.packed_sides(k_width, v_width, tokens - own)
        fresh = (k_width + v_width) * tokens - k - v
        return k * self.k_number + v * self.v_number + fresh * 2.0

    def packed_sides(self, k_width: float, v_width: float, tokens: Number) -> tuple[Number, Number]:
        """Count the packed elements of one sequence, of keys and of values separately.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.
        tokens
            Cached tokens of the sequence. [tokens]

        Returns
        -------
        tuple[Number, Number]
            Packed numbers of keys and of values. [numbers]
        """
        return (
            k_width * _packed(tokens, self.k_tail, self.k_block),
            v_width * _packed(tokens, self.v_tail, self.v_block),
        )

    def resident(self, k_width: float, v_width: float, tokens: Number) -> Number:
        """Compute the bytes allocated for one sequence: packed store and tails.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.
        tokens
            Cached tokens of the sequence. [tokens]

        Returns
        -------
        Number
            Allocated memory. [B]
        """
        k, v = self.resident_sides(k_width, v_width, tokens)
        return k + v + self.tail_bytes(k_width, v_width)

    def resident_sides(
        self, k_width: float, v_width: float, tokens: Number
    ) -> tuple[Number, Number]:
        """Compute the bytes of packed keys and of packed values, without tails.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.
        tokens
            Cached tokens of the sequence. [tokens]

        Returns
        -------
        tuple[Number, Number]
            Bytes of keys and of values. [B]
        """
        scales = self._groups(tokens) * SCALE_BITS / 8 if self.bits < 16 else 0.0
        return k_width * (tokens * self.bits / 8 + scales), v_width * tokens * self.v_number

    def tail_bytes(self, k_width: float, v_width: float) -> float:
        """Compute the bytes of one sequence's full-precision buffers.

        Parameters
        ----------
        k_width
            Numbers per token and layer that are cached as keys.
        v_width
            Numbers per token and layer that are cached as values.

        Returns
        -------
        float
            Both tails and the blocks not yet packed. [B]
        """
        k, v = self._buffer(self.k_tail, self.k_block), self._buffer(self.v_tail, self.v_block)
        return 2.0 * (k_width * k + v_width * v)

    def _groups(self, tokens: Number) -> Number:
        """Count the groups of tokens that share scales; of blocks only whole ones."""
        groups: Number = tokens / self.group
        return np.floor(groups) if self.k_block > 1 else groups

    @staticmethod
    def _buffer(tail: int, block: int) -> int:
        """Return the tokens of the full-precision buffer: the tail, and an incomplete block."""
        return tail + (block if block > 1 else 0)


def _number(bits: float, group: float) -> float:
    """Return the size of a stored value with its share of scales; fp16 has none. [B]"""
    return 2.0 if bits == 16 else float(bytes_per_number(bits, group))


def _packed(tokens: Number, tail: int, block: int) -> Number:
    """Return the number of packed tokens of one sequence."""
    fresh = np.minimum(tokens, tail + tokens % block) if tail or block > 1 else 0.0
    return tokens - fresh


FP16 = Format()


def averaged(bits: Number) -> Format:
    """Create a format with an average width, for values stored at several precisions.

    Parameters
    ----------
    bits
        Average width of a stored number, or an array of which the largest element counts. [bit]

    Returns
    -------
    Format
        Fp16 for 16 bits; otherwise a format whose scales are counted elsewhere.
    """
    widest = float(np.max(np.asarray(bits)))
    return FP16 if widest == FP16.bits else Format(widest, group=UNGROUPED)


def kivi(bits: float, group: float, residual: int, late: bool = False) -> Format:
    """Create KIVI's format: keys packed in blocks, values packed token by token [1]_.

    Parameters
    ----------
    bits
        Width of a packed number. [bit]
    group
        Numbers that share one scale and zero point.
    residual
        Tokens of a block of keys, and newest values that stay in fp16. [tokens]
    late
        Whether a pass reads its own tokens in fp16 and packs them after attention.

    Returns
    -------
    Format
        The format.

    References
    ----------
    .. [1] Z. Liu et al., "KIVI", ICML 2024, https://arxiv.org/abs/2402.02750
    """
    if bits == 16 or residual == 0:
        return Format(bits, np.inf if bits == 16 else group, late=late)
    return Format(bits, group, v_tail=residual, k_block=residual, late=late)
