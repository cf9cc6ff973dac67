"""Compile every Triton kernel as it is launched, for GPUs that need not be there.

A technique's real run on the CPU calls the kernels' launchers, and each launch is compiled with the
very arguments it has, their alignment included, instead of being run. Fails where a kernel asks for
more shared memory than the smallest card has, or where one for 16-bit numbers spills registers.

Usage: ``python compile_kernels.py 86 [80 89 90] [--few]``, in a process of its own: there Triton
compiles, elsewhere it interprets.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # doctests import every file, and there kernels are interpreted
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other helpers of the tests

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.techniques import parse
from kvsim.validate import parts, techniques
from kvsim.validate.kernels import (
    attention,
    attention_triton,
    gather,
    quantise,
    rows_triton,
    topk,
)
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights
from kvsim.validate.run import Generation
from tests.support.small_llama import small_llama

SHARED = 99 * 1024
"""What a program may have on an RTX A6000 or 4090, the least of all these cards. [B]"""
SHAPES = {64: (4, 2), 128: (2, 2)}
"""Heads and KV heads by head dim: grouped and not."""
RUNS = {
    "kivi": "kivi:bits=2",
    "kivi of 4 bits": "kivi:bits=4",
    "specache": "specache:k=16",
    "zipcache": "zipcache",
    "quantspec": "quantspec:gamma=3,group=64",
    "kcache": "kcache:n=16",
    "snapkv over groups": "snapkv:budget=200,window=8 + grouped:bits=4,value_bits=2,group=32",
    "kcache over groups": "kcache:n=16 + grouped:bits=4,group=32",
}
FEW = ("kivi",)
CPU = torch.device("cpu")


ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
JUMP = re.compile(r"\bBRA\b.*?\b(0x[0-9a-f]+)")


@dataclass
class Code:
    """What a kernel takes."""

    registers: int  # of a thread
    stack: int  # of a thread: what it moves to memory for want of registers [B]
    instructions: int
    loops: tuple[int, ...]  # instructions of every loop, in the order of the code


def code(kernel: Any) -> Code:
    """Of a kernel as Triton has compiled it."""
    tool = Path(triton.knobs.nvidia.ptxas.path).with_name("cuobjdump")
    with TemporaryDirectory() as folder:
        made = Path(folder) / "kernel.cubin"
        made.write_bytes(kernel.asm["cubin"])
        said, listing = (
            subprocess.run(
                [str(tool), option, str(made)], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    if not found:
        raise RuntimeError(f"{tool} says nothing of registers: {said[-200:]}")
    lines = [(int(at, 16), text) for at, text in ADDRESS.findall(listing)]
    work = [(at, text) for at, text in lines if not re.match(r"(@\S+ )?NOP\b", text)]
    loops = [
        sum(int(jump[1], 16) <= other <= at for other, _ in work)
        for at, text in lines
        if (jump := JUMP.search(text)) and int(jump[1], 16) < at
    ]
    return Code(
        max(int(r) for r, _ in found),
        sum(int(s) for _, s in found),
        len(work),
        tuple(loops),
    )


@dataclass
class Driver:
    """Stands for the driver of a GPU of that kind."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """Kernels by what they were launched with."""

    found: dict[str, Any] = field(default_factory=dict)  # Triton's own, by hash
    where: dict[str, str] = field(default_factory=dict)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Compile instead of running."""
        made = kernel.run(*arguments, grid=grid, warmup=True, **options)
        self.found[made.hash] = made
        self.where.setdefault(made.hash, f"{made.metadata.name} of {self.what}")

    what: str = ""


@contextmanager
def compiling(compiled: Compiled) -> Iterator[None]:
    """Launchers compile, and CPU twins give the results."""

    def twice(fused: Callable[..., Any], plainly: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            fused(*arguments, **options)
            return plainly(*arguments, **options)

        return call

    attend = twice(attention_triton.attend, attention.attend)
    gathered = twice(rows_triton.gather, gather.gather)
    fused_pack, plain_pack = rows_triton.quantise, quantise.quantise

    def pack(numbers: Any, bits: int, group: int, by: Any, where: Any = "ends", *more: Any) -> Any:
        if where != "grid":
            fused_pack(numbers, bits, group, by, where, *more)
        return plain_pack(numbers, bits, group, by, where, *more)

    twins = {
        attention.attend: attend,
        quantise.quantise: pack,
        gather.gather: gathered,
        topk.softmax_top_k: twice(rows_triton.softmax_top_k, topk.softmax_top_k),
    }
    replaced = [
        *((module, "launch", compiled.launch) for module in LAUNCHERS),
        *(
            (module, plain.__name__, twin)
            for module in _implementations()
            for plain, twin in twins.items()
            if vars(module).get(plain.__name__) is plain
        ),
    ]
    patches = [patch.object(module, name, new) for module, name, new in replaced]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _implementations() -> list[ModuleType]:
    """Every file of real implementations."""
    return [
        import_module(f"{room.__name__}.{one.name}")
        for room in (techniques, parts)
        for one in iter_modules(room.__path__)
    ]


LAUNCHERS = (attention_triton, rows_triton)


def decoder(head_dim: int, dtype: torch.dtype) -> Decoder:
    """One layer with heads of that size."""
    arch = small_llama(SHAPES[head_dim], head_dim, layers=1, vocab=64)
    d = Deployment(arch.model, load_hardware("a6000"), load_stack("kvsim"))
    return Decoder(arch, random_weights(arch, CPU, dtype), 512, deployment=d)


def compile_all(capability: int, few: bool, part: slice = slice(None)) -> Compiled:
    """Every kernel that the techniques launch.

    Parameters
    ----------
    part : which of the runs; others are another process's.
    """
    triton.runtime.driver.set_active(Driver(capability))
    compiled = Compiled()
    dtypes = (torch.float16, torch.float32)
    runs = [(d, h, name) for d in dtypes for h in SHAPES for name in RUNS]
    if few:
        runs = [run for run in runs if run[:2] == (torch.float16, 128) and run[2] in FEW]
    for dtype, head_dim, name in [*runs, *((d, 0, "masks") for d in dtypes)][part]:
        compiled.what = f"{name}, head dim {head_dim}, {str(dtype)[6:]}"
        with compiling(compiled):
            if head_dim:
                prompts = [list(range(1, 60)) * 5] * 2
                whole = decoder(head_dim, dtype)
                Generation(whole, parse(RUNS[name]), prompts, 6).complete()
                continue
            compiled.what = f"attention under a mask, {str(dtype)[6:]}"
            rows = torch.zeros(2, 2, 600, 128, dtype=dtype)
            narrow = [torch.float8_e4m3fn] if capability >= 89 else []
            for stored in (rows, *(rows.to(kind) for kind in narrow)):
                seen = torch.ones(2, 1, 1, 600, dtype=torch.bool)
                attention_triton.attend_masked(
                    rows.repeat(1, 4, 1, 1)[:, :, :1], stored, stored, seen
                )
    return compiled


def main() -> None:
    """Print one line per kernel and capability; exit 1 where one asks too much."""
    capabilities = [int(text) for text in sys.argv[1:] if text.isdigit()]
    parts = [text.partition("=")[2].split("/") for text in sys.argv if text.startswith("--part=")]
    part = slice(int(parts[0][0]), None, int(parts[0][1])) if parts else slice(None)
    wrong = []
    for capability in capabilities:
        compiled = compile_all(capability, "--few" in sys.argv, part)
        for key, kernel in compiled.found.items():
            where, shared, made = compiled.where[key], kernel.metadata.shared, code(kernel)
            line = (
                f"sm_{capability} {where}: {shared} B shared, {made.registers} registers, "
                f"{made.stack} B spilt, {made.instructions} instructions, in loops {made.loops}"
            )
            print(line)
            if shared > SHARED or (made.stack and "float16" in where):
                wrong.append(line)
    if wrong:
        sys.exit("asks too much: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
