"""`kvsim sweep`: a grid of predictions, plans, simulations or fleets, in Parquet."""

from kvsim.cli.command import Call, command


@command("sweep")
def sweep(call: Call) -> None:
    """Compute a grid of points, here or on a Dask cluster."""
    from kvsim.api.predictions import run_sweep

    call.write(run_sweep(**call.options))
