"""`kvsim explore`: a page with sliders."""

from kvsim.cli.command import Call, command


@command("explore")
def explore(call: Call) -> None:
    """Write a page with sliders: batch, prompt, bits, drafts, link."""
    from kvsim import api

    api.explore(**call.options)
