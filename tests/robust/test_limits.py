"""Ranges of numbers, bounds of work, and options that would do nothing."""

from pathlib import Path
from typing import Any

import pytest
import typer

from kvsim import files, options
from kvsim.cli.app import application
from kvsim.errors import InputError
from kvsim.inputs import format_plain
from kvsim.options import find_misuse
from tests.support.commands import line

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("--model", "smollm2-135m", "--gpu", "t4")


def commands(group: Any, above: str = "kvsim") -> dict[str, Any]:
    """Every command by its path."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        path = f"{above} {name}"
        below = commands(command, path) if hasattr(command, "commands") else {}
        found |= {path: command, **below}
    return found


COMMANDS = commands(typer.main.get_command(application()))


def kinds_table() -> str:
    """Format all kinds as a Markdown table."""
    lines = ["| kind | contents | size limit |", "|---|---|---:|"]
    for kind in files.FILE_KINDS.values():
        lines.append(f"| `{kind.name}` | {kind.expected} | {files.size_text(kind.most)} |")
    return "\n".join(lines) + "\n"


def limits_table() -> str:
    """All ranges as a table in Markdown."""
    lines = ["| option | smallest | largest | unit |", "|---|---:|---:|---|"]
    for name, allowed in options.OPTION_RANGES.items():
        bounds = f"{format_plain(allowed.least)} | {format_plain(allowed.most)}"
        lines.append(f"| `{name}` | {bounds} | {allowed.unit or '-'} |")
    return "\n".join(lines) + "\n"


def test_the_documentation_has_the_tables() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert limits_table() in page and kinds_table() in page


@pytest.mark.parametrize("name", options.OPTION_RANGES)
def test_a_number_outside_its_range_is_refused_with_the_range(name: str) -> None:
    allowed = options.OPTION_RANGES[name]
    for value in (allowed.least, allowed.most):
        allowed.check(name, value)
    wrong = [allowed.least - 1, allowed.most * 1.5 + 1, float("inf"), float("-inf")]
    if allowed.whole:
        wrong.append(allowed.least + 0.5)
    for value in wrong:
        with pytest.raises(InputError, match=f"{name}: got .*; expected a .*number from "):
            allowed.check(name, value)
    assert any(name in parameter.opts for c in COMMANDS.values() for parameter in c.params), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", *MODEL, "--technique", "full", "--batch", "0"), "--batch: got 0"),
        (("predict", *MODEL, "--technique", "full", "--prompt", "20M"), "--prompt: got 20"),
        (("plan", *MODEL, "--gpu-memory", "1e-9"), "--gpu-memory: got '1e-9'"),
        (("plan", *MODEL, "--tpot", "1e-9s"), "--tpot: got '1e-9s'"),
        (("simulate", *MODEL, "--trace", "sample:chat", "--max-seqs", "1000001"), "to 65,536"),
        (("simulate", *MODEL, "--trace", "sample:chat", "--replicas", "100000"), "to 10,000"),
        (("simulate", *MODEL, "--trace", "sample:chat", "--rate", "1e7"), "--rate: got '1e7'"),
    ],
)
def test_ranges_hold_on_the_command_line(arguments: tuple[str, ...], words: str) -> None:
    assert words in line(*arguments)


def test_work_is_estimated_before_it_starts() -> None:
    many = ",".join(map(str, range(1, options.MAX_ROWS + 2)))
    said = line("predict", *MODEL, "--technique", "full", "--batch", many)
    assert "ask for 5,001 rows together; expected at most 5,000; ask for fewer" in said


RULES = [
    (command, option, kind)
    for command in sorted({c for option in options.TABLE for c in option.commands})
    if f"kvsim {command}" in COMMANDS
    for option in options.options_of(command).values()
    for kind in ("needs", "excludes")
    if getattr(option, kind).get(command)
]


@pytest.mark.parametrize(("command", "option", "kind"), RULES)
def test_options_without_effect_are_refused(
    command: str, option: options.CommandOption, kind: str
) -> None:
    found = COMMANDS[f"kvsim {command}"]
    parameters = {p.name: p for p in found.params}

    def typed(names: set[str]) -> list[str]:
        words = command.split()
        for name in sorted(names | {p.name for p in found.params if p.required}):
            flag = getattr(parameters[name], "is_flag", False)
            word = parameters[name].opts[0]
            value = "x" if name == "gpus" else "1"  # where a number would be a count
            words += ([word] if flag else [word, value]) if word.startswith("-") else ["1"]
        return words

    others = getattr(option, kind)[command].split()
    if kind == "needs":
        if not any(parameters[other].required for other in others):
            said = line(*typed({option.name}))
            assert "has no effect without" in said or ", not both" in said
            assert find_misuse(command, [option.name]).startswith(f"{option.flag}: has no effect")
    else:
        for other in others:
            said = line(*typed({option.name, other}))
            assert ", not both" in said or "has no effect without" in said
