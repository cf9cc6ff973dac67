"""The commands: their options and help, the function of ``kvsim.api`` that answers, the output."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from typer.core import TyperCommand, TyperGroup

from kvsim import api
from kvsim.console import print_note, print_written
from kvsim.errors import InfeasibleError, InputError
from kvsim.files import check_target, replace_text
from kvsim.inputs import parse_flag, parse_path, parse_paths
from kvsim.options import (
    COUNTED_BY,
    EXAMPLES,
    PRESENTED,
    SPELLINGS,
    TABLE,
    CommandOption,
    command_line,
    find_misuse,
    options_of,
    read_spellings,
)

MIN_GROUPED = 8
"""Options from which groups help."""

GPU_KINDS = ("gpu", "gpus")  # options that name kinds of GPU
GIVEN = "kvsim.given"  # of a context: the parameters that were typed, in order


class Page(Protocol):
    """An object that can write itself as an HTML page."""

    def write(self, path: Path) -> None:
        """Write the page to a file; after an error no partial file is left."""


class Shown(Page, Protocol):
    """The result of a command, which can print itself and write its page."""

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""

    def show(self, json: bool, verbose: bool) -> None:
        """Print the result as text or as JSON."""


@dataclass(frozen=True)
class Call:
    """A parsed command line.

    Attributes
    ----------
    command
        Name of the command.
    options
        The given options by keyword, to be passed to the function of ``kvsim.api``.
    json, csv, verbose
        Form of the output.
    report
        File of the HTML page; None for none.
    """

    command: str
    options: Mapping[str, Any]
    json: bool = False
    csv: bool = False
    verbose: bool = False
    report: Path | None = None

    @property
    def line(self) -> str:
        """The command line without the options that only affect the output."""
        return command_line(self.command, self.options)

    def write(self, result: Page) -> None:
        """Write the result as an HTML page if ``--report`` was given.

        Parameters
        ----------
        result
            The result.
        """
        if self.report is not None:
            result.write(self.report)
            print_written(self.report)

    def show(self, result: Shown) -> None:
        """Print the result, after writing its HTML page if ``--report`` was given.

        Parameters
        ----------
        result
            The result.

        Raises
        ------
        typer.Exit
            With code 1 if a check failed.
        """
        self.write(result)
        result.show(self.json, self.verbose)
        if not result.passed:
            sys.stdout.flush()
            raise typer.Exit(1)


def command(name: str, about: str, answer: Callable[[Call], object]) -> Callable[..., None]:
    """Make a function with the signature that Typer needs for a command, from the options table.

    Parameters
    ----------
    name
        Name of the command, such as ``plan`` or ``traces inspect``.
    about
        Text of its help.
    answer
        Handles the parsed command line.
    """

    def run(ctx: typer.Context, **values: object) -> None:
        call = _call(name, ctx, values)
        if ctx.invoked_subcommand is None:
            answer(call)
        elif call.options:
            option = options_of(name)[next(iter(call.options))].flag
            raise InputError(f"{option}: appears before {ctx.invoked_subcommand}; put it after")

    context = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(_parameter(name, option) for option in options_of(name).values())]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = about
    return run


def _call(name: str, ctx: typer.Context, values: Mapping[str, Any]) -> Call:
    given = {key: values[key] for key in ctx.meta.get(GIVEN, ()) if values.get(key) is not None}
    if "report" in given:
        check_target(given["report"], "--report")
    shown = {key: given[key] for key in PRESENTED if key in given}
    return Call(name, {k: v for k, v in given.items() if k not in PRESENTED}, **shown)


def _parameter(command: str, option: CommandOption) -> Parameter:
    """The parameter of a function that Typer makes an option or argument of."""
    kind: Any = str
    if option.parse is parse_flag:
        kind = bool
    elif option.parse in (parse_path, parse_paths):
        kind = Path
    if option.repeated:
        kind = list[kind]
    default: object = option.default
    if option.required:
        default = Parameter.empty
    elif default is not None and kind is not bool:
        default = [str(default)] if option.repeated else str(default)
    if option.repeated and default in ([""], None):
        default = None
    metavar, completed = option.metavar or None, completion(command, option.name)
    if option.position:
        info = typer.Argument(metavar=metavar, help=option.help, autocompletion=completed)
    else:
        about: dict[str, Any] = {"metavar": metavar, "help": option.help, "hidden": option.hidden}
        info = typer.Option(option.flag, *option.also, autocompletion=completed, **about)
    if default is None:
        kind = kind | None
    shown = Annotated[kind, info]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=shown)


COMPLETED = dict.fromkeys(("technique", "techniques", "only", "without", "compare"), "techniques")
COMPLETED |= {"model": "models", "gpu": "gpus", "gpus": "gpus", "stack": "stacks"}
COMPLETED |= {"weights": "weights", "trace": "traces", "emit": "engines"}
"""Options that the shell completes, and what their values name."""
NAMES = {
    "models": ("models.catalogue", "model_names"),
    "ids": ("models.catalogue", "names_in_use"),
    "gpus": ("machines.profiles", "hardware_names"),
    "stacks": ("machines.profiles", "stack_names"),
    "techniques": ("techniques", "TECHNIQUES"),
    "weights": ("machines.deployment", "WEIGHT_FORMATS"),
    "traces": ("traces.source", "samples"),
    "engines": ("emit.engines", "WRITERS"),
}
"""Where names of each kind are; the shell waits for the import of one module."""


def completion(command: str, option: str) -> Callable[[str], list[str]] | None:
    """Return the shell completion of an option, if there is one.

    Parameters
    ----------
    command
        Name of the command.
    option
        Keyword of the option, such as ``model``.

    Returns
    -------
    callable or None
        Completes a typed value; in a list separated by commas, the last item.
    """
    kind = command if option == "name" else COMPLETED.get(option)
    if kind is None or kind not in COMPLETED.values():
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, typed = incomplete.rpartition(",")
        found = (name for name in _known(kind, typed) if name.lower().startswith(typed.lower()))
        return [f"{before}{comma}{name}" for name in found]

    return complete


def _known(kind: str, typed: str) -> Iterable[str]:
    """What a value may be from the part of it that was typed."""
    module, name = NAMES["ids" if kind == "models" and "/" in typed else kind]
    found = getattr(import_module(f"kvsim.{module}"), name)
    names: Iterable[str] = found() if callable(found) else found
    if kind == "traces":
        return (f"sample:{name}" for name in names)
    return ("released", *names) if kind == "weights" else names


class CheckedHelp:
    """Grouped help and checks of the options, for commands and groups of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by group, then the examples.

        Parameters
        ----------
        ctx
            Context of the command.
        formatter
            Receives the text.
        """
        name = ctx.command_path.partition(" ")[2]
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            record = parameter.get_help_record(ctx)
            if record is not None:
                known = options_of(name).get(parameter.name)
                groups.setdefault(known.group if known else "Output", []).append(record)
        arguments = groups.pop("Arguments", [])
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        if sum(map(len, groups.values())) < MIN_GROUPED:
            groups = {"Options": [record for some in groups.values() for record in some]}
        for group in dict.fromkeys(["Options", *(option.group for option in TABLE)]):
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group])
        if hasattr(self, "format_commands"):
            self.format_commands(ctx, formatter)
        examples = EXAMPLES.get(name, ())
        if examples:
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write_text(line)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line and reject options that have no effect.

        Parameters
        ----------
        ctx
            Context of the command, which receives the given options in order.
        args
            The words after the command.

        Returns
        -------
        list of str
            Remaining words.

        Raises
        ------
        InputError
            If an option has no effect, is given twice or lacks a value.
        """
        name = ctx.command_path.partition(" ")[2]
        typed, args = args, read_spellings(name, args)
        counter, flags = COUNTED_BY.get(name), [word.partition("=")[0] for word in typed]
        spelled = [SPELLINGS.get(flag, flag) for flag in flags]
        if counter == "--tp" and "--tp" in args and "--tp" not in spelled:
            count = args[args.index("--tp") + 1]
            print_note(
                f"the GPUs share one copy of the model (--tp {count}); kvsim plan "
                f"--total-gpus {count} compares other layouts"
            )
        word = next((x for x, flag in zip(flags, spelled, strict=True) if flag == "--gpus"), "")
        kind = next((o for o in options_of(name).values() if o.name in GPU_KINDS), None)
        unnamed = not {"--gpu", "--gpus"} & set(args)
        if kind and kind.required and word and counter in args and unnamed:
            raise InputError(
                f"{word}: got {args[args.index(counter) + 1][:40]!r}, which says how many; expected"
                f" the kind of GPU as well, as {kind.flag} h100 {counter} N"
            )
        values, _, order = self.make_parser(ctx).parse_args(list(args))  # type: ignore[attr-defined]
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except ValueError as problem:  # a path that no system could have
            named = ((n, x) for n, x in values.items() if isinstance(x, str) and "\0" in x)
            option, wrong = next(named, ("path", ""))
            expected = "expected a file in an existing, writable folder"
            raise InputError(f"--{option}: got {wrong[:40]!r}; {expected}") from problem
        names = (p.name for p in order if p.param_type_name == "option" or values.get(p.name))
        given = ctx.meta[GIVEN] = list(dict.fromkeys(names))
        fault = _find_repetition(order, values) or find_misuse(name, given)
        if fault:
            raise InputError(fault)
        return rest


def _find_repetition(order: list[Any], values: Mapping[str, object]) -> str:
    """An option that is given twice, or without a value; empty if none is."""
    for i, parameter in enumerate(order):
        if parameter.param_type_name != "option" or parameter.is_flag:
            continue
        name, value = parameter.opts[0], values[parameter.name]
        if not parameter.multiple and parameter in order[:i]:
            return f"{name}: is given twice; expected one value"
        if value == "" or (isinstance(value, list) and "" in value):
            return f"{name}: got ''; expected a value, or omit {name}"
    return ""


class CheckedCommand(CheckedHelp, TyperCommand):
    """A command that refuses options without effect, given twice, or without a value."""


class CheckedGroup(CheckedHelp, TyperGroup):
    """A group of commands that is itself a command."""


QUESTIONS = (
    "`plan` fills one deployment to the limit of its targets; `capacity` finds the fleet for a "
    "given load."
)
HELP = {
    "plan": "Choose a technique and its settings for a workload or trace.\n\n" + QUESTIONS,
    "predict": "Predict the latency, throughput and memory of techniques.",
    "simulate": "Replay a request trace under continuous batching.",
    "capacity": "Find the cheapest fleet that serves a workload within targets.\n\n" + QUESTIONS,
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

INTERNAL_FUNCTIONS = {
    "sweep": "predictions.run_sweep",
    "traces import": "traces.import_",
    **{f"traces {verb}": f"traces.{verb}" for verb in ("inspect", "convert", "generate")},
}
"""The function that answers a command, where it is none of ``kvsim.api`` under the same name."""


def _ask(call: Call) -> Any:
    """Ask the function of ``kvsim.api`` that answers a command."""
    if call.command not in INTERNAL_FUNCTIONS:
        return getattr(api, call.command.replace(" ", "_"))(**call.options)
    module, _, function = INTERNAL_FUNCTIONS[call.command].partition(".")
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
        from kvsim.report.terminal import Terminal

        if isinstance(none, NoPlanError):
            room = plan if call.options.get("offline") else plan_service
            empty = room.make_empty_result(none, call.line)
            call.write(empty)
            if call.json:
                empty.show(json=True)
            if empty.blocks:
                told = "\n".join([none.reason, *Terminal().lines(empty.blocks)])
                raise InfeasibleError(told) from None
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
    """Show a fleet; where there is none, JSON with the reason and the targets that would do."""
    try:
        result = _ask(call)
    except InfeasibleError as none:
        if call.json:
            from kvsim.report.capacity import make_empty_result

            make_empty_result(none, call.line).show(json=True)
        raise
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
    """Add a command and its subcommands to the application.

    Parameters
    ----------
    app
        The application.
    name
        A name in :data:`COMMANDS`.
    """

    def made(full: str) -> Callable[..., None]:
        return command(full, HELP[full], ANSWERS.get(full, _ask_and_show))

    below = [full for full in HELP if full.startswith(f"{name} ")]
    if not below:
        app.command(name, cls=CheckedCommand)(made(name))
        return
    alone = name in dir(api)
    group = typer.Typer(help=HELP[name], no_args_is_help=not alone, rich_markup_mode=None)
    if alone:
        group.callback(cls=CheckedGroup, invoke_without_command=True)(made(name))
    for full in below:
        group.command(full.partition(" ")[2], cls=CheckedCommand)(made(full))
    app.add_typer(group, name=name)
