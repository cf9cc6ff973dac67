"""What kernels reach: of the memory's measured rate, and of the rate at which instructions issue.

Instructions are those of the compiled program: its main loop as often as the launch says, the rest
once, in every warp. A kernel that is near neither rate waits; one that is near the second is bound
by its arithmetic, whatever the bytes.
"""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.validate.bench.attention import packed_attention_works, packing_works, topk_works
from kvsim.validate.bench.traffic import row_works
from kvsim.validate.bench.work import Bench, Work, measure, timers
from kvsim.validate.kernels import language

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


SCHEDULERS = 4
"""Warps of a multiprocessor that issue an instruction in a clock, since Volta: NVIDIA's tuning
guides for Ampere and Hopper, section 1.4.1.1, "four warp schedulers"."""
MAX_MOVED_BYTES = 2e9  # moved by one call at most [B]
BUDGET = 0.5  # of one kernel's runs [s]
KERNELS: Mapping[str, Callable[[Bench], Iterator[Work]]] = {
    "packed attention": packed_attention_works,
    "pack and widen": packing_works,
    "top-k": topk_works,
    "rows of the host": row_works,
}
Numbers = Mapping[str, Any]
LOOPS: Mapping[str, tuple[Callable[[tuple[int, ...]], int], Callable[[Numbers], float]]] = {
    "runs": (
        min,  # of packed words, or the only one
        lambda a: a["SPLIT"] / (a["WORDS"] or a["BLOCK"]),
    ),
    "join": (min, lambda a: a["splits"]),  # the larger one is unrolled
    **dict.fromkeys(
        ("partial_sums", "mean_shares", "next_digit", "numbers_taken", "take"),
        (max, lambda a: a["CHUNK"] / a["BLOCK"]),
    ),
}
"""Which loop of a kernel does its work, and how often it turns in one program."""


@frozen
class Launched:
    """One launch of a kernel: its programs, and everything that it was given."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the kernel is called in its file."""
        return str(self.kernel.__name__)

    @property
    def numbers(self) -> Numbers:
        """What it was given, by name."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))


def largest(place: Bench) -> Iterator[tuple[str, Work]]:
    """Find the case of each kernel that moves most, of every kind of case.

    Parameters
    ----------
    place
        Device that the cases are for.

    Yields
    ------
    tuple of str and Work
        Name of the kernel and its kind, and the case.
    """
    for name, works in KERNELS.items():
        found: dict[str, Work] = {}
        most: dict[str, float] = {}  # [B]
        for work in works(place):
            moved = sum(map(float, work.op.bytes.values()))
            kinds = [str(work.case["way"])] if "way" in work.case else []
            kinds += [f"{work.case['bits']} bit"] if "bits" in work.case else []
            kind = ", ".join(kinds)
            if moved <= MAX_MOVED_BYTES and moved > most.get(kind, 0.0):
                most[kind], found[kind] = moved, work
        for kind, work in found.items():
            yield f"{name}, {kind}" if kind else name, work


def rate(
    name: str,
    work: Work,
    device: torch.device,
    peaks: Mapping[str, float],
    compiled: Callable[[Launched], tuple[Code, int] | None],
) -> dict[str, Any]:
    """Measure what a kernel reaches in one case.

    Parameters
    ----------
    name
        Name of the kernel and its kind.
    peaks
        The best measured rate of every channel. [B/s]
    compiled
        Returns a launch's program and its warps; None where it is interpreted.
    """
    launched: list[Launched] = []
    with work.make() as calls:
        seconds = median(measure(timers(device)[work.clock], calls, BUDGET))
        with language.listening(lambda *said: launched.append(Launched(*said))):
            calls[0]()
    shares = {
        channel: float(moved) / seconds / peaks[channel]
        for channel, moved in work.op.bytes.items()
        if peaks.get(channel)
    }
    counted = [instructions(one, compiled(one)) for one in launched]
    whole = sum(n for n in counted if n is not None) if counted and None not in counted else None
    moved = max(map(float, work.op.bytes.values()))
    return {
        "kernel": name,
        "case": dict(work.case),
        "seconds": seconds,
        "bytes": dict(work.op.bytes),
        "share_of_bandwidth": max(shares.values(), default=None),
        "launches": len(launched),
        "instructions": whole,
        "instructions_per_byte": None if whole is None else whole / moved,
    }


def of_issue(row: dict[str, Any], issue: float) -> dict[str, Any]:
    """A row with its share of the instructions that the device can issue, where both are known."""
    whole, seconds = row["instructions"], row["seconds"]
    known = whole is not None and issue > 0
    return row | {"share_of_issue": whole / seconds / issue if known else None}


def instructions(launched: Launched, made: tuple[Code, int] | None) -> float | None:
    """Count the instructions of all warps of a launch.

    Parameters
    ----------
    made
        Its program and its warps; None where it is interpreted.

    Returns
    -------
    float or None
        Instructions; None where a loop's turns are not known.
    """
    if made is None:
        return None
    program, warps = made
    each = float(program.instructions)
    if program.loops:
        if launched.name not in LOOPS:
            return None
        which, turns = LOOPS[launched.name]
        each += which(program.loops) * turns(launched.numbers) - sum(program.loops)
    return prod(launched.grid) * warps * each


def compiled(launched: Launched) -> tuple[Code, int] | None:
    """The program of a launch on this device, and its warps; none where it is interpreted."""
    if not hasattr(launched.kernel, "run") or language.interpreted():
        return None
    made = launched.kernel.run(
        *launched.arguments, grid=launched.grid, warmup=True, **launched.options
    )
    return code(made), int(made.metadata.num_warps)


def issue_rate(device: torch.device, clock: str) -> float:
    """Compute how many instructions of warps a GPU can issue.

    Parameters
    ----------
    clock
        What its driver has said while it ran, in MHz: one, or the lowest to the highest.

    Returns
    -------
    float
        Rate; 0 where the clock is not known. [1/s]
    """
    try:
        highest = 1e6 * float(clock.rpartition(" ")[2])
    except ValueError:
        return 0.0
    return torch.cuda.get_device_properties(device).multi_processor_count * SCHEDULERS * highest


def peaks_of(ceilings: Mapping[str, float] | None) -> dict[str, float]:
    """Pick the best measured rate of every channel. [B/s]

    Parameters
    ----------
    ceilings
        What the unit ``ceilings`` has measured.

    Raises
    ------
    InputError
        If they have not been measured.
    """
    if not ceilings:
        raise InputError("rates: the unit ceilings has measured no rates yet")
    return {key.partition("_B_per_s")[0]: n for key, n in ceilings.items() if "_B_per_s" in key}
