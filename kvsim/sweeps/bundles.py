"""Chunks as processes are given them: several at once, many at first and few at last."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from kvsim import __version__
from kvsim.sweeps.chunks import SweepChunk, compute
from kvsim.sweeps.store import SharedFolder

FEWEST, MOST = 2**14, 2**18  # points at once: about a twentieth of a second, and one second
ROUNDS = 4  # bundles of the same size that would be left for each taker

Bundle = list[SweepChunk]


class Bundles(Iterator[Bundle]):
    """Predictions several chunks at once, everything else chunk by chunk.

    To hand over a bundle costs a cluster about as much time as a thousand predictions, so the first
    ones are large; the last ones are small, so that all processes end together.

    Attributes
    ----------
    takers
        Threads or processes that take bundles; whoever hands them out may change it.
    """

    def __init__(self, chunks: Iterator[SweepChunk], left: int, takers: int = 1) -> None:
        """Divide chunks that have so many points left in all."""
        self.chunks, self.left, self.takers = chunks, left, takers

    def __next__(self) -> Bundle:
        """As many chunks as are enough for now; the fewer are left, the fewer they are."""
        enough = min(max(self.left // (ROUNDS * max(self.takers, 1)), FEWEST), MOST)
        some: Bundle = []
        points = 0
        for chunk in self.chunks:
            some.append(chunk)
            points += chunk.points
            if chunk.kind != "predict" or points >= enough:
                break
        if not some:
            raise StopIteration
        self.left -= points
        return some


def compute_all(
    chunks: Bundle, folder: SharedFolder | None = None
) -> tuple[str, list[bytes | None]]:
    """The version of kvsim that computed some chunks, and the bytes of their files.

    None instead of the bytes of a file that this process could write into the sweep's folder. Files
    are written beside the computation, which does not wait for the disk.
    """
    if folder is None or not folder.here():
        return __version__, [compute(chunk)[1] for chunk in chunks]
    contents: list[tuple[bytes, Future[bool]]] = []
    with ThreadPoolExecutor(1) as writer:
        for chunk in chunks:
            content = compute(chunk)[1]
            contents.append((content, writer.submit(folder.kept, chunk.index, content)))
    return __version__, [None if kept.result() else content for content, kept in contents]


class Packed:
    """A bundle that a cluster hands on without looking for results of other tasks in it."""

    def __init__(self, chunks: Bundle) -> None:
        """Keep the chunks as they are."""
        self.chunks = chunks


def compute_packed(
    packed: Packed, folder: SharedFolder | None = None
) -> tuple[str, list[bytes | None]]:
    """``compute_all`` of packed chunks."""
    return compute_all(packed.chunks, folder)
