"""Predictions at given points, grids of them in memory or on disk, and published rows beside."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsim.api.deployments import build_deployment, keep_fewest, refuse_idle_drive
from kvsim.console import ProgressLine, print_note, print_written
from kvsim.errors import InputError, require
from kvsim.files import check_target
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.options import MAX_ROWS, Inputs, check_work, takes_options
from kvsim.prediction.generate import Prediction
from kvsim.report.predict import predict_points
from kvsim.report.result import Result
from kvsim.techniques import TECHNIQUES, parse, parse_several
from kvsim.techniques.heads import lacks_head
from kvsim.techniques.papers.cache import FORMATS
from kvsim.techniques.released import FULL, runs_at_such_speed
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from kvsim.evidence.scores import Score
    from kvsim.sweeps.spec import Spec
    from kvsim.sweeps.store import ResultStore

EVERY = "all"  # in place of techniques: those that can be run
MAX_LOOPS = 100
"""Closed loops that one command plays."""


@takes_options("predict", "model", "gpu", "technique", "batch", "prompt", "generate")
def predict(inputs: Inputs) -> Result[list[Prediction]]:
    """Predict latency, throughput and memory of techniques at every combination of sizes.

    Returns
    -------
    Result
        The predictions, one per row; techniques that cannot run are left out.

    Raises
    ------
    InputError
        For what the command would refuse.

    Examples
    --------
    >>> found = predict("llama3.1-8b", "h100", ["full", "fp8"], batch=[1, 32], prompt="8k")
    >>> [(row["technique"], row["batch"], row["fits"]) for row in found.rows]
    [('full', 1, True), ('full', 32, True), ('fp8', 1, True), ('fp8', 32, True)]
    """

    every = inputs.technique.strip().lower() == EVERY
    where = build_deployment(inputs)
    named = [] if every else parse_several(inputs.technique)
    techniques = (_list_runnable(where) if every else named) or [parse(FULL)]
    clients = inputs.concurrency
    sizes = clients or inputs.batch, inputs.prompt, inputs.generate
    rows = len(techniques) * len(sizes[0]) * len(sizes[1]) * len(sizes[2])
    check_work(
        f"--technique, --batch, --prompt, --generate: ask for {rows:,} rows together",
        rows,
        MAX_ROWS,
        "ask for fewer, or run kvsim sweep",
    )
    refuse_idle_drive(inputs, techniques)
    if inputs.n_cpu_moe == "auto":
        where = keep_fewest(where, techniques[0], [max(n) for n in sizes])
        print_note(f"--n-cpu-moe {len(where.host.experts)}: experts of as few layers as fit")
    if clients:
        check_work("--concurrency", rows, MAX_LOOPS, "ask for fewer at once")
    else:  # a batch is given to the engine by its own process
        where = replace(where, stack=where.stack.offline)
    found = predict_points(where, techniques, *sizes, bool(clients), every)
    if every:
        print_note(
            f"{EVERY}: what an engine runs at the speed of stack {where.stack.name}, "
            f"{len(techniques)} in all; name others with --technique, or compare them with `kvsim "
            "explore`"
        )
    for reason in found.answer.left_out:
        print_note(f"left out: {reason}")
    return found


def _list_runnable(where: Deployment) -> list[Technique]:
    """Every technique, in its default setting, that some engine runs with this model and GPU."""

    return [
        t
        for t in map(parse, [*TECHNIQUES, *FORMATS])
        if not t.refuses_released(where)
        and runs_at_such_speed(t.name, where)
        and not lacks_head(t, where)
    ]


@takes_options("grid", "model", "gpu", "technique", "batch", "prompt", "generate")
def sweep(inputs: Inputs) -> Result[None]:
    """Predict a grid of batches and prompts in memory.

    Nothing is explained point by point, so that a thousand points take a second or two.
    ``kvsim sweep`` has grids over everything, on disk.

    Returns
    -------
    Result
        Times, throughput and memory of every point, one per row.

    Examples
    --------
    >>> grid = sweep("llama3.1-8b", "h100", batch=range(1, 9), prompt=[1024, 4096])
    >>> len(grid.rows)
    16
    """

    from kvsim.report.sweep import sweep_grid

    return sweep_grid(
        build_deployment(inputs),
        parse_several(inputs.technique),
        np.array(inputs.batch, dtype=float),
        inputs.prompt,
        inputs.generate,
        inputs.line(),
    )


@takes_options("explore", "model", "gpu", "out")
def explore(inputs: Inputs) -> None:
    """Write a page with sliders: batch, prompt, bits, drafts, link.

    Returns
    -------
    None
        The page is written to ``out``.

    Examples
    --------
    >>> explore("llama3.1-8b", "h100", out="explore.html")  # doctest: +SKIP
    """
    from kvsim.report.explore import make_result

    check_target(inputs.out, "--out")
    if inputs.generate < 2:
        raise InputError(
            "--generate: got 1; expected at least 2, as the page compares times per token"
        )
    where = build_deployment(inputs)
    some = parse_several(inputs.technique) or [parse(name) for name in TECHNIQUES]
    page = make_result(where, some, inputs.generate)
    replace(page, command=inputs.line(without="out")).write(inputs.out)
    print_written(inputs.out)


@takes_options("reproduce", "source")
def reproduce(inputs: Inputs) -> "Result[list[Score]]":
    """Compare published measurements, or your own, with predictions.

    Parameters
    ----------
    source : str
        Name of a paper whose tables kvsim ships, ``"all"`` of them, or the path of a CSV file
        with your own measurements.

    Returns
    -------
    Result
        ``.rows`` has a row for each measurement, with its prediction and the relative error;
        ``.found`` the errors of each table.
    """
    from kvsim.evidence import predicted as predicted_rows
    from kvsim.evidence import published
    from kvsim.report.reproduce import make_result

    source = inputs.source
    names = list(published.papers()) if source == "all" else [source]
    found = [row for name in names for row in published.read(name)]
    return make_result(found, list(map(predicted_rows.predict, found)), source)


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
    from kvsim.sweeps.spec import read
    from kvsim.sweeps.workers import connect

    require("pyarrow")

    spec = read(inputs.spec)
    parts.check(spec)
    cluster = ExitStack()
    client = cluster.enter_context(connect(inputs.scheduler)) if inputs.scheduler else None
    with cluster:  # connected before anything is written
        store = _compute(inputs, spec, client)
    again = "" if inputs.resume else " --resume"  # what is in --out is not computed again
    return SweepOnDisk(inputs.line() + again, store, spec)


def _compute(inputs: Inputs, spec: "Spec", client: object) -> "ResultStore":
    """Compute the chunks that the folder does not hold yet."""
    from kvsim.sweeps import chunks as parts
    from kvsim.sweeps.store import ResultStore
    from kvsim.sweeps.workers import Bundles, compute_here, compute_in_processes, compute_on_cluster

    store = ResultStore(inputs.out, spec, inputs.resume)
    total, before = parts.count(spec), frozenset(store.done)
    progress = ProgressLine("", "chunks", total, estimates=True)
    left = progress.started_by(
        chunk for chunk in parts.divide_sweep(spec) if chunk.index not in before
    )
    coming = Bundles(left, spec.points * (total - len(before)) // total)
    workers = inputs.workers or 1
    if client is not None:
        done = compute_on_cluster(coming, client)
    elif workers > 1:
        done = compute_in_processes(coming, workers)
    else:
        done = compute_here(coming)
    for index, content in done:
        store.keep(index, content)
        progress(len(store.done))
    progress.finish()
    took = f"computed in {progress.took:.2f} s"
    print_note(f"{spec.points:,} points in {total:,} chunks, {took}: {inputs.out}")
    return store
