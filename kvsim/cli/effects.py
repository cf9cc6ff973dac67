"""Options that would do nothing are refused: which options a command needs for which."""

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from kvsim.cli.help import GroupedCommand
from kvsim.errors import InputError
from kvsim.frozen import frozen


@frozen
class Rule:
    """Options that only do something if another one is given, or if it is not.

    Attributes
    ----------
    options
        Refused where the rule is broken; an option as it is typed, or an argument's name.
    other
        The option that decides.
    present
        Whether the other must be given, or must not be.
    instead
        Options that serve as well as the other.
    """

    options: tuple[str, ...]
    other: str
    present: bool
    instead: tuple[str, ...] = ()

    def fault(self, given: set[str]) -> str:
        """What is wrong with the options that a user gave; empty if nothing is."""
        for option in self.options:
            there = bool(given & {self.other, *self.instead})
            if option in given and there is not self.present:
                if self.present:
                    others = " or ".join((self.other, *self.instead))
                    mend = f"add {others}, or leave {option} away"
                    return f"{option}: does nothing without {others}; {mend}"
                return f"{option} and {self.other}: both are given; expected one of them"
        return ""


def needs(other: str, *options: str) -> Rule:
    """The options do nothing without the other."""
    return Rule(options, other, True)


def excludes(other: str, *options: str) -> Rule:
    """The options do nothing beside the other."""
    return Rule(options, other, False)


EFFECTS: dict[str, tuple[Rule, ...]] = {
    "kvsim predict": (excludes("--csv", "--json"),),
    "kvsim plan": (
        needs("--trace", "--rate", "--per-class", "--max-seqs", "--max-tokens"),
        excludes("--trace", "--prompt", "--generate", "--batch", "--offline"),
        excludes("--max-loss", "--lossy"),
    ),
    "kvsim simulate": (
        needs("--out", "--resume"),
        excludes("--compare", "--technique"),
        excludes("--columns", "--format"),
    ),
    "kvsim reproduce": (excludes("--fit", "--report", "--json"), needs("--fit", "--stack")),
    "kvsim calibrate": (
        needs(
            "--from-run", "--model", "--technique", "--fit-first", "--max-seqs",
            "--max-tokens", "--block-tokens", "--blocks", "--prefix-caching", "--tp", "--weights",
        ),
        Rule(("--gpu",), "--from-run", True, ("--from-ops",)),
        Rule(("--stack",), "--from-run", True, ("--from-ops", "--from-serving")),
        Rule(("--engine",), "--from-ops", True, ("--from-serving",)),
        needs("--from-ops", "--version", "--hold-out"),
        needs("--device", "--quick"),
        excludes("--from-run", "--device"),
    ),
    "kvsim validate": (
        Rule(("--text",), "--quality", True, ("--plan",)),
        needs("--quality", "--out"),
        excludes("--plan", "--technique", "--quality", "--per-layer", "--bits", "--max-error",
                 "--report", "--layers", "--points"),
        excludes("--quality", "--max-error", "--report", "--layers", "--points"),
    ),
    "kvsim capacity": (
        needs("--schedule", "--start-up"),
        excludes("--max-loss", "--lossy"),
    ),
    "kvsim sweep": (excludes("--scheduler", "--workers"),),
    "kvsim traces inspect": (excludes("--columns", "--format"),),
    "kvsim traces convert": (excludes("--columns", "--format"),),
    "kvsim traces generate": (excludes("--requests", "--duration"),),
}  # fmt: skip


def misgiven(order: Sequence[Any], values: Mapping[str, Any]) -> str:
    """What is wrong with how often options are given, or an empty value; empty if nothing is.

    Parameters
    ----------
    order : the parser's parameters as they were typed, with repetitions.
    values : by the parameter's name; a list where it may be repeated.
    """
    for i, parameter in enumerate(order):
        if parameter.param_type_name != "option" or parameter.is_flag:
            continue
        name, value = parameter.opts[0], values[parameter.name]
        if not parameter.multiple and parameter in order[:i]:
            return f"{name}: is given twice; expected one value; omit one of them"
        if value == "" or (isinstance(value, list) and "" in value):
            return f"{name}: got ''; expected a value, or omit {name}"
    return ""


class RuleCommand(GroupedCommand):
    """A command that refuses options without effect, given twice, or without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The parser's own work, and then the rules."""
        values, _, order = self.make_parser(ctx).parse_args(list(args))
        rest: list[str] = super().parse_args(ctx, args)
        fault = misgiven(order, values)
        if fault:
            raise InputError(fault)
        given = {p.opts[0] for p in order if p.opts}
        for rule in EFFECTS.get(ctx.command_path, ()):
            fault = rule.fault(given)
            if fault:
                raise InputError(fault)
        return rest


def checked(app: Any) -> Any:
    """An application whose commands all are checked."""
    for command in app.registered_commands:
        if command.cls is None or command.cls is TyperCommand:
            command.cls = RuleCommand
    for group in app.registered_groups:
        checked(group.typer_instance)
    return app
