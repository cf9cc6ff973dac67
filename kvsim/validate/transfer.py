"""Copies between GPU and host beside compute: streams and events, or threads on a CPU.

On CUDA a lane is a stream of its own and a mark an event. On a CPU a lane for copies is a thread
and a mark something it sets, so that work really overlaps and a missing wait is a real bug there
too. The second lane for compute has no cores of its own there: it runs when it is waited for.

Rules that keep buffers right: a stream that fills a buffer waits for its last readers, one that
reads it waits until it is filled, and nothing is freed before compute waits for the lane that uses
it, because PyTorch hands freed memory to the stream that asked for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from math import prod
from mmap import mmap
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.validate.counter import NULL_COUNTER, NullCounter
from kvsim.validate.processor import available_memory

MAPPED = 3  # cudaHostRegisterPortable and cudaHostRegisterMapped
CACHE_LINE = 64  # every home begins at a line of the host's cache [B]
PINNED_SHARE = 0.8  # of the host's free memory that a run may pin


class HostArena:
    """Pinned host memory of one run, as a single mapping of the planned size.

    Memory beyond the plan gets mappings of its own. PyTorch's own pinned memory would round every
    tensor up to a power of two, and never be given back.

    Parameters
    ----------
    planned : size of all tensors in host memory together. [B]
    """

    def __init__(self, planned: int = 0) -> None:
        self.planned, self.users = planned, 0
        self._pages: mmap | None = None
        self._used = 0
        self._registered: list[int] = []  # addresses

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in pinned memory.

        Raises
        ------
        RuntimeError
            If the memory cannot be pinned.
        """
        numbers = prod(shape)
        needed = lines(numbers * dtype.itemsize)
        if not numbers:
            return torch.zeros(shape, dtype=dtype)
        if self._used + needed > self.planned:
            return torch.frombuffer(self._map(needed), dtype=dtype, count=numbers).view(shape)
        if self._pages is None:
            self._pages = self._map(self.planned)
        begin, self._used = self._used, self._used + needed
        home = torch.frombuffer(self._pages, dtype=dtype, count=numbers, offset=begin)
        return home.view(shape)

    def leave(self) -> None:
        """Count one user of the memory less; after the last one, unpin and free all of it."""
        self.users -= 1
        if self.users > 0:
            return
        while self._registered:
            _runtime().cudaHostUnregister(self._registered.pop())
        self._pages, self._used = None, 0

    def _map(self, needed: int) -> mmap:
        pages = mmap(-1, needed)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        problem = int(_runtime().cudaHostRegister(address, needed, MAPPED))
        if problem:
            size = f"{needed / 2**20:.0f} MiB"
            raise RuntimeError(f"host memory: {size} cannot be pinned (CUDA error {problem})")
        self._registered.append(address)
        return pages


_PLANNED: ContextVar[HostArena | None] = ContextVar("planned", default=None)


def arena() -> HostArena:
    """Return the arena of the current run's planned size, or one that grows on demand."""
    found = _PLANNED.get() or HostArena()
    found.users += 1
    return found


@contextmanager
def planned(needed: int) -> Iterator[None]:
    """Let all allocations of host memory within the block share one mapping.

    Parameters
    ----------
    needed
        Size of the mapping. [B]
    """
    before = _PLANNED.set(HostArena(needed))
    try:
        yield
    finally:
        _PLANNED.reset(before)


def check_host_memory(needed: int, what: str, free: Callable[[], int] = available_memory) -> None:
    """Check that enough host memory is free to pin; otherwise the system would kill the process.

    Parameters
    ----------
    needed
        Memory to pin. [B]
    what
        Purpose of the memory, which begins the message.
    free
        Function that measures the host's free memory. [B]

    Raises
    ------
    InputError
        If it is not; the message states the needed and the free memory.
    """
    there = free()
    if needed > PINNED_SHARE * there:
        raise InputError(
            f"{what}: {needed / 2**30:.1f} GiB of host memory are needed, {there / 2**30:.1f} GiB "
            f"are free; choose a smaller batch, or shorter prompts"
        )


def lines(size: int) -> int:
    """Round a size up to whole cache lines of the host. [B]"""
    return -(-size // CACHE_LINE) * CACHE_LINE


def _runtime() -> Any:
    """CUDA's runtime library, loaded with PyTorch."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


COPY_DIRECTIONS = ("h2d", "d2h")


class Mark(Protocol):
    """A point in a stream, or in the compute stream, that other work can wait for."""

    def wait(self) -> None:
        """Make compute wait for this point; raise any error of the work before it."""


Lane = Callable[..., Mark]
"""``lane(work, *after)`` queues a function behind marks, and returns the mark of its end."""


class Transfers:
    """The streams (lanes) of one run: to the device, from the device, and a second one for compute.

    Parameters
    ----------
    counter
        Counter that is notified while copies run.
    """

    def __init__(self, device: torch.device, counter: NullCounter = NULL_COUNTER) -> None:
        self.device, on_cuda = device, device.type == "cuda"
        copying = {way: partial(_run, partial(counter.moving, way)) for way in COPY_DIRECTIONS}
        self.h2d, self.d2h = (
            _CudaLane(device, way, run) if on_cuda else _ThreadLane(run)
            for way, run in copying.items()
        )
        self._runs = partial(_run, nullcontext)
        self.side = _CudaLane(device, "side", self._runs) if on_cuda else _ComputeLane(self._runs)
        self._cpu: _ThreadLane | None = None
        self._arena = arena()

    def submit(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Queue CPU compute beside the GPU's; return a function that waits for the result."""
        if self._cpu is None:
            self._cpu = _ThreadLane(self._runs)
        found: list[Tensor] = []
        mark = self._cpu(lambda: found.append(work()), self.mark())

        def answer() -> Tensor:
            mark.wait()
            return found[0]

        return answer

    def mark(self) -> Mark:
        """Return the current end of the compute stream."""
        return _CudaMark(self.device) if self.device.type == "cuda" else _Done()

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate zeros in host memory, pinned where there is a GPU.

        Returns
        -------
        Tensor
            The zeros; a tensor without memory in a rehearsal.

        Raises
        ------
        RuntimeError
            If the memory cannot be pinned.
        """
        if self.device.type == "cuda":
            return self._arena.room(shape, dtype)
        where = "meta" if self.device.type == "meta" else "cpu"
        return torch.zeros(shape, dtype=dtype, device=where)

    def shutdown(self) -> None:
        """End all lanes after their remaining work, and unpin host memory."""
        for lane in (self.h2d, self.d2h, self.side, *([self._cpu] if self._cpu else ())):
            lane.shutdown()
        self._arena.leave()


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each source to its target, given pairs (target, source).

    On a GPU the copies are asynchronous.

    Parameters
    ----------
    pairs : targets and sources of the same shapes.
    """
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def to_device(
    numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.long
) -> Tensor:
    """Copy a few numbers from the host to a device, without making either side wait.

    From pageable memory, the host would wait for all previous work of the device.

    Returns
    -------
    Tensor
        The numbers on the device, (n,).
    """
    made = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


class _Done:
    """Mark of work on a CPU, which is done when it returns."""

    def wait(self) -> None:
        return None


Runs = Callable[[Callable[[], None], tuple[Mark, ...]], None]
"""``run(work, after)`` does a lane's work behind its marks."""


def _run(
    told: Callable[[], AbstractContextManager[None]],
    work: Callable[[], None],
    after: tuple[Mark, ...],
) -> None:
    for one in after:
        one.wait()
    with told():
        work()


@frozen
class _ThreadMark:
    ended: "Future[None]"

    def wait(self) -> None:
        self.ended.result()  # raises what the work raised


class _ThreadLane:
    """A thread that represents a stream."""

    def __init__(self, run: Runs) -> None:
        threads = torch.get_num_threads()  # as compute has; a new thread would take every core
        self._thread = ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, threads))
        self._thread.submit(int)  # so that it is there, and its clock can be read
        self._run = torch.inference_mode()(run)

    def __call__(self, work: Callable[[], None], *after: Mark) -> Mark:
        return _ThreadMark(self._thread.submit(self._run, work, after))

    def shutdown(self) -> None:
        self._thread.shutdown()


class _ComputeLane:
    """A stream whose work runs when it is needed, on the thread that needs it."""

    def __init__(self, run: Runs) -> None:
        self._run = run

    def __call__(self, work: Callable[[], None], *after: Mark) -> Mark:
        return _Later(partial(self._run, work, after))

    def shutdown(self) -> None:
        """Work that was never waited for is not needed."""


class _Later:
    """Work that is run by the first thread that waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work:
            work()


class _CudaMark:
    """An event on a device's current stream, which need not be the current device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _CudaLane:
    """A separate CUDA stream, on which the host only queues work."""

    def __init__(self, device: torch.device, way: str, run: Runs) -> None:
        self._device, self._run = device, run
        self._stream = _stream(device, way)

    def __call__(self, work: Callable[[], None], *after: Mark) -> Mark:
        with torch.cuda.stream(self._stream):
            self._run(work, after)
            return _CudaMark(self._device)

    def shutdown(self) -> None:
        self._stream.synchronize()


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    """Return the stream of a device and direction, which all runs share."""
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made
