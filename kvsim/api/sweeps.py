"""Grids of predictions, plans, simulations or fleets in Parquet, here or on a cluster."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.console import ProgressLine, print_note
from kvsim.errors import require
from kvsim.frozen import frozen
from kvsim.options import Inputs, takes_options

if TYPE_CHECKING:
    from kvsim.sweeps.plugins import Plugin
    from kvsim.sweeps.spec import Spec
    from kvsim.sweeps.store import ResultStore


@frozen
class SweepOnDisk:
    """A sweep whose chunks are in a folder."""

    command: str
    store: "ResultStore"
    spec: "Spec"

    def write(self, path: str | Path) -> None:
        """Write the page that ``--report`` writes.

        Parameters
        ----------
        path
            The page's file.
        """
        from kvsim.report.sweep import make_result

        make_result(self.store, self.spec, self.command).write(path)


@takes_options("sweep", "spec", "out")
def run_sweep(inputs: Inputs) -> SweepOnDisk:
    """Compute a grid on this machine or a Dask cluster, one Parquet file for each chunk.

    Returns
    -------
    SweepOnDisk
        The folder of the sweep, which can write its page.
    """
    from kvsim.sweeps import chunks as parts
    from kvsim.sweeps import plugins
    from kvsim.sweeps.spec import read
    from kvsim.sweeps.workers import connect
    from kvsim.techniques import TECHNIQUES

    require("pyarrow")

    def read_techniques(paths: tuple[Path, ...]) -> list[str]:
        plugins.install(plugins.read(paths))
        return list(TECHNIQUES)

    spec = read(inputs.spec, read_techniques)
    own = plugins.read(spec.plugins)
    parts.check(spec)
    cluster = ExitStack()
    client = cluster.enter_context(connect(inputs.scheduler)) if inputs.scheduler else None
    with cluster:  # connected before anything is written
        store = _compute(inputs, spec, own, client)
    again = "" if inputs.resume else " --resume"  # what is in --out is not computed again
    return SweepOnDisk(inputs.line() + again, store, spec)


def _compute(
    inputs: Inputs, spec: "Spec", own: "tuple[Plugin, ...]", client: object
) -> "ResultStore":
    """Compute the chunks that the folder does not hold yet."""
    from kvsim.sweeps import chunks as parts
    from kvsim.sweeps.store import ResultStore
    from kvsim.sweeps.workers import Bundles, compute_here, compute_in_processes, compute_on_cluster

    store = ResultStore(inputs.out, spec, own, inputs.resume)
    total, before = parts.count(spec), frozenset(store.done)
    progress = ProgressLine("", "chunks", total, estimates=True)
    left = progress.started_by(
        chunk for chunk in parts.divide_sweep(spec, own) if chunk.index not in before
    )
    coming = Bundles(left, spec.points * (total - len(before)) // total)
    workers = inputs.workers or 1
    if client is not None:
        done = compute_on_cluster(coming, client, store.shared)
    elif workers > 1:
        done = compute_in_processes(coming, workers, store.shared)
    else:
        done = compute_here(coming, store.shared)
    for index, content in done:
        store.keep(index, content)
        progress(len(store.done))
    progress.finish()
    store.clean_up()
    took = f"computed in {progress.took:.2f} s"
    print_note(f"{spec.points:,} points in {total:,} chunks, {took}: {inputs.out}")
    return store
