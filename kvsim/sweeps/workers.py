"""Running the chunks of a sweep: in this process, in a process pool, or on a Dask cluster.

Each of the three yields chunks as they finish, in any order, and keeps few in memory at once. The
chunks of a worker that is lost are computed again by another.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from time import monotonic
from typing import TYPE_CHECKING

from kvsim.errors import InputError, first_line
from kvsim.frozen import frozen
from kvsim.sweeps.chunks import SweepChunk, compute
from kvsim.version import __version__

if TYPE_CHECKING:
    import distributed

MIN_BUNDLE_POINTS = 2**14  # points at once: about a twentieth of a second
MAX_BUNDLE_POINTS = 2**18  # about one second
BUNDLE_ROUNDS = 4  # bundles of the same size that would be left for each taker


@frozen
class Bundle:
    """Chunks that one process computes together.

    Attributes
    ----------
    chunks
        The chunks. They are wrapped in this class because Dask would search a plain list for tasks.
    """

    chunks: tuple[SweepChunk, ...]


class Bundles(Iterator[Bundle]):
    """Chunks grouped for dispatch: predictions in bundles, everything else one by one.

    Dispatching a bundle takes a cluster about as long as a thousand predictions, so bundles start
    large; they shrink towards the end, so that all processes finish together.

    Attributes
    ----------
    takers
        Number of threads or processes that take bundles; it may change while a sweep runs.
    """

    def __init__(self, chunks: Iterator[SweepChunk], left: int, takers: int = 1) -> None:
        """Group chunks that have ``left`` points in total."""
        self.chunks, self.left, self.takers = chunks, left, takers

    def __next__(self) -> Bundle:
        """Return the next bundle; its size falls with the number of points that are left."""
        enough = self.left // (BUNDLE_ROUNDS * max(self.takers, 1))
        enough = min(max(enough, MIN_BUNDLE_POINTS), MAX_BUNDLE_POINTS)
        some: list[SweepChunk] = []
        points = 0
        for chunk in self.chunks:
            some.append(chunk)
            points += chunk.points
            if chunk.kind != "predict" or points >= enough:
                break
        if not some:
            raise StopIteration
        self.left -= points
        return Bundle(tuple(some))


def compute_bundle(bundle: Bundle) -> tuple[str, list[bytes]]:
    """Compute the chunks of a bundle, in whichever process this is called.

    Parameters
    ----------
    bundle
        The chunks.

    Returns
    -------
    version : str
        The version of kvsim that computed them.
    contents : list of bytes
        The Parquet file of each chunk.
    """
    return __version__, [compute(chunk) for chunk in bundle.chunks]


BUNDLES_PER_WORKER = 2  # that are under way or waiting
MAX_TRIES = 3  # of a bundle whose worker is lost
CONNECT_TIMEOUT_S = 10.0  # time in which a scheduler must answer [s]
WORKER_TIMEOUT_S = 60.0  # time without any worker after which a sweep gives up [s]
POLL_INTERVAL_S = 2.0  # between two looks at how many workers there are [s]

Done = tuple[int, bytes]  # index of a chunk, and its Parquet file


def compute_here(coming: Bundles) -> Iterator[Done]:
    """Compute bundles one after another in this process.

    Parameters
    ----------
    coming
        The bundles.

    Yields
    ------
    tuple
        Index and Parquet file of each chunk.
    """
    for bundle in coming:
        for chunk in bundle.chunks:  # each is kept before the next is begun
            yield chunk.index, compute(chunk)


def compute_in_processes(coming: Bundles, workers: int) -> Iterator[Done]:
    """Compute bundles in several processes of this machine.

    Parameters
    ----------
    coming
        The bundles.
    workers
        Number of processes.

    Yields
    ------
    tuple
        Index and Parquet file of each chunk, in any order.

    Raises
    ------
    InputError
        If the same chunk ends its process several times.
    """
    lost: Counter[int] = Counter()
    again: list[Bundle] = []
    coming.takers = workers
    finished = False
    while not finished:
        under_way: dict[Future[tuple[str, list[bytes]]], Bundle] = {}
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
            try:
                while True:
                    while len(under_way) < BUNDLES_PER_WORKER * workers:
                        bundle = again.pop() if again else next(coming, None)
                        if bundle is None:
                            break
                        under_way[_submitted(processes, bundle, again)] = bundle
                    if not under_way:
                        finished = True
                        break
                    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                        contents = future.result()[1]
                        yield from _pair_contents(under_way.pop(future), contents)
            except BrokenProcessPool:
                _end(processes)
                again += list(under_way.values())
                lost.update(bundle.chunks[0].index for bundle in under_way.values())
                worst = max(lost, key=lambda index: lost[index])
                if lost[worst] > MAX_TRIES * workers * BUNDLES_PER_WORKER:
                    raise InputError(
                        f"--workers: processes end while they compute chunk {worst}; is there "
                        f"memory enough? Use fewer --workers, and --resume"
                    ) from None
            except BaseException:
                processes.shutdown(wait=False, cancel_futures=True)
                raise


def _end(processes: ProcessPoolExecutor) -> None:
    """Kill the processes of a broken pool, which would wait for ever for one that was starting."""
    for process in list((processes._processes or {}).values()):
        process.kill()


def _pair_contents(bundle: Bundle, contents: list[bytes]) -> Iterator[Done]:
    """Index of each chunk with the bytes of its file."""
    for chunk, content in zip(bundle.chunks, contents, strict=True):
        yield chunk.index, content


def _submitted(
    processes: ProcessPoolExecutor, bundle: Bundle, again: list[Bundle]
) -> "Future[tuple[str, list[bytes]]]":
    """Submit a bundle; one that a broken pool refuses is kept for the next pool."""
    try:
        return processes.submit(compute_bundle, bundle)
    except (BrokenProcessPool, OSError) as broken:  # OSError: it broke while it started a process
        again.append(bundle)
        raise BrokenProcessPool from broken


@contextmanager
def connect(scheduler: str) -> Iterator["distributed.Client"]:
    """Connect to a Dask cluster whose workers have this kvsim.

    Parameters
    ----------
    scheduler
        Address of the cluster's scheduler. Certificates of ``tls://`` are those of Dask's
        configuration (``distributed.comm.tls``).

    Yields
    ------
    distributed.Client
        The connection.

    Raises
    ------
    InputError
        If dask.distributed is missing, the scheduler cannot be reached, it has no workers, or one
        that has another kvsim or none.
    """
    try:
        import distributed
    except ImportError:
        raise InputError(
            "--scheduler: needs dask.distributed; install it with pip install distributed"
        ) from None
    try:
        client = distributed.Client(scheduler, timeout=CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as problem:
        expected = "is it running? Expected an address as tcp://host:8786"
        if scheduler.startswith("tls://"):
            expected = "are Dask's certificates configured (distributed.comm.tls)?"
        raise InputError(
            f"--scheduler: {scheduler[:80]} cannot be reached ({type(problem).__name__}); "
            f"{expected}"
        ) from None
    with client:
        _check(client, scheduler)
        yield client


def _check(client: "distributed.Client", scheduler: str) -> None:
    """Refuse a cluster whose workers have another version of kvsim, or none."""

    def version() -> str | None:
        try:
            from kvsim.version import __version__ as installed
        except ImportError:
            return None
        return installed

    found = client.run(version)
    if not found:
        raise InputError(f"--scheduler: {scheduler} has no workers; start some with dask worker")
    for worker, other in found.items():
        if other != __version__:
            has = "cannot import kvsim" if other is None else f"has kvsim {other}"
            raise InputError(
                f"--scheduler: worker {worker} {has}; install kvsim {__version__} there"
            )


def compute_on_cluster(coming: Bundles, client: "distributed.Client") -> Iterator[Done]:
    """Compute bundles on the workers of a Dask cluster.

    Parameters
    ----------
    coming
        The bundles.
    client
        The connection to the cluster.

    Yields
    ------
    tuple
        Index and Parquet file of each chunk, in any order.

    Raises
    ------
    InputError
        If a chunk ends its workers.
    """
    import distributed

    under_way: dict[distributed.Future, Bundle] = {}
    lost: Counter[int] = Counter()
    again: list[Bundle] = []
    seen, looked = monotonic(), -POLL_INTERVAL_S
    while True:
        if monotonic() - looked >= POLL_INTERVAL_S:
            looked, coming.takers = monotonic(), sum(client.nthreads().values())
        if coming.takers:
            seen = looked
        elif monotonic() - seen > WORKER_TIMEOUT_S:
            raise InputError(
                f"--scheduler: {client.scheduler.address} has lost all its workers; finished "
                f"chunks are kept, --resume continues"
            )
        while len(under_way) < BUNDLES_PER_WORKER * max(coming.takers, 1):
            bundle = again.pop() if again else next(coming, None)
            if bundle is None:
                break
            under_way[client.submit(compute_bundle, bundle, pure=False)] = bundle
        if not under_way:
            return
        try:
            waited = distributed.wait(
                list(under_way), timeout=POLL_INTERVAL_S, return_when="FIRST_COMPLETED"
            )
        except TimeoutError:
            continue
        for future in waited.done:
            bundle = under_way.pop(future)
            first = bundle.chunks[0].index
            try:
                version, contents = future.result()
            except InputError:
                raise
            except Exception as problem:  # a worker was lost, or what it ran on
                lost[first] += 1
                if lost[first] >= MAX_TRIES:
                    reason = f"{type(problem).__name__}: {first_line(problem, 200)}"
                    raise InputError(
                        f"--scheduler: chunk {first} failed {MAX_TRIES} times ({reason}); "
                        f"finished chunks are kept, --resume continues"
                    ) from None
                again.append(bundle)
                continue
            if version != __version__:
                raise InputError(
                    f"--scheduler: a worker has kvsim {version}; install kvsim {__version__} there"
                )
            future.release()
            yield from _pair_contents(bundle, contents)
