"""Ranges of numbers, bounds of work, and options that would do nothing."""

from pathlib import Path
from typing import Any

import pytest
import typer

from kvsim import options
from kvsim.cli.app import application
from kvsim.cli.effects import EFFECTS, excludes, needs
from kvsim.errors import InputError
from kvsim.files import kinds
from tests.support.commands import line

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("--model", "smollm2-135m", "--gpu", "t4")


def commands(group: Any, above: str = "kvsim") -> dict[str, Any]:
    """Every command by its path."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        path = f"{above} {name}"
        found |= commands(command, path) if hasattr(command, "commands") else {path: command}
    return found


COMMANDS = commands(typer.main.get_command(application()))


def test_the_documentation_has_the_tables() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert options.limits_table() in page and kinds.table() in page


@pytest.mark.parametrize("name", options.RANGES)
def test_a_number_outside_its_range_is_refused_with_the_range(name: str) -> None:
    allowed = options.RANGES[name]
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


@pytest.mark.parametrize("path", EFFECTS)
def test_rules_name_options_that_are_there(path: str) -> None:
    known = {name for parameter in COMMANDS[path].params for name in parameter.opts}
    for rule in EFFECTS[path]:
        assert {*rule.options, rule.other} <= known


@pytest.mark.parametrize("path", EFFECTS)
def test_options_without_effect_are_refused(path: str) -> None:
    parameters = {name: p for p in COMMANDS[path].params for name in p.opts}
    required = [p.opts[0] for p in COMMANDS[path].params if p.required]

    def typed(names: set[str]) -> list[str]:
        words: list[str] = path.split()[1:]
        for name in sorted(names | set(required)):
            flag = getattr(parameters[name], "is_flag", False)
            words += ([name] if flag else [name, "1"]) if name.startswith("-") else ["1"]
        return words

    for rule in EFFECTS[path]:
        for option in rule.options:
            if rule.present and rule.other not in required:
                said = line(*typed({option}))
                assert said.startswith(f"{option}: does nothing without {rule.other}")
            elif not rule.present:
                both = {option, rule.other}
                said = line(*typed(both))
                assert "both are given; expected one of them" in said


def test_rules() -> None:
    assert not needs("--a", "--b").fault({"--a", "--b"})
    assert not needs("--a", "--b").fault({"--a"})
    assert needs("--a", "--b").fault({"--b"}).startswith("--b: does nothing without --a")
    assert not excludes("--a", "--b").fault({"--b"})
    assert excludes("--a", "--b").fault({"--a", "--b"}).startswith("--b and --a: both are given")
