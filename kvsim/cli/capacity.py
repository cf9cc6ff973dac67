"""`kvsim capacity`: the cheapest fleet for a request trace."""

from kvsim.cli.command import Call, command, print_settings
from kvsim.errors import InfeasibleError


@command("capacity")
def capacity(call: Call) -> None:
    """Find the cheapest fleet that serves a trace within targets."""
    from kvsim.api.fleets import capacity as find_fleet
    from kvsim.report import capacity_tables

    result = find_fleet(**call.options)
    call.write(result)
    if call.json:
        call.print_json(result.envelope())
    else:
        capacity_tables.show(result.row)
        for replica in result.row["fleet"]:
            print_settings(replica["settings"])
    if result.plan.shortfall:
        raise InfeasibleError(f"not as asked: {result.plan.shortfall}")
