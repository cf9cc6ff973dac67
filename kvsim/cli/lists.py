"""`kvsim models`, `gpus`, `techniques` and `stacks`."""

from kvsim.cli.command import Call, command


@command("models")
def models(call: Call) -> None:
    """List the model catalogue, or show one model."""
    _show("models", call)


@command("gpus")
def gpus(call: Call) -> None:
    """List the hardware profiles, or show one with its sources."""
    _show("gpus", call)


@command("techniques")
def techniques(call: Call) -> None:
    """List the techniques, or show one with its settings and paper."""
    _show("techniques", call)


@command("stacks")
def stacks(call: Call) -> None:
    """List the software stacks, or show one with its errors."""
    _show("stacks", call)


def _show(kind: str, call: Call) -> None:
    from kvsim.report import lists

    call.show(lists.make_result(kind, call.options.get("name", ""), call.line))
