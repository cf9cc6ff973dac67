"""GGUF files: sizes as their publishers list them, and what a deployment makes of their types."""

import numpy as np
import pytest

from kvsim.errors import InputError
from kvsim.machines import gguf
from kvsim.machines.deployment import WEIGHT_FORMATS, Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model

# GB, as the pages of published files say (bartowski, ggml-org, TheBloke, unsloth; recalled)
SIZES = {
    "llama3-8b": {
        "q8_0": 8.54, "q6_k": 6.60, "q5_k_m": 5.73, "q5_k_s": 5.60, "q4_k_m": 4.92,
        "q4_k_s": 4.69, "iq4_nl": 4.68, "iq4_xs": 4.45, "q3_k_l": 4.32, "q3_k_m": 4.02,
        "iq3_m": 3.78, "iq3_s": 3.68, "q3_k_s": 3.66, "iq3_xs": 3.52, "iq3_xxs": 3.27,
        "q2_k": 3.18, "iq2_m": 2.95, "iq2_s": 2.76, "iq2_xs": 2.61, "iq2_xxs": 2.40,
        "iq1_m": 2.16, "iq1_s": 2.02,
    },
    "llama3-70b": {"q4_k_m": 42.52},
    "llama2-7b": {"q4_k_m": 4.08},
    "gpt-oss-120b": {"mxfp4_moe": 63.39},
    "gpt-oss-20b": {"mxfp4_moe": 12.11},
    "qwen3-30b-a3b": {"q4_k_m": 18.63},
    "mixtral-8x7b": {"q4_k_m": 28.45},
    "deepseek-v3": {"q4_k_m": 404.4},
    "qwen2.5-7b": {"q4_k_m": 4.683},
    "gemma-2-9b": {"q4_k_m": 5.76},
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "file", "size"), [(m, f, s) for m, files in SIZES.items() for f, s in files.items()]
)
def test_files_are_as_large_as_published(model: str, file: str, size: float) -> None:
    m, found = load_model(model), list(gguf.tensors(load_model(model), file))
    others = m.parameters - sum(tensor.numbers for tensor in found)  # norms, biases, routers
    stored = sum(tensor.numbers * tensor.block.bits / 8 for tensor in found)
    assert stored + 4 * max(0.0, others) == pytest.approx(1e9 * size, rel=0.01)


@pytest.mark.parametrize("file", gguf.BASES)
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "deepseek-v2-lite", "gpt-oss-20b", "jamba-v0.1"])
def test_every_type_of_every_kind_of_model(model: str, file: str) -> None:
    """No tensor is forgotten, and no type is wider than its base but where it must be."""
    m = load_model(model)
    found = gguf.stored_matrices(m, file)
    counted = sum(tensor.numbers for tensor in gguf.tensors(m, file))
    assert 0.98 * m.parameters < counted <= 1.001 * m.parameters
    assert all(1.5 < each.bits <= 16 for each in found.values())


def test_layers_with_more_bits_are_llama_cpps() -> None:
    """Of 32 layers the first and the last four, and every third between (use_more_bits)."""
    m = load_model("llama2-7b")

    def wide(file: str, matrix: str, first: int, each: int) -> list[int]:
        found = [t.block.bits for t in gguf.tensors(m, file) if t.matrix == matrix][first::each]
        return [i for i, bits in enumerate(found) if bits > 5]

    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for which in (("down", 0, 1), ("qkv", 2, 3)):  # the third of these is the values'
        assert wide("q4_k_m", *which) == more and wide("q3_k_m", *which) == [0, 1]


@pytest.mark.parametrize("file", ["q4_k_m", "iq2_m", "q3_k_m"])
def test_matrices_of_a_model_are_averaged_by_their_numbers(file: str) -> None:
    m = load_model("llama3-8b")
    for name, found in gguf.stored_matrices(m, file).items():
        some = [t for t in gguf.tensors(m, file) if t.matrix == name]
        size = [t.numbers for t in some]
        bits, unpack = (
            np.average([getattr(t.block, each) for t in some], weights=size)
            for each in ("bits", "unpack")
        )
        assert (found.bits, found.unpack) == pytest.approx((bits, unpack))


def where(weights: str, stack: str = "llamacpp-2024-05", model: str = "llama3-8b") -> Deployment:
    return Deployment(load_model(model), load_hardware("rtx3090"), load_stack(stack), weights)


def test_engines_that_read_gguf_take_the_nearest_type() -> None:
    assert where("int4").weights == "q4_k_m" and where("fp16").weights == "f16"
    assert where("Q4_K_M", "fused").weights == "q4_k_m"
    assert where("released", model="gpt-oss-20b").weights == "mxfp4_moe"
    assert where("q4_k_m").stored("down").bits > WEIGHT_FORMATS["q4_k_m"].bits
    with pytest.raises(InputError, match=r"fp8-block is not a GGUF type.*choose one as q8_0"):
        where("released", model="deepseek-v3")
    with pytest.raises(InputError, match="unknown format in --weights 'q4_k_x'; nearest: q4_k"):
        where("q4_k_x")


@pytest.mark.parametrize(
    ("file", "passes"),  # of 1, 2, ... 9 rows
    [("q4_k_m", (1, 2, 3, 1, 1, 2, 2, 2, 1)), ("q8_0", (1, 1, 1, 1, 1, 2, 2, 2, 1))],
)
def test_products_of_few_rows_read_weights_again_on_apple(
    file: str, passes: tuple[int, ...]
) -> None:
    found = gguf.weight_passes_on_metal(file, np.arange(1.0, 10.0))
    assert np.asarray(found).tolist() == list(passes)
