"""`kvsim plan`: the technique, settings and batch for equal requests or for a trace."""

from kvsim.cli.command import Call, command


@command("plan")
def plan(call: Call) -> None:
    """Choose a technique and its settings for a workload or trace."""
    from kvsim.api.plans import plan as make_plan
    from kvsim.planner.alternatives import NoPlanError
    from kvsim.planner.remedies import NoServiceError
    from kvsim.report import plan_service
    from kvsim.report.plan import make_empty_result

    try:
        result = make_plan(**call.options)
    except NoPlanError as none:
        if none.deployment is not None:
            empty = make_empty_result(none, none.deployment, call.line)
            call.write(empty)
            if call.json:
                empty.show(json=True)
        raise
    except NoServiceError as none:
        missing = plan_service.make_empty_result(none, call.line)
        call.write(missing)
        if call.json:
            missing.show(json=True)
        raise
    call.show(result)
