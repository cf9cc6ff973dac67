"""Every option, defined once: name, unit, range, default, help, commands and relations.

The command line's options, the keywords of ``kvsim.api``, the table in docs/limits.md, and the
command line that gives the same answer as a call from Python all come from ``options.toml``.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypeVar

from kvsim.console import on_command_line
from kvsim.errors import InfeasibleError, InputError
from kvsim.inputs import Parser, Range, find_parser, format_plain, parse_model, parse_text

HOST_SHARE = 0.85
"""Share of host memory that plans fill: the rest is the system's, and what a process needs."""

MAX_ROWS = 5_000
"""Rows that one command prints; `kvsim sweep` takes more."""


@dataclass(frozen=True, slots=True)
class CommandOption:
    """An option of some commands.

    Attributes
    ----------
    group
        The heading that it stands under in the help.
    name
        The keyword in Python; the command line has hyphens for underscores.
    help, metavar
        Purpose of the option, and the placeholder of its value in the help.
    commands
        Commands that take it.
    parse
        Function that parses the given text.
    default
        Default value, as a user would give it; None for no default.
    range
        Range of valid numbers.
    also
        Other spellings on the command line.
    spelled
        Names of the option in engines and load generators.
    required
        Whether the command line insists on it.
    position
        Whether it is an argument without a name on the command line.
    repeated
        Whether it may be given several times.
    hidden
        Whether the help leaves it out: an older spelling that goes on.
    needs
        By command, options of which one must be given for this one to do anything.
    excludes
        By command, options that this one does not go with.
    at
        Differing properties, by command.
    """

    group: str
    name: str
    help: str
    commands: list[str]
    parse: Parser = parse_text
    metavar: str = ""
    default: object = None
    range: Range | None = None
    also: Sequence[str] = ()
    spelled: Sequence[str] = ()
    required: bool = False
    position: bool = False
    repeated: bool = False
    hidden: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    excludes: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The option as it is typed, and as errors name it."""
        return self.name if self.position else f"--{self.name.replace('_', '-')}"

    def value(self, given: object) -> Any:
        """Parse what was given for the option.

        Parameters
        ----------
        given
            A Python value, or its text as on the command line.

        Returns
        -------
        object
            The value meant, in the unit of the option's range.

        Raises
        ------
        InputError
            If it cannot be parsed, or is out of range.
        """
        return self.parse(self.flag, given, self.range)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

EXAMPLES: Mapping[str, list[str]] = _FILE.pop("examples")
"""Command lines that the help of a command shows."""


def _read_table(groups: Mapping[str, Any]) -> list[CommandOption]:
    """Read the rows of ``options.toml``, which says what stands in them."""
    several: dict[str, str] = groups["commands"]

    def names(text: str) -> list[str]:
        return [name for word in text.split(", ") for name in several.get(word, word).split(", ")]

    def read(key: str, value: Any) -> Any:
        if key == "commands":
            return names(value)
        if key == "parse":
            return find_parser(value)
        if key == "range":
            least, most, *unit = value
            return Range(least, most, "".join(unit), isinstance(least, int))
        if key == "default" and value is False:
            return None
        if key in ("needs", "excludes"):
            return {name: given for words, given in value.items() for name in names(words)}
        if key == "at":
            return {name: settings(row) for words, row in value.items() for name in names(words)}
        return value

    def settings(row: Mapping[str, Any]) -> dict[str, Any]:
        off = {"default": False} if row.get("parse") == "flag" else {}
        return off | {key: read(key, value) for key, value in row.items()}

    return [
        CommandOption(group, **settings(row))
        for group, rows in groups.items()
        for row in rows
        if group != "commands"
    ]


TABLE = _read_table(_FILE)
"""All options in the order of the help."""

SPELLINGS = {word: option.flag for option in TABLE for word in option.spelled}
"""Options as vLLM, SGLang, llama.cpp and load generators call them, and their names here."""

COUNTED_BY = {
    "plan": "--total-gpus",
    "predict": "--tp",
    "simulate": "--tp",
    "capacity": "--max-gpus",
}
"""The option that says how many GPUs there are, where ``--gpus`` has a number."""

COUNT_BEFORE = re.compile(r"\s*(\d{1,3})\s*[x×]\s*(?=[a-z0-9])(.+)", re.IGNORECASE)
COUNT_AFTER = re.compile(r"(.*[\w)])(?:\s+|(?<=[\dg]))[x×]\s*(\d{1,2})\s*", re.IGNORECASE)
"""How many GPUs of a kind, as 2x4090 or "H100 x8"."""

PRESENTED = ("json", "csv", "report", "verbose")
"""Options that say how an answer is shown; Python has methods for them."""

OPTION_RANGES = {option.flag: option.range for option in TABLE if option.range is not None}
"""What numbers may be, by option."""


@cache
def options_of(command: str) -> dict[str, CommandOption]:
    """List the options of a command.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.

    Returns
    -------
    dict of CommandOption
        The options by keyword, in the order of the help.
    """
    return {
        option.name: replace(option, **option.at.get(command, {}))
        for option in TABLE
        if command in option.commands
    }


ENGINE_SHARE: float = options_of("capacity")["gpu_memory_utilization"].default  # type: ignore[assignment]
"""Share of GPU memory that serving engines use unless told otherwise."""


def read_spellings(command: str, words: Iterable[str]) -> list[str]:
    """Replace options as engines call them, and numbers of GPUs, by the options of a command.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    words
        The words after it.

    Returns
    -------
    list of str
        The words as the command takes them; ``--gpu 2x4090`` becomes ``--gpu 4090`` and the option
        that counts GPUs.
    """
    taken = {
        flag for option in options_of(command).values() for flag in (option.flag, *option.also)
    }
    counter, found = COUNTED_BY.get(command), []
    pending = [part for word in words for part in _split_value(word)]
    while pending:
        word = pending.pop(0)
        meant = SPELLINGS.get(word, word)
        if meant == "--gpus" and counter and pending and pending[0].strip().isdecimal():
            found.append(counter)
            continue
        found.append(meant if meant in taken and word not in taken else word)
        if found[-1] in ("--gpu", "--gpus") and counter and pending:
            several = COUNT_BEFORE.fullmatch(pending[0])
            name, count = several.groups()[::-1] if several else (pending[0], "")
            after = COUNT_AFTER.fullmatch(name)
            if not count and after:
                name, count = after.groups()
            pending[0] = name
            said = count and not Path(name).exists()
            if said and (int(count) > 1 or counter == "--max-gpus"):  # one is the default
                pending[1:1] = [counter, count]
    return found


def _split_value(word: str) -> list[str]:
    """An option and its value where one word has both, if the option may need another name."""
    flag, equals, value = word.partition("=")
    return (
        [flag, value] if equals and (flag in SPELLINGS or flag in ("--gpu", "--gpus")) else [word]
    )


def check_range(name: str, value: float) -> None:
    """Refuse a number that is outside the range of its option.

    Parameters
    ----------
    name
        The option as it is typed, as ``--max-seqs``.
    value
        The number, in the unit of the range.

    Raises
    ------
    InputError
        Naming the option and its range.
    """
    OPTION_RANGES[name].check(name, value)


def check_work(what: str, count: float, most: float, mend: str) -> None:
    """Refuse work that would take too long, before it begins.

    Parameters
    ----------
    what
        Description of the work, such as ``--batch, --prompt: 20,000 points``.
    count, most
        How much of it was asked for, and how much is done.
    mend
        Remedy for the user.

    Raises
    ------
    InputError
        If it is more.
    """
    if count > most:
        raise InputError(f"{what}; expected at most {format_plain(most)}; {mend}")


def find_misuse(command: str, given: Iterable[str]) -> str:
    """Find a conflict between the options that are given together.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        Keywords of the options that a user gave.

    Returns
    -------
    str
        The fault, as an error message says it; empty if there is none.
    """
    options, there = options_of(command), set(given)
    for name in sorted(there, key=list(options).index):
        option = options[name]
        needed = option.needs.get(command, "").split()
        if needed and not there & set(needed):
            others = " or ".join(options[other].flag for other in needed)
            mend = f"add {others}, or omit {option.flag}"
            if (command, name) == ("plan", "rate"):
                mend += "; for the GPUs that R requests/s need, ask `kvsim capacity --rate R`"
            if (command, name) == ("capacity", "find"):
                mend += ", as kvsim capacity finds replicas and prefill replicas by itself"
            return f"{option.flag}: has no effect without {others}; {mend}"
        for other in option.excludes.get(command, "").split():
            if other in there:
                return f"give either {option.flag} or {options[other].flag}, not both"
    return ""


class Inputs:
    """The parsed options of a command, as attributes; options not given have their defaults.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        Given values by keyword; None counts as not given.

    Raises
    ------
    InputError
        For values that an option cannot have, and for options that would do nothing.
    """

    def __init__(self, command: str, given: Mapping[str, object]) -> None:
        self.command = command
        self.given = {k: v for k, v in given.items() if v is not None and v is not False}
        fault = find_misuse(command, self.given)
        if fault:
            raise InputError(fault)
        options = options_of(command).items()
        self._values = {name: _read(command, option, given.get(name)) for name, option in options}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def select(self, *names: str, **renamed: str) -> dict[str, Any]:
        """Return the values of some options, without those that have none.

        Parameters
        ----------
        *names
            Options, whose values are returned under their own names.
        **renamed
            Further options, whose values are returned under the given keywords.

        Returns
        -------
        dict
            Values by name, to be passed where everything else has a default.
        """
        every = {name: name for name in names} | renamed
        values = {key: getattr(self, name) for key, name in every.items()}
        return {key: value for key, value in values.items() if value is not None}

    def line(self, without: str = "report") -> str:
        """Return the command line that asks the same.

        Parameters
        ----------
        without
            The option that is left out, as that which names the page.

        Returns
        -------
        str
            The command as it is typed, quoted for a shell.
        """
        return command_line(self.command, self.given, without)


def _read(command: str, option: CommandOption, given: object) -> object:
    """The value of an option; where one is expected, an error names a command for several."""
    if given is None:
        return None if option.default is None else option.value(option.default)
    try:
        return option.value(given)
    except InputError as problem:
        others = [name for name in option.commands if _takes(name, option.name, given)]
        if isinstance(given, str) and "," in given and others:
            mend = f"kvsim {others[0]} {option.flag} {given} compares them"
            raise InputError(f"{problem}; {mend}") from problem
        raise


def _takes(command: str, name: str, given: object) -> bool:
    """Whether an option of a command may have a value."""
    try:
        options_of(command)[name].value(given)
    except InputError:
        return False
    return True


def command_line(command: str, given: Mapping[str, object], without: str = "report") -> str:
    """Format a command as it is typed, with words quoted as a shell needs.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        Values by keyword, in the order of the line.
    without
        The option that is left out, as that which names the page.

    Returns
    -------
    str
        The command line.
    """
    options, words = options_of(command), ["kvsim", *command.split()]
    for name, value in given.items():
        if name == without or value is None or value is False:
            continue
        option, several = options[name], isinstance(value, list | tuple)
        if option.parse is parse_model and isinstance(getattr(value, "config", value), Mapping):
            value = "config.json"  # what the fields were read from, which the call does not say
        if option.position:
            words += map(_typed, value) if several else [_typed(value)]  # type: ignore[call-overload]
        elif value is True:
            words.append(option.flag)
        else:
            word = _typed(value)
            joined = word.startswith("-")  # else the value could be taken for an option
            words += [f"{option.flag}={word}"] if joined else [option.flag, word]
    return shlex.join(words)


def _typed(value: object) -> str:
    """A value as it is typed; several are separated by commas."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_typed(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str | Path):
        return ",".join(map(_typed, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


R = TypeVar("R")


def takes_options(command: str, *first: str) -> Callable[[Callable[[Inputs], R]], Callable[..., R]]:
    """Make a function of its inputs one of keywords, which the table of options declares.

    Errors name options on the command line, and keywords in Python.

    Parameters
    ----------
    command
        The command whose options are the keywords.
    first
        Keywords that may be given by position, in this order.
    """

    def decorate(answer: Callable[[Inputs], R]) -> Callable[..., R]:
        options = {k: v for k, v in options_of(command).items() if k not in PRESENTED}
        names = [*first, *(name for name in options if name not in first)]
        needed = [n for n in names if options[n].required and options[n].default is None]
        optional = bool(first) and first[0] not in needed  # then what follows it has a default too
        signature = Signature(
            [
                Parameter(
                    name,
                    Parameter.POSITIONAL_OR_KEYWORD if name in first else Parameter.KEYWORD_ONLY,
                    default=(
                        Parameter.empty
                        if name in needed and not (optional and name in first)
                        else options[name].default
                    ),
                )
                for name in names
            ]
        )

        @wraps(answer)
        def ask(*args: object, **keywords: object) -> R:
            given = signature.bind(*args, **keywords).arguments
            for name in needed:
                if given.get(name) is None:
                    raise TypeError(f"{command}: missing a required argument: {name!r}")
            try:
                inputs = Inputs(command, given)
                found = answer(inputs)
            except (InputError, InfeasibleError) as problem:
                if not on_command_line():
                    problem.args = (name_keywords(str(problem)), *problem.args[1:])
                raise
            if getattr(found, "command", None) == "":  # an answer says what gives the same
                found = replace(found, command=inputs.line())  # type: ignore[type-var]
            return found

        ask.__signature__ = signature  # type: ignore[attr-defined]
        about, line, outcome = (answer.__doc__ or "").partition("\n    Returns\n")
        ask.__doc__ = f"{about.rstrip()}\n\n{_parameters(options, names)}\n{line}{outcome}"
        return ask

    return decorate


def name_keywords(message: str) -> str:
    """Replace options in a message by the keywords of Python, as ``max_seqs``.

    Parameters
    ----------
    message
        A message of the command line.

    Returns
    -------
    str
        The message; words that are no options stay.
    """
    known = {option.flag for option in TABLE}
    return re.sub(
        r"--[a-z][a-z-]*",
        lambda found: found[0][2:].replace("-", "_") if found[0] in known else found[0],
        message,
    )


TYPES: dict[object, str] = {
    bool: "bool",
    int: "int",
    str: "str",
    Path: "str or Path",
    list[int]: "int or list of int",
    list[str]: "str or list of str",
    list[Path]: "list of str or Path",
    list[tuple[object, object]]: "float or list of float",
    dict[str, float]: "dict of float",
    float | dict[str, float]: "float or dict of float",
}
"""Types of keywords in documentation, by what their parsers return; times are floats or text."""


def _parameters(options: Mapping[str, CommandOption], names: Iterable[str]) -> str:
    """The parameters of a function, as its documentation lists them."""
    lines = ["Parameters", "----------"]
    for name in names:
        option = options[name]
        measure = option.range.unit if option.range is not None else ""
        unit = f" [{measure}]" if measure and f"[{measure}]" not in option.help else ""
        kind = TYPES.get(option.parse.__annotations__.get("return"), "float or str")
        kind = "str or dict" if option.parse is parse_model else kind
        usual = "" if option.required else ", optional"
        if option.default not in (None, False, ""):
            usual = f", default {option.default!r}"
        lines += [f"{name} : {kind}{usual}", f"    {name_keywords(option.help)}{unit}"]
    return "\n".join(f"    {line}" if line else "" for line in lines)
