"""`kvsim plan`: the technique, settings and batch for equal requests or for a trace."""

from kvsim.cli.command import Call, command


@command("plan")
def plan(call: Call) -> None:
    """Choose a technique and its settings for a workload or trace."""
    from kvsim.api.plans import plan as make_plan
    from kvsim.errors import InfeasibleError

    try:
        result = make_plan(**call.options)
    except InfeasibleError as none:
        _show_empty(call, none)
        raise
    call.show(result)


def _show_empty(call: Call, none: Exception) -> None:
    """Write and show what is known where there is no plan."""
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.report import plan, plan_service

    if not isinstance(none, NoPlanError):
        return
    room = plan if call.options.get("offline") else plan_service
    empty = room.make_empty_result(none, call.line)
    call.write(empty)
    if call.json:
        empty.show(json=True)
