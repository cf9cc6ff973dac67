"""Machine code of a compiled kernel: registers, and instructions in all and of its loops."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton

from kvsim.frozen import frozen

ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
JUMP = re.compile(r"\bBRA\b.*?\b(0x[0-9a-f]+)")


@frozen
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
