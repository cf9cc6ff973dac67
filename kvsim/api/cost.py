"""Estimates of the time and memory that a command needs, made before it starts."""

from kvsim.console import on_command_line, print_note
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.options import Inputs
from kvsim.traces.requests import Requests

UNTOLD = 60.0, 2e9
"""Time and memory up to which a command starts without a word. [s], [B]"""

UNASKED = 600.0, 8e9
"""Time and memory beyond which it wants ``--yes``. [s], [B]"""


@frozen
class CommandCost:
    """Cost model of a command on one processor core, in time and memory.

    Attributes
    ----------
    free
        Number of requests up to which ``--yes`` is never required.
    fixed
        Time per deployment or run, before its simulation. [s]
    each
        Time per simulated request. [s]
    each_pass
        Time per prefill pass; it matters where a small token budget causes many passes. [s]
    begins
        Time before the first deployment or run. [s]
    memory
        Memory of the program itself. [B]
    kept
        Memory per deployment or run. [B]
    held
        Memory per simulated request, for each deployment or run. [B]
    kept_token
        Memory per token of the longest request, for each deployment or run. [B]
    plays_all
        Whether every deployment or run is simulated; ``plan`` simulates only a few candidates.
    """

    free: int
    fixed: float
    each: float
    each_pass: float
    begins: float = 0.0
    memory: float = 3e8
    kept: float = 0.0
    held: float = 250.0
    kept_token: float = 0.0
    plays_all: bool = True


COMMAND_COSTS = {
    "simulate": CommandCost(10**6, fixed=0.15, each=1.8e-6, each_pass=1e-7, begins=1.0),
    "plan": CommandCost(
        10**5, fixed=0.09, each=1.3e-4, each_pass=6e-5, begins=1.8, plays_all=False
    ),
    "capacity": CommandCost(
        10**5, fixed=3.0, each=2.5e-4, each_pass=4e-6, kept=5e7, held=750.0, kept_token=30.0
    ),
}
"""Measured in November 2026 with 2,000 to 7,000,000 requests of several lengths, at light load and
overload; `capacity` rounded up. A trace is in memory as it is read."""

TURN_WORK = 3.5
"""How many single requests take as long to simulate as one that follows an earlier one."""

RUNS_TO_FIND = 12
"""Runs in which ``simulate --find`` finds a value."""

EXPLAINED = 2.0, 0.07
"""What ``plan --explain`` adds, in all and for each deployment. [s]"""


def announce_cost(
    inputs: Inputs,
    requests: int,
    runs: int = 1,
    work: float = 0,
    passes: float = 0,
    more: float = 0,
    longest: int = 0,
) -> float:
    """Print the expected time and memory of a command if they are large; return the time in s.

    Parameters
    ----------
    inputs
        The options of the command.
    requests
        Number of requests to simulate.
    runs
        Number of deployments, or of techniques and settings, that they are simulated with.
    work
        Equivalent number of requests without prefix reuse, which are faster; 0 if the same.
    passes
        Number of prefill passes, if a small token budget determines it.
    more
        Additional time. [s]
    longest
        Length of the longest request. [tokens]

    Raises
    ------
    InputError
        If the command would take more than ten minutes or 8 GB and ``--yes`` is not given.
    """
    cost = COMMAND_COSTS[inputs.command]
    plays = runs if cost.plays_all else 1
    seconds = cost.begins + more + runs * cost.fixed
    seconds += plays * ((work or requests) * cost.each + passes * cost.each_pass)
    size = cost.memory + runs * (cost.kept + longest * cost.kept_token)
    size += plays * requests * cost.held
    if seconds <= UNTOLD[0] and size <= UNTOLD[1]:
        return seconds
    what = f"{requests:,} requests" + (f" with {runs} settings" if runs > 1 else "")
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    said = f"simulating {what} takes about {time} and {size / 1e9:.1f} GB"
    long = seconds > UNASKED[0] or size > UNASKED[1]
    if long and requests > cost.free and on_command_line() and not inputs.yes:
        raise InputError(
            f"{said}; add --yes to begin, or give a shorter part of the trace, or fewer settings"
        )
    print_note(said)
    return seconds


def count_passes(requests: Requests, max_tokens: int | None) -> float:
    """Count the prefill passes that a given token budget per pass leads to.

    Parameters
    ----------
    requests
        The requests.
    max_tokens
        The budget; None for the engine's own, which adds no noticeable time. [tokens]
    """
    return float(requests.prompt.sum()) / max_tokens if max_tokens else 0.0
