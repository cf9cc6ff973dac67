"""GGUF files: the block format of each tensor in a file of a named type.

A type such as Q4_K_M names a mixture: most tensors have its base format, those that lose most have
a wider one. The rules are those of ``llama-quantize``; IQ types are made with an importance matrix.

References
----------
.. [1] llama.cpp, src/llama-quant.cpp and ggml/src/ggml-common.h, as of 2026, MIT,
   https://github.com/ggml-org/llama.cpp
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from kvsim.errors import unknown
from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.models.model import LayerShape, Model


@frozen
class BlockFormat:
    """A GGUF block format, in which a block of numbers shares scales.

    Attributes
    ----------
    size
        Numbers in a block.
    bytes
        Size of a block with its scales. [B]
    unpack
        Vector operations to convert a number to fp16, divided by those of Q4_K.
    """

    size: int
    bytes: int
    unpack: float = 0.0

    @property
    def bits(self) -> float:
        """Average width of a number. [bit]"""
        return 8.0 * self.bytes / self.size


BLOCKS = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "q8_0": BlockFormat(32, 34, 0.4),
    "q4_0": BlockFormat(32, 18, 0.7),
    "q4_1": BlockFormat(32, 20, 0.7),
    "q5_0": BlockFormat(32, 22, 1.2),
    "q5_1": BlockFormat(32, 24, 1.2),
    "q2_k": BlockFormat(256, 84, 1.2),
    "q3_k": BlockFormat(256, 110, 1.7),
    "q4_k": BlockFormat(256, 144, 1.0),
    "q5_k": BlockFormat(256, 176, 1.4),
    "q6_k": BlockFormat(256, 210, 1.4),
    "iq1_s": BlockFormat(256, 50, 1.5),
    "iq1_m": BlockFormat(256, 56, 1.7),
    "iq2_xxs": BlockFormat(256, 66, 2.2),
    "iq2_xs": BlockFormat(256, 74, 2.2),
    "iq2_s": BlockFormat(256, 82, 2.4),
    "iq3_xxs": BlockFormat(256, 98, 2.0),
    "iq3_s": BlockFormat(256, 110, 2.2),
    "iq4_nl": BlockFormat(32, 18, 1.4),
    "iq4_xs": BlockFormat(256, 136, 1.4),
    "mxfp4": BlockFormat(32, 17, 1.4),
}
"""Block formats: sizes as ggml-common.h declares them. Unpacking is counted in the CUDA products of
a matrix and a vector: shifts, masks, table look-ups, integer products and scales per eight numbers,
over those of Q4_K (about nine)."""

BASES = {
    **{name: name for name in ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q6_k")},
    **{name: name for name in ("q2_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s")},
    **{name: name for name in ("iq4_nl", "iq4_xs")},
    **{"q2_k_s": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k"},
    **{"q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k"},
    **{"iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xs": "iq3_s", "iq3_m": "iq3_s"},
    "mxfp4_moe": "mxfp4",
}
"""Types of files, and the format that most of their tensors have."""

NEAREST = {"fp16": "f16", "int8": "q8_0", "int4": "q4_k_m", "mxfp4": "mxfp4_moe"}
"""The type of file that engines reading GGUF run in place of another format."""

ONE_AND_TWO_BITS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")
WITHOUT_BLOCKS_OF_256 = {
    **dict.fromkeys(("q2_k", "q3_k"), "q4_0"),
    **{"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
}
"""What stands in where rows do not divide into blocks of 256; IQ4_NL for all IQ formats."""
FUSED_QKV = ("phi", "phi3", "falcon", "gpt_neox", "bloom")
"""Families whose queries, keys and values are one tensor in GGUF."""


@frozen
class Tensor:
    """A weight matrix of one layer, or one outside the layers.

    Attributes
    ----------
    matrix
        Name of the op that multiplies with it.
    numbers
        Count of its weights.
    block
        Block format that it is stored in.
    """

    matrix: str
    numbers: float
    block: BlockFormat


@frozen
class Stored:
    """Storage of a weight matrix, averaged over the layers that have it.

    Attributes
    ----------
    bits
        Width of a weight with its share of scales. [bit]
    unpack
        Vector operations to convert a weight to fp16, divided by those of Q4_K.
    """

    bits: float
    unpack: float


def check_type(name: str) -> str:
    """Return the type of a GGUF file in lower case.

    Parameters
    ----------
    name
        Type as llama-quantize names it, such as "Q4_K_M", in any case.

    Returns
    -------
    str
        The name that the rest of kvsim uses, such as "q4_k_m".

    Raises
    ------
    InputError
        If llama.cpp writes no such type.
    """
    plain = name.strip().lower()
    if plain not in BASES:
        raise unknown("GGUF type", name, BASES, "types are those of llama-quantize")
    return plain


def weight_passes_on_metal(file: str, rows: Number) -> Number:
    """Return how often a product of a few rows reads its packed weights on Apple's GPUs.

    llama.cpp's Metal back end multiplies blocks of 256 by up to three rows as so many separate
    rows. Blocks of 32, and blocks of 256 from four rows on, are unpacked once for up to five rows.
    Products of nine or more rows are tiled and read each weight once.

    Parameters
    ----------
    file
        Type of the file, as "q4_k_m".
    rows
        Rows of the product. [tokens]

    Returns
    -------
    Number
        At least 1.

    References
    ----------
    .. [1] llama.cpp, ggml/src/ggml-metal/ggml-metal-ops.cpp, ``ggml_metal_op_mul_mat``.
    """
    separate = 3 if BLOCKS[BASES[file]].size == 256 else 1
    passes = np.where(np.asarray(rows) > separate, np.ceil(np.divide(rows, 5)), rows)
    return np.where(np.asarray(rows) > 8, 1.0, np.maximum(passes, 1.0))


@lru_cache(maxsize=64)
def stored_matrices(model: Model, file: str) -> dict[str, Stored]:
    """Average the formats of each matrix over the layers of a model.

    Parameters
    ----------
    model
        The model, or one shard of it.
    file
        Type of the file, as "q4_k_m".

    Returns
    -------
    dict[str, Stored]
        By the name of the product's op; experts' begin with ``experts_``.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    for tensor in tensors(model, file):
        numbers, bits, unpack = sums.get(tensor.matrix, (0.0, 0.0, 0.0))
        n = tensor.numbers
        sums[tensor.matrix] = (
            numbers + n,
            bits + n * tensor.block.bits,
            unpack + n * tensor.block.unpack,
        )
    return {name: Stored(bits / n, unpack / n) for name, (n, bits, unpack) in sums.items()}


def tensors(model: Model, file: str) -> Iterator[Tensor]:
    """Yield every weight matrix of a model with its block format in a GGUF file.

    Parameters
    ----------
    model
        The model.
    file
        Type of the file, such as "q4_k_m".

    Yields
    ------
    Tensor
        One per matrix and layer.
    """
    rules = _Rules(check_type(file), model)
    yield rules.tensor("embedding", "embedding", (model.hidden, model.vocab))
    if not model.tied:
        yield rules.tensor("lm_head", "output", (model.hidden, model.vocab))
    attended = 0
    for i, shape in enumerate(model.shapes()):
        yield from _mixer(rules, model, shape, attended)
        attended += shape.attends
        if shape.mlp:
            yield from _mlp(rules, model, shape, i)
        if model.side:
            yield rules.tensor("side", "other", (model.hidden, model.side))


def _mixer(rules: "_Rules", model: Model, shape: LayerShape, index: int) -> Iterator[Tensor]:
    for name, (inputs, outputs) in model.mixer_matrices(shape).items():
        if name != "qkv" or model.latent:
            kind = {"out": "attention output", "kv_up": "values"}.get(name, "other")
            yield rules.tensor(name, kind if shape.attends else "other", (inputs, outputs), index)
        elif model.family in FUSED_QKV:
            yield rules.tensor(name, "values", (inputs, outputs), index)
        else:
            own = model.kv_width if shape.mixer != "shared" else 0
            yield rules.tensor(name, "queries", (inputs, outputs - own), index)
            if own:
                yield rules.tensor(name, "keys", (inputs, model.k_width), index)
                yield rules.tensor(name, "values", (inputs, model.v_width), index)


def _mlp(rules: "_Rules", model: Model, shape: LayerShape, index: int) -> Iterator[Tensor]:
    several: list[tuple[str, int, int]] = [("", model.ffn, 1)]
    if shape.routed:
        several = [("experts_", model.expert_ffn, model.experts)]
        several += [("", model.expert_ffn, model.shared_experts)] if model.shared_experts else []
    for prefix, width, count in several:
        for name, matrix in model.mlp_matrices(width).items():
            yield rules.tensor(prefix + name, name, matrix, index, count, experts=bool(prefix))


@frozen
class _Rules:
    """Which format a tensor has in a file of one type of one model."""

    file: str
    model: Model

    def tensor(
        self,
        matrix: str,
        kind: str,
        size: tuple[int, int],
        index: int = 0,
        count: int = 1,
        experts: bool = False,
    ) -> Tensor:
        """Choose the format of one tensor, as llama-quantize does for this type of file.

        Parameters
        ----------
        matrix
            Name of the tensor.
        kind
            What it is: output, embedding, values, up, down ...
        size
            Its inputs and outputs.
        index
            Its layer; the first and the last ones may have more bits.
        count
            How many such tensors there are, as of experts.
        experts
            Whether they are routed experts.
        """
        inputs, outputs = size
        name = BASES[self.file]
        if self.file == "mxfp4_moe":
            name = "mxfp4" if experts else "q8_0"
        elif BLOCKS[name].unpack and self.file != "q8_0":
            name = self._format(kind, index) or name
        return Tensor(matrix, float(count * inputs * outputs), BLOCKS[_fitting(name, inputs)])

    def _format(self, kind: str, index: int) -> str:
        """Name of the format where it differs from the base format, else empty."""
        if kind == "output" or (kind == "embedding" and self.model.tied):
            return "q5_k" if self.file in (*ONE_AND_TWO_BITS, "iq3_xxs") else "q6_k"
        if kind == "values":
            return self._values(index)
        if kind in ("up", "down"):
            return self._down(index) if kind == "down" else self._up(index)
        if kind == "attention output":
            return self._attention_output()
        if kind == "keys" and self.model.experts == 8:
            return "q4_k" if self.file in ONE_AND_TWO_BITS else "q8_0"
        if kind in ("keys", "queries"):
            return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.file, "")
        if kind == "embedding":
            narrow = dict.fromkeys(ONE_AND_TWO_BITS[:4], "q2_k")
            wider = dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), "iq3_s")
            return (narrow | wider).get(self.file, "")
        return ""

    def _values(self, index: int) -> str:
        """Format of the value projection, which is small with grouped heads and loses most."""
        m, file = self.model, self.file
        grouped = not m.latent and m.queries_per_kv >= 4
        if file in ONE_AND_TWO_BITS:
            wide = "iq3_s" if file in ("iq2_s", "iq2_m") else "q2_k"
            return "q4_k" if grouped or m.experts >= 4 else wide
        if m.experts == 8:
            return "q8_0"
        attending = sum(shape.attends for shape in m.shapes())
        found = {
            "q2_k": "q4_k" if grouped else "q3_k",
            "q2_k_s": "q4_k" if grouped else "",
            "iq3_xxs": "q4_k" if grouped else "",
            "iq3_xs": "q4_k" if grouped else "",
            "iq3_s": "q4_k" if grouped else "",
            "iq3_m": "q4_k",
            "q3_k_m": "q5_k" if index < 2 else "q4_k",
            "q3_k_l": "q5_k",
            "iq4_nl": "q5_k" if grouped else "",
            "iq4_xs": "q5_k" if grouped else "",
            "q4_k_m": "q6_k" if _has_more_bits(index, attending) else "",
            "q5_k_m": "q6_k" if _has_more_bits(index, attending) else "",
            "q4_k_s": "q5_k" if index < 4 else "",
        }.get(file, "")
        largest = m.layers == 80 and not m.experts and m.queries_per_kv > 1  # "70B" to llama.cpp
        return "q5_k" if largest and (found or BASES[file]) in ("q3_k", "q4_k") else found

    def _down(self, index: int) -> str:
        file, layers = self.file, self.model.layers
        first = index < layers // 8
        if file in ONE_AND_TWO_BITS:
            wide = "iq3_s" if file in ("iq2_s", "iq2_m") else "q2_k"
            return wide if first else ""
        early = {"q2_k_s": "q4_k", "iq3_m": "q4_k", "q4_k_s": "q5_k"}
        if file in early:
            more = file == "iq3_m" and self.model.experts == 8 and _has_more_bits(index, layers)
            return early[file] if first or more else ""
        return {
            "q2_k": "q3_k",
            "q3_k_m": "q5_k" if index < layers // 16 else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_m": "q6_k" if _has_more_bits(index, layers) else "",
            "q5_k_m": "q6_k" if _has_more_bits(index, layers) else "",
        }.get(file, "")

    def _up(self, index: int) -> str:
        inner = self.model.layers // 8 <= index < 7 * self.model.layers // 8
        return "iq3_xxs" if self.file == "iq3_xs" and inner else ""

    def _attention_output(self) -> str:
        file = self.file
        if self.model.experts == 8:
            return "" if BASES[file] in ("q5_k", "q6_k", "q4_0", "q5_0") else "q5_k"
        wider = {
            **dict.fromkeys(("iq1_s", "iq1_m"), "iq2_xxs"),
            **dict.fromkeys(("iq2_s", "iq2_m", "iq3_xxs"), "iq3_s"),
            **dict.fromkeys(("q3_k_m", "iq3_m"), "q4_k"),
            **{"q2_k": "q3_k", "q3_k_l": "q5_k"},
        }
        return wider.get(file, "")


def _has_more_bits(index: int, layers: int) -> bool:
    """Whether a layer has more bits: the first and last eighths, and every third in between."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def _fitting(name: str, inputs: int) -> str:
    """Return the format, or its fallback if rows do not divide into its blocks."""
    if inputs % BLOCKS[name].size == 0:
        return name
    other = WITHOUT_BLOCKS_OF_256.get(name, "iq4_nl")
    return other if inputs % BLOCKS[other].size == 0 else "f16"
