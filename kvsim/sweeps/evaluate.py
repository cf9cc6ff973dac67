"""Who computes each kind of sweep; each is imported when it is first asked for.

A worker that predicts needs neither the planner nor the compiled simulator.
"""

from collections.abc import Callable

from kvsim.sweeps.cases import Case, Columns


def evaluator(kind: str) -> Callable[[Case], Columns]:
    """What computes the columns of a case of a kind of ``COLUMNS``."""
    if kind == "predict":
        from kvsim.sweeps.predictions import predicted

        return predicted
    from kvsim.sweeps import answers

    return {
        "plan": answers.planned, "simulate": answers.simulated, "capacity": answers.fleets
    }[kind]  # fmt: skip
