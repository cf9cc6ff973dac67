"""A run's requests as Parquet with its options and results; a later run can continue from it."""

import json
from hashlib import sha256
from pathlib import Path

from kvsim.errors import InputError
from kvsim.files import RESULT, check_input, own_output, replacing
from kvsim.graph import Array
from kvsim.report.json import Row
from kvsim.serving.costs import StepCosts
from kvsim.serving.records import FINISHED
from kvsim.serving.simulate import Run
from kvsim.traces.requests import CONDUCT, Requests
from kvsim.version import __version__

MARK, ANSWER = b"kvsim run", b"kvsim result"
FATES = ["unfinished", "finished", "refused", "aborted"]


def run_digest(requests: Requests, costs: StepCosts, rate: Array | None, *others: object) -> str:
    """Compute what identifies a run.

    Parameters
    ----------
    requests
        Trace that is served.
    costs
        Technique, deployment and rules of the simulation.
    rate
        Tokens per decoding round of each request; None for the mean. [tokens]
    *others
        All other options.

    Returns
    -------
    str
        Digest of these and of kvsim's version.
    """
    digest = sha256()
    columns = (
        requests.arrival,
        requests.prompt,
        requests.generate,
        requests.block_ids,
        requests.block_start,
        *(getattr(requests, name) for name in CONDUCT),
        rate,
    )
    for column in columns:
        digest.update(b"none" if column is None else column.tobytes())
        digest.update(b"|")
    what = (costs.technique, costs.deployment, costs.rules, costs.gpu_memory, others, __version__)
    digest.update(f"{requests.block_tokens}|{what!r}".encode())
    return digest.hexdigest()


def write(path: Path, run: Run, mark: str, result: Row) -> None:
    """Write every request's times and fate; the file is whole or not there.

    Parameters
    ----------
    path
        Parquet file.
    run
        Simulated run.
    mark
        Digest of the run.
    result
        What the command made of it.

    Raises
    ------
    InputError
        If the place cannot be written.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    p, requests = run.progress, run.requests  # statuses ascend as FATES do
    fate = np.maximum(p.status - FINISHED + 1, 0).astype(np.int8)
    columns = {
        "arrival_s": p.arrival,
        "prompt_tokens": requests.prompt,
        "generate_tokens": requests.generate,
        "replica": p.replica,
        "started_s": p.started,
        "first_token_s": p.first,
        "last_token_s": p.last,
        "prefix_hit_tokens": p.hits,
        "preemptions": p.preempted,
        "status": pa.DictionaryArray.from_arrays(fate, FATES),
    }
    table = pa.table(columns).replace_schema_metadata({MARK: mark, ANSWER: json.dumps(result)})
    with replacing(path) as draft:
        parquet.write_table(table, draft)


def read_finished_run(path: Path, mark: str) -> Row | None:
    """Read what came of the same run before.

    Parameters
    ----------
    path
        Parquet file of an earlier run.
    mark
        Digest of the run.

    Returns
    -------
    Row or None
        What the command made of it; None if there is no such file.

    Raises
    ------
    InputError
        If the file there is of another run, or none of kvsim's.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    if not path.exists():
        return None
    with own_output():
        check_input(path, RESULT)
    try:
        found = read_schema(path).metadata or {}
    except (ArrowException, OSError):
        found = {}
    if MARK not in found:
        what = "is no file of kvsim simulate"
    elif found[MARK].decode() != mark:
        what = "is of another run: trace, options or version differ"
    else:
        result: Row = json.loads(found[ANSWER])
        return result
    raise InputError(f"--resume: {path} {what}; move it away, or choose another --out")
