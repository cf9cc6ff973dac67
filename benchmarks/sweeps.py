"""Sweeps on a Dask cluster of this machine: speed, lost workers and clients, wrong workers.

    python benchmarks/sweeps.py speed [POINTS]   # one process, then two workers
    python benchmarks/sweeps.py kills            # one of two workers is killed, then the client
    python benchmarks/sweeps.py workers          # one without kvsim, and one of another version

Asked of `speed`: 1,000,000 predictions in 30 s of one process, 1.7 times as fast on two workers,
and equal bytes. A machine that does other work
besides makes wall times worth little, so the processor time of every process is printed too: with
two cores of their own, two workers end after the longer of their two shares, or the client after
its own. Of `kills`: the folder is complete and equal, and no chunk was computed twice but those
that were under way. Needs the extra `distributed`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.sweeps.chunks import FEWEST
from kvsim.sweeps.workers import AHEAD
from kvsim.techniques import TECHNIQUES

GRID = """
[grid]
model = ["llama2-7b", "llama3-8b", "llama3-70b"]
gpu = ["a6000", "l40s", "a100-80g", "h100"]
technique = "all"
batch = {{ from = 1, to = 1024, count = {side} }}
context = {{ from = 128, to = 65536, count = {side}, spacing = "log" }}
"""
COUNTING = """
import os
import kvsim.sweeps.chunks as chunks

chunks.plain = getattr(chunks, "plain", chunks.compute)  # this file is loaded twice

def compute(chunk):
    with open({log!r}, "a") as log:
        log.write(f"{{chunk.index}}\\n")
    return chunks.plain(chunk)

chunks.compute = compute
"""
WRONG = {
    "without kvsim": "import sys; sys.modules['kvsim'] = None\n",
    "another version": "import kvsim; kvsim.__version__ = '0.0.1'\n",
}
UNWATCHED = {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "false"}  # as docs/sweep.md advises
PATIENCE = 120.0  # for anything awaited here [s]
SMALL = 400_000  # points of the sweep that is interrupted


def spec(folder: Path, points: int) -> Path:
    """A grid of about so many points."""
    side = int(np.ceil((points / (12 * len(TECHNIQUES))) ** 0.5))
    place = folder / "grid.toml"
    place.write_text(GRID.format(side=side))
    return place


@contextmanager
def scheduler() -> Iterator[Any]:
    """A scheduler in this process, without workers."""
    import distributed

    made: Any = distributed
    with (
        made.LocalCluster(
            n_workers=0, processes=False, protocol="tcp://", dashboard_address=None, silence_logs=50
        ) as cluster,
        made.Client(cluster) as client,
    ):
        yield client


@contextmanager
def worker(address: str, folder: Path, preload: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A worker of one thread, as `dask worker` starts it."""
    more: list[str] = []
    if preload:
        place = folder / f"preload{len(list(folder.glob('preload*')))}.py"
        place.write_text(preload)
        more = ["--preload", str(place)]
    command = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1",
               "--no-nanny", "--no-dashboard", "--local-directory", str(folder), *more]  # fmt: skip
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | UNWATCHED, **quiet) as found:
        try:
            yield found
        finally:
            found.kill()


def until(holds: Any, what: str, process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something that a process does, if one is given."""
    began = time.monotonic()
    while not holds():
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{what}: ended before with {process.communicate()}")
        if time.monotonic() - began > PATIENCE:
            raise SystemExit(f"{what}: not within {PATIENCE:.0f} s")
        time.sleep(0.05)


def sweep(place: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    """`kvsim sweep` in a process of its own."""
    command = [sys.executable, "-m", "kvsim", "sweep", str(place), "--out", str(out), *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def content(folder: Path) -> dict[str, bytes]:
    """Every finished chunk's bytes."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob("chunk-*.parquet"))}


def seconds(process: int) -> float:
    """Processor time of a process so far. [s]"""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def speed(points: int) -> None:
    with tempfile.TemporaryDirectory() as name, scheduler() as client:
        folder = Path(name)
        place = spec(folder, points)
        began = time.monotonic()
        alone = sweep(place, folder / "alone")
        one = _cpu_of(alone)
        wall = time.monotonic() - began
        address = client.scheduler.address
        with worker(address, folder) as first, worker(address, folder) as second:
            both = first.pid, second.pid
            until(lambda: len(client.nthreads()) == 2, "two workers")
            client.run(_warm)
            before, own = [seconds(p) for p in both], time.process_time()
            began = time.monotonic()
            asking = sweep(place, folder / "two", "--scheduler", address)
            asked = _cpu_of(asking)
            walls = time.monotonic() - began
            each = [seconds(p) - b for p, b in zip(both, before, strict=True)]
            scheduling = time.process_time() - own
        equal = content(folder / "alone") == content(folder / "two")
        longest = max(*each, (sum(each) + asked + scheduling) / 2)
        print(f"one process: {one:.1f} s of CPU, {wall:.1f} s by the clock (30)")
        print(
            f"two workers: {each[0]:.1f} and {each[1]:.1f} s of CPU, client {asked:.1f} s, "
            f"scheduler {scheduling:.1f} s; {walls:.1f} s by the clock, "
            f"{wall / walls:.2f} times as fast (1.7)"
        )
        print(
            f"with two cores of their own: {one / longest:.2f} times as fast at most; "
            f"bytes {'equal' if equal else 'DIFFER'}"
        )


def _warm() -> None:
    """What a worker imports before its first chunk."""
    import kvsim.sweeps.chunks  # noqa: F401


def _cpu_of(process: subprocess.Popen[str]) -> float:
    """Processor time of a process until it ends. [s]"""
    _, status, used = os.wait4(process.pid, 0)
    if status:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read())
    return used.ru_utime + used.ru_stime


def kills() -> None:
    with tempfile.TemporaryDirectory() as name, scheduler() as client:
        folder = Path(name)
        place, out, log = spec(folder, SMALL), folder / "out", folder / "computed"
        _cpu_of(sweep(place, folder / "alone"))
        expected = content(folder / "alone")
        preload = COUNTING.format(log=str(log))
        address = client.scheduler.address
        with worker(address, folder, preload) as first, worker(address, folder, preload):
            until(lambda: len(client.nthreads()) == 2, "two workers")
            asking = sweep(place, out, "--scheduler", address)
            until(lambda: len(content(out)) > len(expected) // 4, "a quarter of the chunks", asking)
            first.kill()
            until(lambda: len(content(out)) > len(expected) // 2, "half of the chunks")
            asking.send_signal(signal.SIGKILL)
            asking.wait()
            left = len(content(out))
            until(lambda: not client.processing() or not any(client.processing().values()), "idle")
            again = sweep(place, out, "--scheduler", address, "--resume")
            _cpu_of(again)
        computed = Counter(log.read_text().split())
        twice = sum(n - 1 for n in computed.values())
        each = FEWEST // (SMALL // len(expected))  # chunks that a worker is given at once
        print(
            f"kills: a worker of two, then the client with {left} of {len(expected)} chunks; "
            f"{'complete and equal' if content(out) == expected else 'DIFFERENT'}; "
            f"{twice} computed more than once (at most {3 * AHEAD * (each + 1)} were under way)"
        )


def workers() -> None:
    with tempfile.TemporaryDirectory() as name, scheduler() as client:
        folder = Path(name)
        place, address = spec(folder, SMALL), client.scheduler.address
        for wrong, preload in WRONG.items():
            with worker(address, folder, preload):
                until(lambda: len(client.nthreads()) == 1, wrong)
                asking = sweep(place, folder / "out", "--scheduler", address)
                _, said = asking.communicate()
                print(f"{wrong}: exit code {asking.returncode}, {said.strip()}")
            until(lambda: not client.nthreads(), "no worker")


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "speed":
        speed(int(sys.argv[2]) if len(sys.argv) > 2 else 10**6)
    elif what in ("kills", "workers"):
        {"kills": kills, "workers": workers}[what]()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
