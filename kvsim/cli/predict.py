"""`kvsim predict`: latency, throughput and memory of techniques at given points."""

from kvsim.cli.command import Call, command


@command("predict")
def predict(call: Call) -> None:
    """Predict latency, throughput and memory of techniques."""
    from kvsim import api
    from kvsim.report import predict as report

    result = api.predict(**call.options)
    call.write(result)
    if call.json:
        call.print_json(result.envelope())
    elif call.csv:
        print(report.csv(result.rows), end="")
    else:
        report.show(result)
