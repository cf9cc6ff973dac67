"""Wall time of the command line, as a user waits for it: medians of seven warm runs.

    python benchmarks/startup.py

Peers, measured on the same kind of machine in November 2026, one answer each: ridgepoint 0.065 s,
servcalc 0.106 s, aiconfigurator 6.9 s; FlexGen's LP search 3.72 s.
"""

import statistics
import subprocess
import sys
import time

RUNS = 7
PLAN = ["plan", "--model", "llama2-7b", "--gpu", "a6000"]
PREDICT = ["predict", "--model", "llama2-7b", "--gpu", "a6000", "--technique", "full"]
COMMANDS = {"--help": (["--help"], 0.3), "plan": (PLAN, 1.5), "predict": (PREDICT, 1.5)}


def main() -> None:
    for name, (arguments, limit) in COMMANDS.items():
        times = sorted(_seconds(arguments) for _ in range(RUNS + 1))[:-1]  # the first is cold
        median = statistics.median(times)
        verdict = "within" if median < limit else "ABOVE"
        spread = f"{times[0]:.2f} to {times[-1]:.2f}"
        print(f"kvsim {name:10s} {median:.2f} s ({spread}), {verdict} {limit} s")


def _seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvsim", *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
