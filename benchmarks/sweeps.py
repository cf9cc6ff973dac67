"""Sweeps on a Dask cluster of this machine: speed, lost workers and clients, wrong workers.

    python -m benchmarks.sweeps speed [POINTS [PAIRS]]   # one process, then two workers
    python -m benchmarks.sweeps kills            # one of two workers is killed, then the client
    python -m benchmarks.sweeps workers          # one without kvsim, and one of another version

Asked of `speed`: 1,000,000 predictions in 30 s of one process, 1.7 times as fast on two workers,
and equal bytes. The cluster is up and has computed a small sweep before, as clusters that serve
have. What is compared is the time that `kvsim sweep` itself prints, from the first chunk that it
hands out to the last file: the scheduler, transfers and the writing of results are in it, Python's
start is not. Times of the whole commands, with that start, are printed too, and the processor time
of every process: a machine that does other work besides makes wall times worth little. The answer
is the median of so many pairs, one right after the other. Of `kills`: the folder is complete and
equal, and no chunk was computed twice but those that were under way. Needs the extra `distributed`.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.sweeps.workers import BUNDLE_ROUNDS, BUNDLES_PER_WORKER, MIN_BUNDLE_POINTS
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
import kvsim.sweeps.workers as bundles

bundles.plain = getattr(bundles, "plain", bundles.compute)  # this file is loaded twice

def compute(chunk):
    with open({log!r}, "a") as log:
        log.write(f"{{chunk.index}}\\n")
    return bundles.plain(chunk)

bundles.compute = compute
"""
WRONG = {
    "without kvsim": "import sys; sys.modules['kvsim'] = None\n",
    "another version": "import kvsim; kvsim.__version__ = '0.0.1'\n",
}
UNWATCHED = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "false",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}  # as docs/sweep.md advises
WARM, PAIRS = 150_000, 3  # points of the sweep before, and comparisons
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
    with subprocess.Popen(command, **quiet) as found:
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


@dataclass(frozen=True)
class Ran:
    """A sweep that ended: its whole time, its own account of computing, and processor time. [s]"""

    whole: float
    computing: float
    cpu: float


def ran(place: Path, out: Path, *more: str) -> Ran:
    """A sweep, to its end."""
    began = time.monotonic()
    process = sweep(place, out, *more)
    cpu = _cpu_of(process)
    whole = time.monotonic() - began
    assert process.stderr is not None
    said = re.search(r"computed in ([0-9.]+) s", process.stderr.read())
    assert said is not None
    return Ran(whole, float(said[1]), cpu)


def speed(points: int, pairs: int) -> None:
    ratios, equal = [], True
    with tempfile.TemporaryDirectory() as name, scheduler() as client:
        folder = Path(name)
        address = client.scheduler.address
        with worker(address, folder) as first, worker(address, folder) as second:
            both = first.pid, second.pid
            until(lambda: len(client.nthreads()) == 2, "two workers")
            ran(spec(folder, WARM), folder / "warm", "--scheduler", address)
            place = spec(folder, points)
            for i in range(pairs):
                one = ran(place, folder / f"alone{i}")
                before, own = [seconds(p) for p in both], time.process_time()
                two = ran(place, folder / f"two{i}", "--scheduler", address)
                each = [seconds(p) - b for p, b in zip(both, before, strict=True)]
                scheduling = time.process_time() - own
                equal &= content(folder / f"alone{i}") == content(folder / f"two{i}")
                ratios.append(one.computing / two.computing)
                print(
                    f"one process: {one.computing:.2f} s of computing, {one.whole:.2f} s in all "
                    f"(30), {one.cpu:.2f} s of CPU; two workers: {two.computing:.2f} s of "
                    f"computing, {two.whole:.2f} s in all, CPU {each[0]:.2f} and {each[1]:.2f} s, "
                    f"client {two.cpu:.2f} s, scheduler {scheduling:.2f} s; computing "
                    f"{ratios[-1]:.2f} times as fast, whole commands {one.whole / two.whole:.2f}"
                )
    print(
        f"two workers: {statistics.median(ratios):.2f} times as fast, median of {pairs} (1.7); "
        f"bytes {'equal' if equal else 'DIFFER'}"
    )


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
        points = max(
            MIN_BUNDLE_POINTS, SMALL // (2 * BUNDLE_ROUNDS)
        )  # that a worker is given at once, at most
        each = points // (SMALL // len(expected))
        print(
            f"kills: a worker of two, then the client with {left} of {len(expected)} chunks; "
            f"{'complete and equal' if content(out) == expected else 'DIFFERENT'}; "
            f"{twice} computed more than once "
            f"(at most {3 * BUNDLES_PER_WORKER * (each + 1)} were under way)"
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
    os.environ.update(UNWATCHED)
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "speed":
        given = [int(x) for x in sys.argv[2:4]]
        speed(*given, *(10**6, PAIRS)[len(given) :])
    elif what in ("kills", "workers"):
        {"kills": kills, "workers": workers}[what]()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
