"""Compile every Triton kernel to machine code for GPUs that need not be there: 80 89 90, say.

Run by test_kernels_triton.py in a process of its own: there Triton compiles, elsewhere it
interprets.
"""

import os
import sys

if __name__ == "__main__":  # doctests import every file, and there kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "0"

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsim.validate.kernels import (
    attention_triton,
    gather_triton,
    quantise_triton,
    topk_triton,
)

POINTERS = {
    "lengths": "*i32", "eligible": "*i32", "index": "*i32", "root": "fp32",
    "out": "*fp32", "lse": "*fp32", "scores": "*fp16", "whole": "*fp32", "whole_lse": "*fp32",
    "logits": "*fp16", "mean": "*fp32", "q": "*fp16", "numbers": "*fp16",
    "codes": "*u8", "lower": "*u8", "scale": "*fp16", "zero": "*fp16",
    "k_home": "*fp16", "v_home": "*fp16", "k_out": "*fp16", "v_out": "*fp16",
}  # fmt: skip
SIDE = {
    "codes": "*u8", "lower": "*u8", "scale": "*fp16", "zero": "*fp16", "factor": "*fp16",
    "tail": "*fp16", "fetched": "*fp16", "packed": "*i32", "first": "*i32",
}  # fmt: skip
POINTERS |= {f"{side}_{name}": kind for side in "kv" for name, kind in SIDE.items()}

CONSTANTS = {
    "BITS": 2, "GROUP": 32, "FACTOR_GROUP": 1, "LOWER": False, "FACTOR": False, "FIRST": False,
    "TAIL": True,
}  # fmt: skip
KIVI = {f"{side}_{name}": value for side in "KV" for name, value in CONSTANTS.items()} | {
    "K_BY_TOKEN": False, "V_BY_TOKEN": True, "FETCHED": False, "PER_KV": 4, "NEW": 1,
    "CAUSAL": True, "SCORED": False, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 16, "BLOCK": 64,
    "SPLIT": 256, "LISTED": 64,
}  # fmt: skip
ATTENTION: list[dict[str, Any]] = [
    KIVI,
    KIVI | {"FETCHED": True, "SCORED": True, "NEW": 2, "K_BITS": 1, "V_BITS": 1},  # SpeCache
    KIVI | {"K_BITS": 4, "V_BITS": 4, "K_LOWER": True, "V_LOWER": True, "NEW": 5, "ROWS": 32},
    KIVI | {"K_FIRST": True, "V_FIRST": True, "V_FACTOR": True, "K_TAIL": False, "V_TAIL": False},
    KIVI | {"K_BITS": 0, "V_BITS": 0, "HEAD_DIM": 80},  # a tail alone
]


def compile_for(kernel: Any, constants: dict[str, Any], target: GPUTarget) -> None:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names},
        constexprs={(i,): constants[n] for i, n in enumerate(names) if n in constants},
    )
    assert triton.compile(source, target=target).asm["cubin"]


def compile_all(capability: int) -> None:
    """Every kernel in the settings it runs with."""
    target = GPUTarget("cuda", capability, 32)
    for constants in ATTENTION:
        compile_for(attention_triton.runs, constants, target)
    joined = {"USED": 4, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 16}
    compile_for(attention_triton.join, joined, target)
    for bits in (1, 4):
        for by_token in (False, True):
            packing = {
                "HEAD_DIM": 128, "BITS": bits, "GROUP": 32, "BY_TOKEN": by_token,
                "CENTRES": bits == 1, "HIERARCHICAL": bits == 4, "ROWS": 32,
                "COLUMNS": 32 if by_token else 64,
            }  # fmt: skip
            compile_for(quantise_triton.quantise_block, packing, target)
    compile_for(topk_triton.select, {"PER_KV": 3, "HEADS": 4, "BLOCK": 1024}, target)
    compile_for(gather_triton.copy_rows, {"HEAD_DIM": 80, "WIDTH": 128, "ROWS": 16}, target)
    print(f"sm_{capability}")


if __name__ == "__main__":
    for wanted in map(int, sys.argv[1:]):
        compile_all(wanted)
