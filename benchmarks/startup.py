"""Wall time of the command line, as a user waits for it: medians of seven warm runs.

    python -m benchmarks.startup

Last, the first ``simulate`` of 1,000 requests after an installation, which compiles the simulator:
asked for within 8 s, its CPU time is printed too because another process may hold the core.

Peers, measured on the same kind of machine in November 2026, one answer each: ridgepoint 0.065 s,
servcalc 0.106 s, aiconfigurator 6.9 s; FlexGen's LP search 3.72 s.
"""

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 7
FIRST = 8  # what the first simulation may take [s]
PLAN = ["plan", "--model", "llama2-7b", "--gpu", "a6000"]
PREDICT = ["predict", "--model", "llama2-7b", "--gpu", "a6000", "--technique", "full"]
SIMULATE = ["simulate", "--model", "llama3-8b", "--gpu", "h100", "--trace"]
COMMANDS = {"--help": (["--help"], 0.3), "plan": (PLAN, 1.5), "predict": (PREDICT, 1.5)}


def main() -> None:
    for name, (arguments, limit) in COMMANDS.items():
        times = sorted(_seconds(arguments) for _ in range(RUNS + 1))[:-1]  # the first is cold
        median = statistics.median(times)
        verdict = "within" if median < limit else "ABOVE"
        spread = f"{times[0]:.2f} to {times[-1]:.2f}"
        print(f"kvsim {name:10s} {median:.2f} s ({spread}), {verdict} {limit} s", flush=True)
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.csv"
        trace.write_text(_trace(1000))
        os.environ["NUMBA_CACHE_DIR"] = str(Path(place) / "cache")
        began, first = _cpu_s(), _seconds([*SIMULATE, str(trace)])
        cpu, second = _cpu_s() - began, _seconds([*SIMULATE, str(trace)])
    verdict = "within" if first < FIRST else "ABOVE"
    print(f"kvsim simulate, the first: {first:.1f} s, {cpu:.1f} s of them CPU, {verdict} {FIRST} s")
    print(f"kvsim simulate, the next: {second:.1f} s")


def _trace(count: int) -> str:
    """Requests at two per second, of the lengths of a chat."""
    draw = random.Random(0)
    lines, now = ["arrival_s,prompt_tokens,generate_tokens"], 0.0
    for _ in range(count):
        now += draw.expovariate(2.0)
        lines.append(f"{now:.3f},{draw.randint(10, 2000)},{draw.randint(2, 400)}")
    return "\n".join(lines) + "\n"


def _cpu_s() -> float:
    """CPU time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvsim", *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
