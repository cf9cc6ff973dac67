"""`kvsim simulate`: a request trace under continuous batching."""

from kvsim.cli.command import Call, command


@command("simulate")
def simulate(call: Call) -> None:
    """Replay a request trace under continuous batching."""
    from kvsim.api.simulations import simulate as replay

    call.show(replay(**call.options))
