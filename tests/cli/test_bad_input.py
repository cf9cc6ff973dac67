"""Whatever is wrong with what a user gives, one line says what, where, and what was expected."""

from unittest.mock import patch

import pytest

from kvsim.errors import InputError
from tests.support.commands import BAD, check, line, replaced

PREDICT, PLAN = "predict", "plan"
IMPOSSIBLE = 1


def refused(command: str, *options: str, code: int = BAD) -> str:
    """The one line that a command ends with; options replace the good ones of their name."""
    good: tuple[str, ...] = (command, "--model", "smollm2-135m", "--gpu", "t4")
    good += ("--technique", "full") if command == PREDICT else ()
    return line(*replaced(good, *options), code=code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("pln", "pln|plan|kvsim --help"),
        ("--version=3", "--version|kvsim --help"),
        ("--json", "--json"),
        ("predict", "missing option|--model|kvsim predict --help"),
        ("predict --model", "--model|requires an argument"),
        ("predict --model llama2-7b", "missing option|--gpu"),
        ("plan --gpu a6000", "missing option|--model|kvsim plan --help"),
        ("plan --modle llama2-7b", "--modle|--model"),
        ("plan --model llama2-7b --gpu a6000 now", "now"),
        ("plan --model llama2-7b --gpu a6000 --json=yes", "--json"),
        ("gpus --csv", "--csv"),
        ("plan --fo\no", "--fo"),
        ("plan\x1b[31m", "plan"),
    ],
)
def test_usage(arguments: str, words: str) -> None:
    check(line(*arguments.split(" ")), words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("model", "lama2-7b", "'lama2-7b'|llama2-7b"),
        ("model", "", "--model|got ''|omit"),
        ("model", "x" * 5000, "xxx...xxx|File name too long|config.json"),
        ("model", "a\nb", r"'a\nb'|config.json"),
        ("model", "no/such/place", "no/such/place|no such file"),
        ("model", "\udcff", r"\udcff|config.json"),
        ("model", "../../etc/passwd\0", "file"),
        ("gpu", "a6001", "'a6001'|a6000|.toml"),
        ("gpu", "", "--gpu|got ''"),
        ("gpu", "no/such.toml", "no/such.toml|No such file"),
        ("gpu", "/" + "y" * 300, "too long"),
        ("stack", "fusd", "'fusd'|fused|.toml"),
        ("stack", "", "--stack|got ''"),
        ("stack", "H" * 3000, "unknown engine or stack|.toml"),
        ("technique", "kvrp", "'kvrp'|kvpr|kvsim techniques"),
        ("technique", "", "--technique|got ''"),
        ("technique", ":bits=4", "unknown technique ''"),
        ("weights", "int3", "'int3'|int8|int4"),
        ("weights", "", "--weights|got ''"),
    ],
)
def test_unknown_names(option: str, value: str, words: str) -> None:
    check(refused(PREDICT, f"--{option}", value), words)


def test_any_message_becomes_one_line() -> None:
    message = "a\nb\x1b[1m" + "c" * 5000
    with patch("kvsim.api.deployments.load_model", side_effect=InputError(message)):
        assert refused(PREDICT).startswith(r"a b\x1b[1mccc")


COUNTS = [
    ("0", "from 1 to"),
    ("-1", "-1|from 1 to"),
    ("1000000000000", "1000000000000|from 1 to"),
    ("9" * 4000, "999|whole number"),
    ("1.5", "'1.5'|whole number"),
    ("1e3", "'1e3'|whole number"),
    ("nan", "'nan'|whole number"),
    ("inf", "'inf'|whole number"),
    ("1,,2", "'1,,2'|whole number"),
    ("٣", "whole number"),
    ("1_000", "'1_000'|whole number"),
    ("0x10", "'0x10'|whole number"),
]


@pytest.mark.parametrize(("value", "words"), COUNTS, ids=[value[:9] for value, _ in COUNTS])
def test_counts(value: str, words: str) -> None:
    check(refused(PREDICT, "--batch", value), f"--batch|{words}")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("batch", "whole number"), ("prompt", "whole number"), ("generate", "whole number"),
        ("ttft", "unit"), ("tpot", "unit"), ("gpu-memory", "expected a number"),
        ("host-memory", "expected a number"), ("max-loss", "from 0 to 1"),
        ("acceptance", "the share of drafts"),
    ],
)  # fmt: skip
def test_odd_numbers(option: str, words: str) -> None:
    """Every other numeric option with every other odd number: tests/robust/cases.py."""
    for value in ("-1", "nan", "1_0x"):
        check(refused(PLAN, f"--{option}", value), f"--{option}|{words}")


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (PREDICT, "--tp 3", "--tp|3|1, 2, 4, 8, 16 or 32"),
        (PREDICT, "--tp two", "--tp|'two'|whole number"),
        (PREDICT, "--tp 0", "--tp|0"),
        (PREDICT, "--tp 2", "smollm2-135m|9 heads|--tp 2|divide"),
        (PREDICT, "--json --csv", "--json|--csv|both"),
        (PLAN, "--offline --trace sample:chat", "--offline|--trace|both"),
        (PLAN, "--only full --without full", "--only|leave no technique"),
        (PLAN, "--engine vlm", "engine|vllm"),
        (PLAN, "--objective speed", "--objective|'speed'|throughput, latency, cost"),
        (PLAN, "--objective cost --gpu kcache-64g", "cost|kcache-64g|price"),
        (PLAN, "--gpu-memory 900", "--gpu-memory|900|GiB of t4"),
        (PLAN, "--batch 1,2", "--batch|'1,2'|one whole number|auto"),
        (PREDICT, "--technique fp8", "fp8|t4"),
        (PREDICT, "--technique kcache --model deepseek-v2-lite", "kcache|MLA"),
    ],
)
def test_what_does_not_go_together(command: str, options: str, words: str) -> None:
    check(refused(command, *options.split()), words)


@pytest.mark.parametrize("option", ["batch", "ttft", "gpu-memory", "max-loss", "report"])
def test_empty_values_are_none(option: str) -> None:
    check(refused(PLAN, f"--{option}", ""), f"--{option}: got ''; expected a value, or omit")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tpot 1e-6", "TPOT p90 would|target of 0.001 ms"),
        ("--ttft 1e-6", "TTFT p90 would|target of 0.001 ms"),
        ("--gpu-memory 0.01", "weights of smollm2-135m need 0.25 GiB per GPU, and 0.01 GiB"),
        ("--model llama2-70b --host-memory 0.5 --only full", "weights of llama2-70b need 128 GiB"),
        ("--tpot 1e-6 --lossy --acceptance 1", "TPOT p90 would"),
    ],
)
def test_impossible_limits(options: str, words: str) -> None:
    check(refused(PLAN, *options.split(), code=IMPOSSIBLE), f"no plan meets the targets|{words}")
