"""``kvsim predict``, ``sweep``, ``explore`` and ``reproduce``: predictions without a plan."""

from contextlib import ExitStack
from dataclasses import replace
from math import prod
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
    """Predict latency, throughput and memory for every combination of technique and request size.

    Each batch starts on an idle GPU. With ``concurrency`` instead of ``batch``, a server is
    predicted to which that many clients send one request after another.

    Returns
    -------
    Result
        ``.rows`` has one row per technique, batch, prompt and generated length. Techniques that
        cannot run on this hardware are left out; ``.answer.left_out`` says why.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.

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
    rows = prod(map(len, (techniques, *sizes)))
    check_work(
        f"--technique, --batch, --prompt, --generate: ask for {rows:,} rows together",
        rows,
        MAX_ROWS,
        "ask for fewer, or run kvsim sweep",
    )
    refuse_idle_drive(inputs, techniques)
    if inputs.n_cpu_moe == "auto":
        where = keep_fewest(where, techniques[0], [max(n) for n in sizes])
        many = len(where.host.experts)
        print_note(f"--n-cpu-moe {many}, the smallest number with which the model fits")
    if clients:
        check_work("--concurrency", rows, MAX_LOOPS, "ask for fewer at once")
    else:  # a batch is given to the engine by its own process
        where = replace(where, stack=where.stack.offline)
    found = predict_points(where, techniques, *sizes, bool(clients), every)
    if every:
        print_note(
            f"`{EVERY}` compares the {len(techniques)} techniques that an engine runs at the speed "
            f"of stack {where.stack.name}; name others with --technique, or compare them with "
            "`kvsim explore`"
        )
    return found


def _list_runnable(where: Deployment) -> list[Technique]:
    """List the techniques, with default settings, that an engine runs on this deployment."""

    return [
        t
        for t in map(parse, [*TECHNIQUES, *FORMATS])
        if not t.refuses_released(where)
        and runs_at_such_speed(t.name, where)
        and not lacks_head(t, where)
    ]


@takes_options("grid", "model", "gpu", "technique", "batch", "prompt", "generate")
def sweep(inputs: Inputs) -> Result[None]:
    """Predict a grid of batch sizes and prompt lengths, in memory.

    This is faster than :func:`predict` for many points, as notes and explanations are left out: a
    thousand points take one or two seconds. ``kvsim sweep`` also varies models, GPUs and other
    inputs, and stores the results in Parquet files.

    Returns
    -------
    Result
        ``.rows`` has TTFT, TPOT, throughput and memory of every point.

    Examples
    --------
    >>> grid = sweep("llama3.1-8b", "h100", batch=range(1, 9), prompt=[1024, 4096])
    >>> len(grid.rows)
    16
    """

    from kvsim.report.sweep import sweep_grid

    where, techniques = build_deployment(inputs), parse_several(inputs.technique)
    batches = np.array(inputs.batch, dtype=float)
    return sweep_grid(where, techniques, batches, inputs.prompt, inputs.generate, inputs.line())


@takes_options("explore", "model", "gpu", "out")
def explore(inputs: Inputs) -> None:
    """Write an HTML page that shows predictions for inputs chosen with sliders.

    The sliders set the batch size, the prompt length, the bandwidth of the host link and, for
    techniques that have them, bits per number, drafted tokens and acceptance.

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
    """Compare measured times, rates or sizes with predictions: a paper's tables, or your own.

    Returns
    -------
    Result
        ``.rows`` has the measured and predicted value and the relative error of each measurement;
        ``.found`` has the mean and the largest error of each table.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.

    Examples
    --------
    >>> scores = reproduce("kcache")  # doctest: +SKIP
    >>> scores.frame()  # doctest: +SKIP
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
    """A finished sweep, whose results are Parquet files in a folder.

    Attributes
    ----------
    command
        The equivalent command line.
    store
        The folder of the results.
    spec
        The specification of the sweep.
    """

    command: str
    store: "ResultStore"
    spec: "Spec"

    def write(self, path: str | Path) -> None:
        """Write the HTML report of the sweep.

        Parameters
        ----------
        path
            The file to write.
        """
        from kvsim.report.sweep import make_result

        make_result(self.store, self.spec, self.command).write(path)


@takes_options("sweep", "spec", "out")
def run_sweep(inputs: Inputs) -> SweepOnDisk:
    """Compute the grid of a sweep's file and store it as Parquet files in a folder.

    Chunks of the grid are computed in this process, in several processes (``workers``) or on a Dask
    cluster (``scheduler``). An interrupted sweep continues with ``resume=True``.

    Returns
    -------
    SweepOnDisk
        The folder and the specification, from which a report can be written.

    Raises
    ------
    InputError
        If an argument is unknown, malformed or out of range; the message names the argument and
        says what was expected.
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
    """Compute the chunks that are not in the folder yet, and store them."""
    from kvsim.sweeps import chunks as parts
    from kvsim.sweeps.store import ResultStore
    from kvsim.sweeps.workers import Bundles, compute_here, compute_in_processes, compute_on_cluster

    store = ResultStore(inputs.out, spec, inputs.resume)
    total, before = parts.count(spec), frozenset(store.done)
    progress = ProgressLine("", "chunks", total, estimates=True)
    every = parts.divide_sweep(spec)
    left = progress.started_by(chunk for chunk in every if chunk.index not in before)
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
