"""Commands at the documented limits: time and memory against what kvsim says before it works.

Usage: ``python -m benchmarks.limits [--count N] [--seed N] [--keep FILE]``; by default 200 cases.

The cases are every option that has a range, at its smallest and largest number, in every command
that takes it, and the sizes that docs/limits.md says are never refused. A command that prints no
estimate may take 60 s and 2 GB. Each case is a process of its own, of which the time of the
processor and the largest resident memory are measured; it is stopped at twice what is allowed.
Results are added to build/limits.jsonl, or the file of --keep, and a run goes on where it was. The
exit code is 1 if a case took more than twice what was allowed, or ended in anything but 0, 1 and 2.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from kvsim.api.cost import UNTOLD
from kvsim.inputs import format_plain
from kvsim.options import OPTION_RANGES, options_of

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("--ttft", "--tpot", "--think", "--abort-after", "--cache-ttl")
"""Options whose number is written with a unit."""
DENSE, SPARSE = "llama3.1-8b", "gpt-oss-20b"
DRAWN = ("--prompt", "2k", "--generate", "128", "--rate", "2")
BASES = {
    "predict": ("--gpu", "h100", "--technique", "full"),
    "plan": ("--gpu", "h100", "--only", "full,fp8"),
    "simulate": ("--gpu", "h100", "--technique", "full"),
    "capacity": ("--gpus", "h100"),
}
BLOCKS = ("--trace", "sample:conversation")
STORES = (*BLOCKS, "--host-cache", "10")
NEEDED = {
    "--nodes": ("--total-gpus", "1024"),
    "--jobs": ("--offline",),
    "--host-memory-utilization": ("--offline",),
    "--think": ("--users", "10"),
    "--users": ("--think", "20s"),
    "--host-cache": BLOCKS,
    **dict.fromkeys(("--nvme-cache", "--remote-cache", "--cache-ttl", "--cache-block"), STORES),
    **dict.fromkeys(("--nvme-read", "--nvme-write"), (*STORES, "--nvme-cache", "100")),
    **dict.fromkeys(("--hash-block-tokens", "--chars-per-token"), ("--trace", "sample:chat")),
    "--prefill-replicas": ("--replicas", "10000"),
    "--draw-acceptance": ("--technique", "ngram"),
    "plan --rate": ("--trace", "sample:chat"),
    "capacity --nic": ("--pools", "yes"),
    "simulate --nic": ("--replicas", "2", "--prefill-replicas", "1"),
}
"""What an option has no effect without, or no meaning."""
LOADED = ("simulate", "capacity")  # commands that need requests
SIZED = (
    ("simulate", 1, 10**7, ("--max-model-len", "10000000")),
    ("simulate", 10**6, 100, ()),
    ("simulate", 10**5, 100, ("--replicas", "1000")),
    ("plan", 10**5, 100, ()),
    ("capacity", 10**5, 100, ()),
    ("capacity", 1, 10**7, ("--max-model-len", "10000000")),
    ("plan", 1, 10**7, ("--max-model-len", "10000000")),
)
"""Commands with a trace of so many requests of so many tokens, which start without --yes."""
ESTIMATE = re.compile(r"takes about ([\d.]+) (s|min) and ([\d.]+) GB")


def every_case() -> Iterator[tuple[str, ...]]:
    """Every option at both ends of its range, in the commands that take it."""
    for command, base in BASES.items():
        for option in options_of(command).values():
            allowed = OPTION_RANGES.get(option.flag)
            for value in (allowed.least, allowed.most) if allowed else ():
                number = f"{value:.0f}" if allowed and allowed.whole else f"{value:.15g}"
                number += "s" if option.flag in TIMES else ""
                model = SPARSE if option.flag == "--n-cpu-moe" else DENSE
                beside = NEEDED.get(f"{command} {option.flag}", NEEDED.get(option.flag, ()))
                given = (*beside, option.flag, number)
                trace = "--trace" in given or command not in LOADED
                lone = [x for x in zip(DRAWN[::2], DRAWN[1::2], strict=True) if x[0] not in given]
                lone = [x for x in lone if not ("--users" in given and x[0] == "--rate")]
                load = () if trace else tuple(word for pair in lone for word in pair)
                own = base[:-2] if "--technique" in given else base
                yield (command, "--model", model, *own, *load, *given)


def sized_case(place: int, folder: Path) -> tuple[str, ...]:
    """One of ``SIZED``, with its trace in a folder."""
    command, count, length, more = SIZED[place]
    trace = folder / "trace.csv"
    with trace.open("w") as out:
        out.write("arrival_s,prompt_tokens,generate_tokens\n")
        out.writelines(f"{i / 2},{length - 9},9\n" for i in range(count))
    return (command, "--model", DENSE, *BASES[command], "--trace", str(trace), *more)


def measure(words: tuple[str, ...], most: float) -> dict[str, object]:
    """Run one command; its exit code, time [s] and memory [B], and those allowed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            (sys.executable, "-m", "kvsim", *words),
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        allowed, said = UNTOLD, ""
        while True:
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            errors.seek(0)
            said = errors.read()
            found = ESTIMATE.search(said)
            if found:
                scale = 60 if found[2] == "min" else 1
                allowed = max(float(found[1]) * scale, 60.0), max(float(found[3]) * 1e9, 2e9)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                taken = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
                break
            taken = _now(process.pid)
            if taken[0] > 2 * allowed[0] or taken[1] > 2 * allowed[1] or taken[0] > most:
                process.kill()
            time.sleep(0.1)
    last = said.strip().splitlines()[-1:] or [""]
    return {
        "words": words, "code": code, "seconds": round(taken[0], 2), "bytes": taken[1],
        "allowed": allowed, "said": last[0][:300],
    }  # fmt: skip


def _now(pid: int) -> tuple[float, float]:
    """Time of the processor and resident memory of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return (int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * page


def _told(row: dict[str, Any]) -> str:
    size = format_plain(row["bytes"] / 1e9, 2)
    return f"{row['seconds']:.0f} s, {size} GB: {' '.join(row['words'])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=float, default=1200, help="CPU seconds of a case at most")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "limits.jsonl")
    given = parser.parse_args()
    plain = list(every_case())
    Random(given.seed).shuffle(plain)
    count = max(given.count - len(SIZED), 0)
    given.keep.parent.mkdir(exist_ok=True, parents=True)
    text = given.keep.read_text() if given.keep.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    known = {row["name"] for row in rows}
    for place, name in enumerate([*range(len(SIZED)), *(" ".join(x) for x in plain[:count])]):
        if name in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            sized = isinstance(name, int)
            words = sized_case(name, Path(folder)) if sized else plain[place - len(SIZED)]
            row = {"name": name, **measure(words, given.most)}
        rows.append(row)
        with given.keep.open("a") as out:
            out.write(json.dumps(row) + "\n")
    over = [
        row for row in rows
        if row["seconds"] > 2 * row["allowed"][0] or row["bytes"] > 2 * row["allowed"][1]
        or row["code"] not in (0, 1, 2)
    ]  # fmt: skip
    print(f"{len(rows)} cases, {sum(row['code'] == 2 for row in rows)} refused, {len(over)} over")
    for row in over:
        print(f"over, exit code {row['code']}: {_told(row)}")
    for row in sorted(rows, key=lambda row: -row["seconds"])[:10]:
        print(_told(row))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
