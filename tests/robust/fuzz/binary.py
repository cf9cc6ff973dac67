"""Sound and odd binary files: GGUF, safetensors, Parquet."""

import json
import struct
from io import BytesIO
from typing import Any

from hypothesis import strategies as st

from tests.robust.fuzz.edits import ODD_TEXTS, SMALL, damaged

SIZES = (0, 1, 2, 3, 4, 7, 31, 32, 64, 256, 2**16, 2**31, 2**32, 10**9, 2**40, 2**63, 2**64 - 1)
NUMBER_KINDS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
ARCHITECTURE: tuple[tuple[str, Any], ...] = (
    ("general.architecture", "llama"), ("general.alignment", 32),
    ("llama.embedding_length", 32), ("llama.block_count", 1),
    ("llama.attention.head_count", 2), ("llama.attention.head_count_kv", 1),
    ("llama.feed_forward_length", 64), ("llama.context_length", 128),
    ("llama.attention.layer_norm_rms_epsilon", 1e-5), ("llama.rope.freq_base", 1e4),
    ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "gpt-2"),
    ("tokenizer.ggml.tokens", ["a", "b", "ab"]), ("tokenizer.ggml.merges", ["a b"]),
    ("tokenizer.ggml.bos_token_id", 0), ("tokenizer.ggml.add_bos_token", True),
)  # fmt: skip
TENSORS = {
    "token_embd.weight": (32, 3), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (32, 16), "blk.0.attn_v.weight": (32, 16),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (32, 64), "blk.0.ffn_up.weight": (32, 64),
    "blk.0.ffn_down.weight": (64, 32),
}  # fmt: skip
"""Shapes as GGUF lists them, the fastest dimension first."""
SAFE = {
    "model.embed_tokens.weight": (3, 32),
    "model.norm.weight": (32,),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.gate_proj.weight": (64, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
}
ODD: dict[type, tuple[Any, ...]] = {
    int: (0, -1, 10**6, 10**9, 2**62, 2**63 - 1, None),
    float: (0.0, -1.0, 1e300, float("nan"), float("inf"), 1e18, None),
    str: ("failed", "", "<b>", None),
}
DTYPES = ("F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F64", "X", "")
TINY = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size": 3,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""A model of one layer, as the binary files above hold it."""


def _text(content: str) -> bytes:
    raw = content.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A field's value, as its kind and its bytes."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<I", 8) + _text(value)


@st.composite
def _odd_value(draw: st.DrawFn) -> bytes:
    """A value of any kind, whose declared size may be wrong."""
    how = draw(st.integers(0, 4))
    if how == 0:
        return struct.pack("<I", 8) + _text(draw(st.sampled_from(ODD_TEXTS)))
    if how == 1:
        kind = draw(st.sampled_from(sorted(NUMBER_KINDS)))
        width = struct.calcsize(NUMBER_KINDS[kind])
        return struct.pack("<I", kind) + draw(st.sampled_from((b"\0", b"\xff", b"\x7f"))) * width
    if how == 2:
        inner = draw(st.integers(0, 14))
        count = draw(st.sampled_from(SIZES))
        return struct.pack("<IIQ", 9, inner, count) + b"\0" * min(8 * count, 400)
    if how == 3:
        texts = draw(st.lists(st.sampled_from(ODD_TEXTS[:90]), max_size=4))
        return _value([text for text in texts if len(text) < 400])
    return struct.pack("<IQ", 8, draw(st.sampled_from(SIZES)))


@st.composite
def gguf(draw: st.DrawFn) -> bytes:
    """A GGUF file with up to three odd fields or tensors."""
    fields = [(name, _value(value)) for name, value in ARCHITECTURE]
    tensors = [(name, list(shape), 0, -1) for name, shape in TENSORS.items()]
    counts = [len(fields), len(tensors)]
    for _ in range(draw(st.integers(0, 3))):
        how, at = draw(st.integers(0, 8)), draw(SMALL)
        if how <= 2:
            fields[at % len(fields)] = (fields[at % len(fields)][0], draw(_odd_value()))
        elif how == 3:
            fields.pop(at % len(fields))
            counts[0] = len(fields)
        elif how == 4 and tensors:
            tensors.pop(at % len(tensors))
            counts[1] = len(tensors)
        elif how == 5 and tensors:
            name, shape, _, offset = tensors[at % len(tensors)]
            tensors[at % len(tensors)] = (name, shape, draw(st.integers(0, 40)), offset)
        elif how == 6 and tensors:
            name, shape, kind, _ = tensors[at % len(tensors)]
            tensors[at % len(tensors)] = (name, shape, kind, draw(st.sampled_from(SIZES)))
        elif how == 7 and tensors:
            name, _, kind, offset = tensors[at % len(tensors)]
            shape = draw(st.lists(st.sampled_from(SIZES), max_size=5))
            tensors[at % len(tensors)] = (name, shape, kind, offset)
        else:
            counts[draw(st.integers(0, 1))] = draw(st.sampled_from(SIZES))
    head = b"GGUF" + struct.pack(
        "<IQQ", draw(st.sampled_from((3, 3, 3, 2, 0, 2**31))), *counts[::-1]
    )
    head += b"".join(_text(name) + value for name, value in fields)
    place = 0
    for name, shape, kind, offset in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, (place if offset < 0 else offset) % 2**64)
        place += _product(shape) * 4
    head += bytes(-len(head) % 32)
    return draw(damaged(head + bytes(min(place, 40_000))))


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    """A safetensors file whose header has odd entries, sizes or offsets."""
    header: dict[str, Any] = {}
    place = 0
    for name, shape in SAFE.items():
        size = _product(list(shape)) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    length = None
    for _ in range(draw(st.integers(0, 3))):
        if not header:
            break
        how, name = draw(st.integers(0, 6)), sorted(header)[draw(SMALL) % len(header)]
        entry = header[name] if isinstance(header[name], dict) else {}
        if how == 0:
            entry["dtype"] = draw(st.sampled_from(DTYPES))
        elif how == 1:
            entry["shape"] = draw(st.lists(st.sampled_from((*SIZES, -1)), max_size=4))
        elif how == 2:
            entry["data_offsets"] = draw(st.lists(st.sampled_from((*SIZES, -1)), max_size=3))
        elif how == 3:
            header.pop(name)
        elif how == 4:
            header[draw(st.sampled_from(ODD_TEXTS[:90]))] = header.pop(name)
        elif how == 5:
            header[name] = draw(st.sampled_from((None, 1, "x", [], {})))
        else:
            length = draw(st.sampled_from(SIZES))
    text = json.dumps(header).encode()
    value = draw(st.sampled_from((b"\0\0\x80\x3f", b"\0\0\xc0\x7f", b"\0\0\x80\x7f")))
    data = struct.pack("<Q", len(text) if length is None else length) + text + value * (place // 4)
    return draw(damaged(data))


@st.composite
def parquet(draw: st.DrawFn) -> bytes:
    """A trace in Parquet with columns of any type, name, length and content."""
    return draw(_tables({"arrival_s": float, "prompt_tokens": int, "generate_tokens": int}))


@st.composite
def simulated(draw: st.DrawFn) -> bytes:
    """What ``kvsim simulate --out`` writes, spoiled likewise."""
    times = {"arrival_s": float, "first_token_s": float, "last_token_s": float}
    return draw(_tables({"prompt_tokens": int, "generate_tokens": int, "status": str} | times))


@st.composite
def _tables(draw: st.DrawFn, wanted: dict[str, type]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = draw(st.integers(0, 5))
    columns: dict[str, Any] = {}
    for place, (name, kind) in enumerate(wanted.items()):
        values: list[Any] = ["finished"] * rows
        if kind is not str:
            values = [kind(1 + row) + kind(place) for row in range(rows)]
        odd = draw(st.integers(0, 5))
        if odd == 1 and rows:
            values[draw(SMALL) % rows] = draw(st.sampled_from(ODD[kind]))
        column = pa.array(values, {int: pa.int64(), float: pa.float64(), str: pa.string()}[kind])
        if odd == 2:
            other = _types()[draw(SMALL) % len(_types())]
            try:
                column = column.cast(other, safe=False)
            except (pa.ArrowException, OSError):
                column = pa.nulls(rows, other)
        label = name if draw(st.integers(0, 7)) else draw(st.sampled_from(("x", "", "prompt")))
        columns[label] = column
    if draw(st.integers(0, 3)) == 0:
        texts: list[list[Any]] = [["a"], [1], [[1, 2]], [None], [[]], [{"a": 1}], ["[1, 2]"]]
        made = pa.array(draw(st.sampled_from(texts)) * rows)
        columns["block_hashes"] = made if rows else pa.nulls(0)
    sink = BytesIO()
    packed = draw(st.sampled_from(("none", "snappy", "zstd", "gzip")))
    try:
        pq.write_table(pa.table(columns), sink, compression=packed)
    except pa.ArrowException:
        pq.write_table(pa.table({"a": [1]}), sink)
    return draw(damaged(sink.getvalue()))


def _types() -> list[Any]:
    import pyarrow as pa

    return [
        pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.string(), pa.large_string(),
        pa.binary(), pa.bool_(), pa.null(), pa.date32(), pa.date64(), pa.time32("s"),
        pa.time64("ns"), pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.duration("ms"),
        pa.decimal128(20, 3), pa.list_(pa.int64()), pa.list_(pa.string()),
        pa.struct([("a", pa.int64())]), pa.dictionary(pa.int32(), pa.string()),
        pa.map_(pa.string(), pa.int64()),
    ]  # fmt: skip
