"""`kvsim calibrate`: a machine measured, or a stack fitted to what was measured elsewhere."""

from kvsim.cli.command import Call, command


@command("calibrate")
def calibrate(call: Call) -> None:
    """Measure this machine, or fit a stack to runs or tables."""
    from kvsim.api.calibrations import calibrate as fit

    call.show(fit(**call.options))
