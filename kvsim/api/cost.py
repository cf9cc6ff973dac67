"""What a command takes, known from its requests before it plays them."""

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
    """Time and memory of a command on one processor core.

    Attributes
    ----------
    free
        Requests up to which nothing needs ``--yes``.
    fixed
        Time of each deployment or run before it is played. [s]
    each
        Time of each request that is played. [s]
    each_pass
        Time of each pass that reads prompts, where a small token budget makes them many. [s]
    begins
        Time before the first deployment or run. [s]
    memory
        Of the program. [B]
    kept
        Of each deployment or run. [B]
    held
        Of each request that is played, for each deployment or run. [B]
    kept_token
        Of each token of the longest request, for each deployment or run. [B]
    plays_all
        Whether the requests are played on each deployment; where many are compared, few are played.
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
) -> None:
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
    passes
        Passes that read their prompts.
    more
        Further time. [s]
    longest
        The longest request. [tokens]

    Raises
    ------
    InputError
        If it is more than anyone would want unasked, and ``--yes`` is not given.
    """
    cost = COMMAND_COSTS[inputs.command]
    plays = runs if cost.plays_all else 1
    seconds = cost.begins + more + runs * cost.fixed
    seconds += plays * ((work or requests) * cost.each + passes * cost.each_pass)
    size = cost.memory + runs * (cost.kept + longest * cost.kept_token)
    size += plays * requests * cost.held
    if seconds <= UNTOLD[0] and size <= UNTOLD[1]:
        return
    what = f"{requests:,} requests" + (f" with {runs} settings" if runs > 1 else "")
    time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    said = f"simulating {what} takes about {time} and {size / 1e9:.1f} GB"
    long = seconds > UNASKED[0] or size > UNASKED[1]
    if long and requests > cost.free and on_command_line() and not inputs.yes:
        raise InputError(
            f"{said}; add --yes to begin, or give a shorter part of the trace, or fewer settings"
        )
    print_note(said)


def count_passes(requests: Requests, max_tokens: int | None) -> float:
    """Count the passes that read prompts where the user gave the token budget of a pass.

    Parameters
    ----------
    requests
        The requests.
    max_tokens
        The budget; None for an engine's own, with which passes take no further time here. [tokens]
    """
    return float(requests.prompt.sum()) / max_tokens if max_tokens else 0.0
