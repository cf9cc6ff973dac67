"""`kvsim plan`: the technique, settings and batch for equal requests or for a trace."""

from typing import TYPE_CHECKING

from kvsim.cli.command import Call, command, print_settings

if TYPE_CHECKING:
    from kvsim.report.plan import Planned


@command("plan")
def plan(call: Call) -> None:
    """Choose technique, settings and batch for a workload or trace."""
    from kvsim.api.plans import plan as make_plan
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.report.plan import Planned

    try:
        result = make_plan(**call.options)
    except NoPlanError as none:
        _say_none(call, none)
        raise
    call.write(result)
    if call.json:
        call.print_json(result.envelope())
        return
    if isinstance(result, Planned):
        _show_equal(result)
    else:
        from kvsim.report import plan_trace

        plan_trace.show(result)
    print_settings(result.row.get("settings", ()))


def _say_none(call: Call, none: Exception) -> None:
    """That there is no plan, on the page and in JSON."""
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.report.plan_none import unplanned

    assert isinstance(none, NoPlanError)
    if none.deployment is None or not (call.json or call.report):
        return
    result = unplanned(none, none.deployment, call.line)
    call.write(result)
    if call.json:
        call.print_json(result.envelope())


def _show_equal(result: "Planned") -> None:
    from kvsim.report import names, plan_more
    from kvsim.report import plan as shown

    answer = result.row
    shown.show(names.deployment(result.plan.choice.deployment), answer)
    if "pareto" in answer:
        plan_more.show_front(answer["pareto"])
    if "flips" in answer:
        plan_more.show_flips(answer["flips"])
