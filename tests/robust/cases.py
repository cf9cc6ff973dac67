"""The table of cases: what is given to which command, and how that must end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Made = bytes | Callable[[Path], None]
"""A file of a case: its content, or what makes it at its path."""

REFUSED = 2
MODEL = ("--model", "smollm2-135m")
WHERE = (*MODEL, "--gpu", "t4")
TRACE = "arrival_s,prompt_tokens,generate_tokens\n0,10,5\n1,20,5\n2,30,4\n"


@dataclass(frozen=True)
class Case:
    """One command and how it must end.

    Attributes
    ----------
    name
        What is odd about it.
    arguments
        The command line.
    code
        Its exit code, or several that are right.
    words
        Patterns, any of which the last line on standard error must match.
    files
        Files that are there, by name in the folder where it runs.
    kept
        Files that must be as they were afterwards.
    environment, limits
        Variables and resource limits of the child.
    """

    name: str
    arguments: tuple[str, ...]
    code: int | tuple[int, ...] = REFUSED
    words: tuple[str, ...] = ()
    files: dict[str, Made] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    large: bool = False  # the case is about size, so that its own bounds are not checked


NUMBERS = (
    "0", "-1", "1e308", "1e400", "nan", "inf", "-inf", "", "x", "1.5.2", "1_0", "٣", "0x10",
    "9" * 400, "1e-320", "1;2", " ",
)  # fmt: skip
TYPED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "predict": (("predict", *WHERE, "--technique", "full"), (
        "--batch", "--prompt", "--generate", "--tp", "--host-memory")),
    "plan": (("plan", *WHERE), (
        "--prompt", "--generate", "--batch", "--max-loss", "--ttft", "--tpot", "--gpu-memory",
        "--host-memory", "--tp", "--acceptance")),
    "simulate": (("simulate", *WHERE, "--trace", "sample:chat"), (
        "--replicas", "--rate", "--max-seqs", "--max-tokens", "--block-tokens", "--blocks",
        "--host-cache", "--ttft", "--tpot", "--tp", "--gpu-memory", "--chars-per-token")),
    "capacity": (("capacity", *MODEL, "--gpus", "t4", "--ttft", "2s", "--tpot", "1s", "--trace",
                  "sample:chat"), (
        "--percentile", "--headroom", "--failures", "--windows", "--configurations", "--max-gpus",
        "--max-host", "--gpu-memory-utilization", "--spread")),
    "validate": (("validate", "--techniques", "full"), (
        "--layers", "--batch", "--prompt", "--generate", "--max-error")),
    "traces generate": (("traces", "generate", "out.csv"), ("--requests", "--rate", "--seed")),
}  # fmt: skip
SOUND = {
    ("--blocks", "0"), ("--layers", "0"), ("--seed", "0"), ("--max-loss", "0"), ("--failures", "0"),
    ("--headroom", "0"), ("--acceptance", "0"), ("--max-loss", "1e-320"),
    ("--acceptance", "1e-320"), ("--headroom", "1e-320"),
}  # fmt: skip
"""What only looks odd."""


def numbers() -> Iterator[Case]:
    """Every numeric option with everything that is no such number."""
    for slot, (pattern, options) in TYPED.items():
        for option in options:
            for value in NUMBERS:
                rest: tuple[str, ...] = (option, value)
                if slot == "traces generate":
                    others = {"--rate": "1", "--requests": "3"}
                    more = {k: v for k, v in others.items() if k != option}
                    rest += tuple(word for pair in more.items() for word in pair)
                if (option, value) in SOUND:
                    continue
                words = ("expected", "unit", "not there", "needs", "is not")
                name = f"{slot} {option} {value[:12]!r}"
                yield Case(name, (*pattern, *rest), REFUSED, words)


def stacks() -> Iterator[Case]:
    """Stacks that extend each other."""
    for name, count, last in (("a chain of 3,000", 3000, 3000), ("a circle", 2, 0)):
        files: dict[str, Made] = {
            f"s{i}.toml": (
                'title = "t"\nbasis = "datasheet"\nerror = ""\n'
                f'extends = "./s{i + 1 if i + 1 < count else last}.toml"\n'
            ).encode()
            for i in range(count)
        }
        arguments = ("predict", *WHERE, "--technique", "full", "--stack", "./s0.toml")
        yield Case(f"stacks: {name}", arguments, REFUSED, ("extends",), files)
