"""`kvsim explore`: a page with sliders."""

from kvsim.cli.command import Call, command


@command("explore")
def explore(call: Call) -> None:
    """Write an interactive page of predictions with sliders."""
    from kvsim import api

    api.explore(**call.options)
