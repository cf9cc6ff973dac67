"""The commands of kvsim: what each asks of ``kvsim.api``, and how it shows the answer."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from kvsim.cli.command import Call, CheckedCommand, CheckedGroup, command
from kvsim.console import print_written
from kvsim.errors import InfeasibleError
from kvsim.files import replace_text

HELP = {
    "plan": "Choose a technique and its settings for a workload or trace.",
    "predict": "Predict the latency, throughput and memory of techniques.",
    "simulate": "Replay a request trace under continuous batching.",
    "capacity": "Find the cheapest fleet that serves a workload within targets.",
    "sweep": "Compute a grid of points, here or on a Dask cluster.",
    "explore": "Write an interactive page of predictions with sliders.",
    "reproduce": "Compare published or your own measurements with predictions.",
    "calibrate": "Measure this machine, or fit a stack to runs or tables.",
    "validate": "Run techniques in PyTorch and compare them with predictions.\n\n"
    "Tokens, FLOPs, bytes and memory are compared.\n\n"
    "If --gpu is a profile of this device, measured by kvsim calibrate, times are compared "
    "instead,\nover a grid of points.",
    "validate quality": "Measure perplexity, attention and acceptance of drafts on a text.",
    "validate layers": "Measure the loss of quantising the keys or values of each layer alone.",
    "validate plan": "Run the plan of `kvsim plan --json` and measure its loss, times and memory.",
    "doctor": "List all faults of an input file.\n\n"
    "The command exits with code 1 if the file has a fault.",
    "models": "List the model catalogue, or show one model.",
    "gpus": "List the hardware profiles, or show one with its sources.",
    "techniques": "List the techniques, or show one with its settings and paper.",
    "stacks": "List the software stacks, or show one with its errors.",
    "traces": "Inspect, convert and generate request traces.",
    "traces import": "Create a trace from metrics, spans or access logs.",
    "traces inspect": "Show the rate, burstiness, lengths and prefix reuse of a trace.",
    "traces convert": "Convert a trace to Parquet.",
    "traces generate": "Generate a synthetic trace from distributions, or one similar to another "
    "trace.",
}
"""Every command and what its help says, in the order of the help."""

COMMANDS = tuple(dict.fromkeys(name.partition(" ")[0] for name in HELP))

API = {
    "plan": "plans.plan",
    "predict": "predictions.predict",
    "simulate": "simulations.simulate",
    "capacity": "fleets.capacity",
    "sweep": "predictions.run_sweep",
    "explore": "predictions.explore",
    "reproduce": "predictions.reproduce",
    "calibrate": "calibrations.calibrate",
    "validate": "validations.validate",
    "validate quality": "validations.validate_quality",
    "validate layers": "validations.validate_layers",
    "validate plan": "validations.validate_plan",
    "traces import": "traces.import_",
    "traces inspect": "traces.inspect",
    "traces convert": "traces.convert",
    "traces generate": "traces.generate",
}
"""The function of ``kvsim.api`` that answers a command; only its module is imported."""


def _ask(call: Call) -> Any:
    """Ask the function of ``kvsim.api`` that answers a command."""
    module, _, function = API[call.command].partition(".")
    return getattr(import_module(f"kvsim.api.{module}"), function)(**call.options)


def _ask_and_show(call: Call) -> None:
    call.show(_ask(call))


def _plan(call: Call) -> None:
    """Show a plan; where there is none, what is known of why."""
    try:
        result = _ask(call)
    except InfeasibleError as none:
        from kvsim.planner.alternatives import NoPlanError
        from kvsim.report import plan, plan_service

        if isinstance(none, NoPlanError):
            room = plan if call.options.get("offline") else plan_service
            empty = room.make_empty_result(none, call.line)
            call.write(empty)
            if call.json:
                empty.show(json=True)
        raise
    call.show(result)


def _predict(call: Call) -> None:
    from kvsim.report.predict import csv

    result = _ask(call)
    if call.csv:
        call.write(result)
        print(csv(result.rows), end="")
    else:
        call.show(result)


def _capacity(call: Call) -> None:
    result = _ask(call)
    call.show(result)
    if result.found.shortfall:
        raise InfeasibleError(f"the request could not be met: {result.found.shortfall}")


def _reproduce(call: Call) -> None:
    from kvsim.report.reproduce import to_markdown

    result = _ask(call)
    if call.report is not None and call.report.suffix == ".md":
        replace_text(call.report, to_markdown(result))
        print_written(call.report)
    else:
        call.write(result)
    result.show(call.json)


def _doctor(call: Call) -> None:
    from kvsim.doctor import examine
    from kvsim.report.answer import Answer
    from kvsim.report.result import Result
    from kvsim.report.terminal import Items

    file = call.options["file"]
    found = examine(file)
    count = len(found.faults)
    said = "no fault" if not count else f"{count} fault{'s' * (count > 1)}"
    told = f"{file}: {found.kind}, {said}"
    faults = [Items([fault.removeprefix(f"{file}: ") for fault in found.faults])] if count else []
    call.show(
        Result(
            told,
            Answer(told),
            {"file": file, "kind": found.kind, "faults": found.faults},
            found,
            blocks=[told, *faults, *(f"note: {x}" for x in found.notes)],
            notes=found.notes,
            passed=not count,
            command=call.line,
        )
    )


def _list(call: Call) -> None:
    from kvsim.report import lists

    call.show(lists.make_result(call.command, call.options.get("name", ""), call.line))


ANSWERS: dict[str, Callable[[Call], Any]] = {
    "plan": _plan,
    "predict": _predict,
    "capacity": _capacity,
    "sweep": lambda call: call.write(_ask(call)),
    "explore": _ask,
    "reproduce": _reproduce,
    "doctor": _doctor,
    "traces convert": _ask,
    **dict.fromkeys(("models", "gpus", "techniques", "stacks"), _list),
}
"""How commands answer that do more, or less, than to show what their function returns."""


def add_command(app: typer.Typer, name: str) -> None:
    """Add a command to the application, with the commands below it.

    Parameters
    ----------
    app
        The application.
    name
        One of :data:`COMMANDS`.
    """

    def made(full: str) -> Callable[..., None]:
        return command(full, HELP[full], ANSWERS.get(full, _ask_and_show))

    below = [full for full in HELP if full.startswith(f"{name} ")]
    if not below:
        app.command(name, cls=CheckedCommand)(made(name))
        return
    alone = name in API
    group = typer.Typer(help=HELP[name], no_args_is_help=not alone, rich_markup_mode=None)
    if alone:
        group.callback(cls=CheckedGroup, invoke_without_command=True)(made(name))
    for full in below:
        group.command(full.partition(" ")[2], cls=CheckedCommand)(made(full))
    app.add_typer(group, name=name)
