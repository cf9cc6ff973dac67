"""Benchmarks of memory and links: of the device, of the host, between both, and side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.graph import Channel, Number, Op, Stream
from kvsim.validate.bench.attention import FP16_BYTES, Shape, shapes
from kvsim.validate.bench.compute import product
from kvsim.validate.bench.work import Bench, Call, Work
from kvsim.validate.kernels.gather import gather
from kvsim.validate.transfer import Lane, Transfers

MEMORY_ACCESSES = ("read", "write", "copy")
LARGE = 2**28  # caches from which on fewer multiples of them are measured [B]


def memory_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks that read, write and copy device memory, of sizes beyond its cache.

    One size fits the cache. The others are from four times the cache up where memory allows it;
    else from twice the cache to the largest size that can be copied.
    """
    most = place.memory / 2 / place.cache
    wanted = place.pick((4.0, 6.0, 8.0), (4.0, 6.0, 8.0, 12.0, 16.0, 24.0))
    large = [caches for caches in wanted if caches <= most / 2]  # with room for another set
    if place.cache > LARGE or len(large) < 3:
        top = min(most, 3.0 if place.cache > LARGE else 8.0)
        large = [2.0, (2.0 + top) / 2, top] if top > 2.0 else [2.0] * (top == 2.0)
    for moved in [place.cache // 4, *(int(caches * place.cache) // 4 * 4 for caches in large)]:
        yield from _sized(place, moved)


def _sized(place: Bench, moved: int) -> Iterator[Work]:
    cached = "yes" if moved < place.cache else "no"
    for way in MEMORY_ACCESSES:
        count = 2 * moved if way == "copy" else moved
        case = {"way": way, "bytes": moved, "cached": cached}
        op = Op(f"memory_{way}", bytes={"hbm": float(count)})
        numbers = partial(torch.ones, moved // 4, device=place.device)
        call = partial(use, way)
        yield Work(place, case, op, numbers, call, alone=True)


def use(way: str, numbers: Tensor) -> Call:
    """Return a function that reads, writes or copies a tensor once.

    Parameters
    ----------
    way
        "read", "write" or "copy".
    numbers
        The tensor, in fp32.
    """
    if way == "read":
        return numbers.sum
    if way == "write":
        return lambda: numbers.fill_(2.0)
    target = torch.empty_like(numbers)
    return lambda: target.copy_(numbers)


def gather_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks that gather rows of one head's keys or values, one in sixteen."""
    for dim in place.pick((128,), (64, 128)):
        for rows in place.pick((64, 2048, 8192, 32768), (64, 256, 1024, 4096, 16384, 65536)):
            moved = 2.0 * rows * dim * FP16_BYTES
            if place.fits(16 * moved):
                case = {"rows": rows, "dim": dim}
                op = Op("gather", kernel="gather", bytes={"hbm": moved})
                inputs = partial(_gather_inputs, place, rows, dim)
                yield Work(place, case, op, inputs, lambda *each: partial(_select, *each))


def _gather_inputs(place: Bench, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    index = torch.randint(16 * rows, (rows,), device=place.device)
    return place.random(16 * rows, dim), index


def _select(source: Tensor, index: Tensor) -> Tensor:
    return source.index_select(0, index)


SIZES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
LARGE_COPY = 2**28
QUICK_SIZES = (2**12, 2**16, 2**20, 2**24)


def h2d(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of copies of several sizes from the host to the device.

    Host memory is pinned, then pageable; a CPU has pinned memory alone.
    """
    yield from _one_way(place, "h2d")


def d2h(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of copies from the device to the host, like :func:`h2d`."""
    yield from _one_way(place, "d2h")


def _one_way(place: Bench, link: Channel) -> Iterator[Work]:
    large = () if place.on_cpu else (LARGE_COPY,)
    sizes = place.pick(QUICK_SIZES, SIZES) + large
    for memory in ("pinned",) if place.on_cpu else ("pinned", "pageable"):
        for moved in sizes:
            if place.fits(2 * moved):
                case = {"memory": memory, "bytes": moved}
                inputs = partial(ends, place, link, moved, memory == "pinned")
                call, held = partial(_link_call, link), partial(lanes, place)
                yield Work(place, case, _op(link, link, moved), inputs, call, "lane", around=held)


def _op(name: str, link: Channel, moved: float) -> Op:
    """Make the op of a copy, as ``kvsim.engine.ops.copy`` does."""
    stream: Stream = "h2d" if link == "h2d" else "d2h"
    through: tuple[Channel, ...] = (link, "hbm", "dram")
    return Op(name, stream, "copy", bytes=dict.fromkeys(through, moved))


def _link_call(link: Channel, transfers: Transfers, *pair: Tensor) -> Call:
    return send(transfers, transfers.h2d if link == "h2d" else transfers.d2h, copier(*pair))


def ends(place: Bench, link: Channel, moved: int, pinned: bool) -> tuple[Tensor, Tensor]:
    """Allocate target and source of a copy between host and device. (bytes,) each

    Parameters
    ----------
    link
        "h2d" or "d2h".
    moved
        Size of the copy. [B]
    pinned
        Whether host memory is pinned; never on a CPU.
    """
    there = torch.ones(moved, dtype=torch.uint8, device=place.device)
    here = torch.ones(moved, dtype=torch.uint8, pin_memory=pinned and not place.on_cpu)
    return (there, here) if link == "h2d" else (here, there)


def copier(target: Tensor, source: Tensor) -> Callable[[], None]:
    """Return a function that starts copying ``source`` to ``target`` and returns at once."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


def send(transfers: Transfers, lane: Lane, work: Call) -> Call:
    """Return a function that queues work on a copy stream, for which compute then waits.

    Parameters
    ----------
    transfers
        The copy streams of the device.
    lane
        The stream to use.
    work
        The work, which starts after all compute that is queued so far.
    """
    return lambda: lane(work, transfers.mark()).wait()


@contextmanager
def lanes(place: Bench) -> Iterator[Transfers]:
    """Open copy streams for the duration of a block."""
    transfers = Transfers(place.device)
    try:
        yield transfers
    finally:
        transfers.shutdown()


SCARCE = 16  # rows there are per row that is fetched


def row_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks that fetch single rows of host memory by the kernel of techniques."""
    for dim in place.pick((64,), (32, 64, 128)):
        for rows in place.pick((128, 1024, 8192, 32768), (128, 512, 2048, 8192, 32768)):
            moved = 2.0 * rows * dim * FP16_BYTES
            if not place.fits(SCARCE * moved):
                continue
            op = Op(
                "rows",
                "h2d",
                "copy",
                rows=2.0 * rows,
                bytes={"h2d": moved, "hbm": moved, "dram": moved},
            )
            case = {"way": "gathered", "rows": rows, "dim": dim}
            inputs, held = partial(_row_inputs, place, rows, dim), partial(lanes, place)
            yield Work(place, case, op, inputs, _row_call, "lane", around=held)


def _row_inputs(place: Bench, rows: int, dim: int) -> tuple[Tensor, ...]:
    homes = (place.random(1, 1, SCARCE * rows, dim).cpu() for _ in "kv")
    k, v = (h if place.on_cpu else h.pin_memory() for h in homes)
    index = torch.randint(SCARCE * rows, (1, 1, rows), device=place.device)
    return k, v, index, place.random(2, 1, 1, rows, dim)


def _row_call(transfers: Transfers, k: Tensor, v: Tensor, index: Tensor, out: Tensor) -> Call:
    return send(transfers, transfers.h2d, lambda: gather(k, v, index, out[0], out[1]))


INPUTS, OUTPUTS = 4096, 4096
CONTENTION_BYTES = (2**24, 2**25, 3 * 2**24, 2**26, 5 * 2**24)


def contention_works(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of a product and a shorter copy side by side, and of each alone."""
    rows = 32 if place.on_cpu else 4096
    for copied in place.pick(CONTENTION_BYTES[:2], CONTENTION_BYTES):
        repeats = copied // (2**24 if place.on_cpu else 2**22)
        one = product(place, "fp16", rows, INPUTS, OUTPUTS).op
        moved: dict[Channel, Number] = {"hbm": repeats * one.bytes["hbm"]}
        op = replace(one, flops=repeats * one.flops, bytes=moved, launches=float(repeats))
        for way in ("copy", "compute", "both"):
            case: dict[str, object] = {"pair": f"gemm beside {copied} B"}
            case |= {"compute": "gemm", "way": way}
            inputs = partial(_contention_inputs, place, rows, copied)
            call, held = partial(_contention_call, way, repeats), partial(lanes, place)
            asked = _op("copy", "h2d", float(copied)) if way == "copy" else op
            case["bytes"] = copied
            yield Work(place, case, asked, inputs, call, "beside", alone=True, around=held)


def _contention_inputs(place: Bench, rows: int, copied: int) -> tuple[Tensor, ...]:
    operands = place.random(rows, INPUTS), place.random(OUTPUTS, INPUTS)
    return *ends(place, "h2d", copied, True), *operands


def _contention_call(
    way: str, repeats: int, transfers: Transfers, to: Tensor, home: Tensor, x: Tensor, w: Tensor
) -> Call:
    copy = copier(to, home)

    def compute() -> None:
        for _ in range(repeats):
            x @ w.t()

    def copy_and_compute() -> None:
        mark = transfers.h2d(copy, transfers.mark())
        compute()
        mark.wait()

    if way == "copy":
        return send(transfers, transfers.h2d, copy)
    return compute if way == "compute" else copy_and_compute


HERE = torch.device("cpu")
LAST_LEVEL_CACHE = 2**25  # a usual last-level cache [B]


def reads(place: Bench) -> Iterator[Work]:
    """Yield benchmarks that read host memory, of sizes far beyond the CPU's caches."""
    for work in memory_works(on_host(place)):
        if work.case["cached"] == "no":
            op = replace(work.op, stream="cpu", bytes={"dram": work.op.bytes["hbm"]})
            yield replace(work, op=op, clock="cpu")


def products(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of square fp32 products on the CPU."""
    for width in place.pick((256, 512, 1024), (256, 512, 768, 1024, 1536, 2048)):
        op = Op("product", "cpu", "cpu", flops=2.0 * width**3, dtype="fp32")
        pair = partial(_square_pair, width)
        yield Work(place, {"width": width}, op, pair, lambda x, w: lambda: x @ w, "cpu", alone=True)


def _square_pair(width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(width, width), torch.randn(width, width)


def attends(place: Bench) -> Iterator[Work]:
    """Yield benchmarks of decode attention on the CPU over fp32 caches, as in FastDecode."""
    here = on_host(place)
    for shape in shapes(here):
        moved = float(2 * shape.kv_numbers * FP16_BYTES)
        if shape.new == 1 and here.fits(moved):
            op = Op("attn", "cpu", "cpu", flops=shape.flops, bytes={"dram": moved}, dtype="fp32")
            inputs = partial(_attend_inputs, here, shape)
            yield Work(here, shape.case, op, inputs, partial(_attend_call, shape), "cpu")


def _attend_inputs(place: Bench, s: Shape) -> tuple[Tensor, ...]:
    wide = torch.float32
    k, v = (place.random(s.batch, s.kv_heads, s.tokens, s.dim, dtype=wide) for _ in "kv")
    return place.random(s.batch, s.heads, s.new, s.dim, dtype=wide), k, v


def _attend_call(s: Shape, q: Tensor, k: Tensor, v: Tensor) -> Call:
    grouped = s.heads != s.kv_heads
    return partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=grouped)


def on_host(place: Bench) -> Bench:
    """Return the description of the host's CPU as the device, with the same limits."""
    return replace(place, device=HERE, cache=place.cache if place.on_cpu else LAST_LEVEL_CACHE)
