"""Requests per second read, and the memory that 10^7 requests take; one run each.

    python -m benchmarks.traces [REQUESTS]

Each case runs in a process of its own; memory is the most that process ever held.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANY = 10_000_000
LIMIT = 2 * 2**30  # bytes, for 10^7 requests
HEAD = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
NAMES = ("trace.csv", "trace.csv.gz", "trace.jsonl", "blocks.jsonl", "trace.parquet")


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else MANY
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            count = requests if name != "blocks.jsonl" else requests // 10
            subprocess.run([sys.executable, __file__, "make", folder, name, str(count)], check=True)
            for what in ("load", "convert"):
                command = [sys.executable, __file__, what, folder, name, str(count)]
                print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for what in ("generate", "describe"):
            command = [sys.executable, __file__, what, folder, "trace.parquet", str(requests)]
            print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def make(path: Path, requests: int) -> None:
    from kvsim.traces import synthetic
    from kvsim.traces.read import write
    from kvsim.traces.synthetic import TrafficModel

    prefixes = synthetic.parse_prefixes("reuse") if path.name.startswith("blocks") else None
    workload = TrafficModel(synthetic.parse_arrivals("gamma"), 1000.0, synthetic.DEFAULT, prefixes)
    write(path, workload.draw(1, requests, None))


def case(what: str, path: Path, requests: int) -> None:
    from kvsim.traces import read, synthetic
    from kvsim.traces.read import write_parquet
    from kvsim.traces.statistics import describe
    from kvsim.traces.synthetic import TrafficModel

    started = time.perf_counter()
    if what == "load":
        read.load(str(path))
    elif what == "convert":
        reader = read.Reader(str(path))
        out = path.with_name("out.parquet")
        write_parquet(out, reader.parts(), reader.layout.block_tokens)
    elif what == "generate":
        TrafficModel(synthetic.parse_arrivals("gamma"), 1000.0, synthetic.DEFAULT).draw(
            1, requests, None
        )
    else:
        describe(read.load(str(path)).requests)
    seconds = time.perf_counter() - started
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    verdict = ""
    if requests == MANY:
        verdict = ", within 2 GiB" if held <= LIMIT else ", ABOVE 2 GiB"
    name = path.name if what != "generate" else "in memory"
    line = f"{what:8s} {name:14s} {requests:>10,} requests {seconds:6.2f} s"
    speed = f"{requests / seconds:>12,.0f} requests/s"
    print(f"{line} {speed} {held / 2**30:5.2f} GiB{verdict}", end="")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        what, folder, name, count = sys.argv[1:]
        target = Path(folder) / name
        make(target, int(count)) if what == "make" else case(what, target, int(count))
    else:
        main()
