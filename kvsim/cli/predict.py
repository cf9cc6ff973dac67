"""`kvsim predict`: latency, throughput and memory of techniques at given points."""

from kvsim.cli.command import Call, command


@command("predict")
def predict(call: Call) -> None:
    """Predict the latency, throughput and memory of techniques."""
    from kvsim import api
    from kvsim.report.predict import csv

    result = api.predict(**call.options)
    if call.csv:
        call.write(result)
        print(csv(result.rows), end="")
    else:
        call.show(result)
