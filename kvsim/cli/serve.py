"""One technique's run of a trace: played, checked and kept, or continued from a file."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.cli.arguments import either, number, seconds
from kvsim.cli.progress import ProgressLine
from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen

if TYPE_CHECKING:
    from kvsim.graph import Array
    from kvsim.report.json import Row
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.pools import TwoPools
    from kvsim.serving.simulate import Run
    from kvsim.traces.requests import Requests

LONGEST_WAIT = 1e4  # longer without a unit may be meant in milliseconds [s]


def requests_of(
    requests: "Requests", case: Mapping[str, str | None], abort_after: str | None
) -> "Requests":
    """A trace's requests at the rate of a case, with what the options change in them.

    Raises
    ------
    InputError
        For options that fit neither the trace nor each other.
    """
    import numpy as np

    from kvsim.traces.rates import at_rate

    if case["req_s"] is not None:
        found, copies = at_rate(requests, number("--req-s", case["req_s"]))
        if copies > 1:
            print(
                f"kvsim: {case['req_s']} requests per second: the trace is repeated {copies} "
                f"times, each time with prompts of its own",
                file=sys.stderr,
            )
    else:
        found = requests.scaled(number("--rate", either(case["rate"], "1")))
    if abort_after is not None:
        patience = seconds("--abort-after", abort_after, LONGEST_WAIT)
        if patience == float("inf"):
            raise InputError("--abort-after: none does nothing; leave it out")
        if requests.abort_after is not None:
            raise InputError("--abort-after: the trace says when its clients hang up; leave it out")
        found = replace(found, abort_after=np.full(len(found), patience))
    return found


@frozen
class Job:
    """All that a run depends on."""

    requests: "Requests"
    costs: "StepCosts"
    replicas: int
    route: str
    rates: "Array | None"  # tokens per decoding round of each request, None for the mean (n,)
    targets: "Targets"
    pools: "TwoPools | None" = None
    otherwise: "tuple[StepCosts, ...]" = ()  # other rules: those with the least mean TTFT are kept

    def result(self, place: Path | None, resume: bool, check: bool) -> "Row":
        """What came of the run; with a place, every request's times are written there.

        Raises
        ------
        InfeasibleError
            If a check finds a fault.
        InputError
            If the place cannot be written, or ``resume`` finds another run there.
        """
        from kvsim.report import runfile
        from kvsim.report.simulate import result
        from kvsim.serving.outcome import Outcome, faults

        name = str(self.costs.technique)
        mark = runfile.mark_of(
            self.requests,
            self.costs,
            self.rates,
            self.replicas,
            self.route,
            self.targets,
            *([self.pools] if self.pools else []),
            *self.otherwise,
        )
        if place is not None and resume:
            before = runfile.taken_up(place, mark)
            if before is not None:
                return before
        run = min(map(self._played, (self.costs, *self.otherwise)), key=_mean_ttft)
        wrong = faults(run) if check else []
        if wrong:
            raise InfeasibleError(f"--check: {name}: {'; '.join(wrong)}")
        found = result(Outcome(run, self.targets))
        if self.otherwise:
            way = run.costs.rules.prefix_load
            found["row"]["prefix_load"] = way
            least = f"mean TTFT is shortest with {way}: {_mean_ttft(run):.4g} s"
            print(f"kvsim: --prefix-load auto: {name}: {least}", file=sys.stderr)
        if place is not None:
            runfile.write(place, run, mark, found)
        return found

    def _played(self, costs: "StepCosts") -> "Run":
        """The trace by some rules."""
        from kvsim.serving.pools import simulate_pools
        from kvsim.serving.simulate import simulate

        way = f", prefix load {costs.rules.prefix_load}" if self.otherwise else ""
        progress = ProgressLine(f"{costs.technique}{way}", len(self.requests))
        what = self.requests, costs
        if self.pools is None:
            run = simulate(*what, self.replicas, self.route, self.rates, told=progress)
        else:
            run = simulate_pools(*what, self.pools, self.route, self.rates, told=progress)
        progress.close()
        return run


def _mean_ttft(run: "Run") -> float:
    """Of the requests that got a token; infinite if none did. [s]"""
    import numpy as np

    from kvsim.serving.outcome import Outcome

    ttft = Outcome(run).ttft_s
    known = ttft[np.isfinite(ttft)]
    return float(known.mean()) if known.size else float("inf")
