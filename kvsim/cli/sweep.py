"""`kvsim sweep`: a grid of predictions, plans, simulations or fleets, in Parquet."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from kvsim.cli.arguments import count, option
from kvsim.cli.options import command_line, say_written
from kvsim.errors import InputError, require
from kvsim.files import check_target

MOST_WORKERS = 256
PATIENCE, TERMINAL, LOG = 2.0, 0.5, 10.0  # before the first line, and between two [s]


def sweep(
    spec: Annotated[str, typer.Argument(metavar="SPEC.toml", help="What to cover.")],
    out: Annotated[str, option("--out", "DIR", "Folder for the chunks, one Parquet file each.")],
    workers: Annotated[
        str | None, option("--workers", "N", "Processes on this machine; 1 if not given.")
    ] = None,
    scheduler: Annotated[
        str | None, option("--scheduler", "tcp://..", "A Dask cluster, instead of this machine.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what --out has, and compute the rest.")
    ] = False,
    report: Annotated[
        Path | None, option("--report", "F.html", "Write an HTML page there.")
    ] = None,
) -> None:
    """Compute a grid on this machine or a Dask cluster."""
    from kvsim.sweeps import chunks as parts
    from kvsim.sweeps import plugins
    from kvsim.sweeps.bundles import Bundles
    from kvsim.sweeps.spec import read
    from kvsim.sweeps.store import ResultStore
    from kvsim.sweeps.workers import cluster, here, pool
    from kvsim.techniques import TECHNIQUES

    require("pyarrow")
    if report is not None:
        check_target(report, "--report")
    several = 1 if workers is None else count("--workers", workers)
    if not 1 <= several <= MOST_WORKERS:
        raise InputError(f"--workers: got {several}; expected 1 to {MOST_WORKERS}")

    def techniques(paths: tuple[Path, ...]) -> list[str]:
        plugins.install(plugins.read(paths))
        return list(TECHNIQUES)

    asked = read(Path(spec), techniques)
    own = plugins.read(asked.plugins)
    parts.check(asked)
    store = ResultStore(Path(out), asked, own, resume)
    total = parts.count(asked)
    before = frozenset(store.done)
    progress = _SweepProgress(total, len(store.done))
    left = progress.begun_by(
        chunk for chunk in parts.chunks_of(asked, own) if chunk.index not in before
    )
    coming = Bundles(left, asked.points * (total - len(before)) // total)
    if scheduler is not None:
        done = cluster(coming, scheduler, store.shared)
    elif several > 1:
        done = pool(coming, several, store.shared)
    else:
        done = here(coming, store.shared)
    for index, content in done:
        store.keep(index, content)
        progress(len(store.done))
    progress.close()
    store.close()
    if report is not None:
        from kvsim.report.sweep_page import write_page

        again = "" if resume else " --resume"  # what is in --out is not computed again
        write_page(report, store, asked, command_line() + again)
        say_written(report)
    print(
        f"kvsim: {asked.points:,} points in {total:,} chunks, {progress.took}: {out}",
        file=sys.stderr,
    )


class _SweepProgress:
    """How many chunks are done, and how long the rest may take.

    Time counts from the first chunk: before it a sweep reads its files and connects to a cluster.
    """

    def __init__(self, total: int, before: int) -> None:
        self.total, self.before = total, before
        self.live, self.said = sys.stderr.isatty(), False
        self.began = self.last = monotonic()
        self.next = self.began + PATIENCE

    def begun_by(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """The chunks, the first of which begins the time."""
        self.began = self.last = monotonic()
        yield from chunks

    @property
    def took(self) -> str:
        """From the first chunk that was handed out to the last one that was done, in words."""
        return f"computed in {self.last - self.began:.2f} s"

    def __call__(self, done: int) -> None:
        self.last = now = monotonic()
        if now < self.next:
            return
        self.next, self.said = now + (TERMINAL if self.live else LOG), True
        each = (now - self.began) / max(done - self.before, 1)
        left = _span(each * (self.total - done))
        line = f"kvsim: {done:,} of {self.total:,} chunks, about {left} left"
        print(f"\r{line:<70}" if self.live else line, end="" if self.live else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    def close(self) -> None:
        if self.live and self.said:
            print(file=sys.stderr)


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
