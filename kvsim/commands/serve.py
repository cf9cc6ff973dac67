"""One technique's run of a trace: played, checked and kept, or continued from a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsim.commands.progress import ProgressLine
from kvsim.errors import InfeasibleError

if TYPE_CHECKING:
    from kvsim.graph import Array
    from kvsim.report.json import Row
    from kvsim.serving.costs import StepCosts
    from kvsim.serving.outcome import Targets
    from kvsim.serving.pools import TwoPools
    from kvsim.traces.requests import Requests


@dataclass(frozen=True)
class Job:
    """All that a run depends on."""

    requests: "Requests"
    costs: "StepCosts"
    replicas: int
    route: str
    rates: "Array | None"  # tokens per decoding round of each request, None for the mean (n,)
    targets: "Targets"
    pools: "TwoPools | None" = None

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
        from kvsim.serving.pools import simulate_pools
        from kvsim.serving.simulate import simulate

        name = str(self.costs.technique)
        mark = runfile.mark_of(
            self.requests,
            self.costs,
            self.rates,
            self.replicas,
            self.route,
            self.targets,
            *([self.pools] if self.pools else []),
        )
        if place is not None and resume:
            before = runfile.taken_up(place, mark)
            if before is not None:
                return before
        progress = ProgressLine(name, len(self.requests))
        what = self.requests, self.costs
        if self.pools is None:
            run = simulate(*what, self.replicas, self.route, self.rates, told=progress)
        else:
            run = simulate_pools(*what, self.pools, self.route, self.rates, told=progress)
        progress.close()
        wrong = faults(run) if check else []
        if wrong:
            raise InfeasibleError(f"--check: {name}: {'; '.join(wrong)}")
        found = result(Outcome(run, self.targets))
        if place is not None:
            runfile.write(place, run, mark, found)
        return found
