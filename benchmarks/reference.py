"""The compiled simulator against the plain one: every workload under every option.

    python -m benchmarks.reference [--workloads 500] [--options 64] [--only fleet,turns,pools,both]

Asked: 500 workloads, each request's times equal to 1e-9, its fate, its replica
and what every memory holds equal too. An option is one of 64: prompts in chunks or whole, decode or
prefill first, recompute or swap, prefixes cached or not, and the route. The rest is drawn:
technique, batch, memory, host cache, NVMe, remote store, links, admission, what is loaded, tokens
per round, replicas and when the run ends. ``turns`` adds sessions, classes and clients that hang
up; ``pools`` has replicas that only read prompts; ``both`` has all of it. ``--options N`` plays
each workload under N of the options, the next N for the next workload: all of them takes about half
an hour of CPU time for each of the four.
"""

import argparse
import sys
import time

from tests.support.served import (
    OPTIONS,
    check_fleet,
    check_pools,
    check_turns,
    check_turns_apart,
)

CHECKS = {
    "fleet": check_fleet,
    "turns": check_turns,
    "pools": check_pools,
    "both": check_turns_apart,
}
SHOWN = 5  # faults that are printed in full


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--workloads", type=int, default=500)
    options.add_argument("--first", type=int, default=0, help="to go on where a run was stopped")
    options.add_argument("--options", type=int, default=len(OPTIONS))
    options.add_argument("--only", default=",".join(CHECKS))
    chosen = options.parse_args()
    faults = 0
    for name in chosen.only.split(","):
        began, played, wrong = time.process_time(), 0, 0
        for number in range(chosen.first, chosen.workloads):
            for turn in range(chosen.options):
                option = OPTIONS[(number * chosen.options + turn) % len(OPTIONS)]
                played += 1
                try:
                    CHECKS[name](number, option)
                except AssertionError as fault:
                    wrong += 1
                    print(fault if wrong <= SHOWN else f"workload {number} under {option}")
            if number % 50 == 49:
                print(f"{name}: up to workload {number}, {wrong} unequal", flush=True)
        took = time.process_time() - began
        print(
            f"{name}: {chosen.workloads - chosen.first} workloads x {chosen.options} options, "
            f"{played - wrong:,} of {played:,} equal to 1e-9 (asked: all), {took:.0f} s of CPU",
            flush=True,
        )
        faults += wrong
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
