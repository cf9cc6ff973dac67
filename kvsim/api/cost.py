"""What a command takes, known from its requests before it plays them."""

from kvsim.console import on_command_line, print_note
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.options import Inputs

UNTOLD = 60.0, 2e9
"""Time and memory up to which a command starts without a word. [s], [B]"""

UNASKED = 600.0, 8e9
"""Time and memory beyond which it wants ``--yes``. [s], [B]"""


@frozen
class CommandCost:
    """Time and memory of a command on one processor core.

    Attributes
    ----------
    fixed
        Time whatever the requests, for each deployment or run. [s]
    each
        Time of each request, for each deployment or run. [s]
    memory
        Of the program. [B]
    kept
        Of each deployment or run. [B]
    held
        Of each request. [B]
    free
        Requests up to which nothing needs ``--yes``.
    """

    fixed: float
    each: float
    free: int
    memory: float = 3e8
    kept: float = 0.0
    held: float = 500.0


COMMAND_COSTS = {
    "simulate": CommandCost(fixed=2.0, each=8e-6, free=10**6),
    "plan": CommandCost(fixed=3.0, each=2e-4, free=10**5),
    "capacity": CommandCost(fixed=3.0, each=2.5e-4, free=10**5, kept=5e7, held=3000.0),
}
"""Somewhat above what was measured in November 2026 with 10,000 to 1,000,000 requests of several
lengths, at light load and overload, with memory for the trace as it is read."""


def announce_cost(inputs: Inputs, requests: int, runs: int = 1, work: int = 0) -> None:
    """Print what a command will take if that is much, before it begins.

    Parameters
    ----------
    inputs
        The options of the command.
    requests
        Requests that it plays.
    runs
        Deployments, or techniques and values, that it plays them on.
    work
        Requests without prefix blocks that take as long to play; 0: as many.

    Raises
    ------
    InputError
        If it is more than anyone would want unasked, and ``--yes`` is not given.
    """
    cost = COMMAND_COSTS[inputs.command]
    seconds = runs * (cost.fixed + (work or requests) * cost.each)
    size = cost.memory + runs * cost.kept + requests * cost.held
    if seconds <= UNTOLD[0] and size <= UNTOLD[1]:
        return
    what = f"{requests:,} requests" + (f" with {runs} settings" if runs > 1 else "")
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    said = f"simulating {what} takes up to {time} and {size / 1e9:.1f} GB"
    long = seconds > UNASKED[0] or size > UNASKED[1]
    if long and requests > cost.free and on_command_line() and not inputs.yes:
        raise InputError(
            f"{said}; add --yes to begin, or give a shorter part of the trace, or fewer settings"
        )
    print_note(said)
