"""`kvsim capacity`: the cheapest fleet for a request trace."""

from kvsim.cli.command import Call, command
from kvsim.errors import InfeasibleError


@command("capacity")
def capacity(call: Call) -> None:
    """Find the cheapest fleet that serves a workload within targets."""
    from kvsim.api.fleets import capacity as find_fleet

    result = find_fleet(**call.options)
    call.show(result)
    if result.found.shortfall:
        raise InfeasibleError(f"the request could not be met: {result.found.shortfall}")
