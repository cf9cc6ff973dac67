"""Whatever is wrong with what a user gives, one line says what, where, and what was expected."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvsim.cli import app as cli
from kvsim.errors import InputError
from kvsim.models.catalogue import catalogue_config
from tests.support.commands import BAD, check, line, replaced

SHIPPED = Path(cli.__file__).parents[1]
CONFIG: dict[str, Any] = dict(catalogue_config("smollm2-135m"))
PROFILE = (SHIPPED / "hwprofiles" / "t4.toml").read_text()
STACK = (SHIPPED / "hwprofiles" / "stacks" / "fused.toml").read_text()
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
        ("stack", "H" * 3000, "unknown stack|.toml"),
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
    with patch("kvsim.models.configs.load_model", side_effect=InputError(message)):
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


@pytest.mark.parametrize("option", ["batch", "prompt", "generate"])
@pytest.mark.parametrize(("value", "words"), COUNTS, ids=[value[:9] for value, _ in COUNTS])
def test_counts(option: str, value: str, words: str) -> None:
    check(refused(PREDICT, f"--{option}", value), f"--{option}|{words}")
    check(refused(PLAN, f"--{option}", value), f"--{option}|whole number")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "x", "1_0", "٣", "1,2"])
@pytest.mark.parametrize("option", ["ttft", "tpot", "gpu-memory", "host-memory"])
def test_limits(option: str, value: str) -> None:
    expected = "expected a number" if option.endswith("memory") else "unit"
    check(refused(PLAN, f"--{option}", value), f"--{option}|got {value!r}|{expected}")


@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan", "half"])
@pytest.mark.parametrize("option", ["max-loss", "acceptance"])
def test_shares(option: str, value: str) -> None:
    expected = "from 0 to 1" if option == "max-loss" else "the share of drafts"
    check(refused(PLAN, f"--{option}", value), f"--{option}|got {value!r}|{expected}")


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("full:bits=4", "full|bits"),
        ("kivi:bits=3", "kivi|bits=3|1, 2, 4, 8, 16"),
        ("kivi:bit=2", "'bit'|bits"),
        ("kivi:bits", "'bits'|key=value"),
        ("kivi:bits=", "'bits='|key=value"),
        ("kivi:=2", "parameter"),
        ("kivi:bits=2,bits=4", "bits|twice"),
        ("kivi:residual=-1", "residual=-1|from 0"),
        ("kivi:group=two", "group='two'|number"),
        ("kcache:n=0", "n=0|from 1"),
        ("kcache:n=1e12", "n=1000000000000|1e+07"),
        ("specache:k=nan", "k=nan|whole number"),
        ("specache:k=inf", "k=inf|whole number"),
        ("specache:speculative=maybe", "speculative='maybe'|True, False"),
        ("quantspec:gamma=2.5", "gamma=2.5|whole number"),
        ("quantspec:acceptance=1.2", "acceptance=1.2|0 to 1"),
        ("kvpr:split=-1", "split=-1|from 0"),
        ("kvpr:schedule=diagonal", "'diagonal'|row, column"),
        ("offload:host_share=2", "host_share=2|from 0 to 1"),
        ("zipcache:salient=-0.5", "salient=-0.5|from 0 to 1"),
        ("flexgen:weights_gpu=101", "weights_gpu=101|from 0 to 100"),
    ],
)
def test_settings_of_techniques(text: str, words: str) -> None:
    check(refused(PREDICT, "--technique", text), words)


BROKEN = [
    ("empty", b"", "not valid JSON"),
    ("not JSON", b"hidden_size = 4", "not valid JSON in line 1"),
    ("cut", json.dumps(CONFIG).encode()[:100], "not valid JSON"),
    ("list", b"[1, 2]", "list|object"),
    ("bytes", b"\xff\xfe\x00", "byte 0|not UTF-8"),
    ("deep", b"[" * 100_000, "nested too deeply"),
]
FIELDS = [
    ("hidden_size", None, "hidden_size"),
    ("hidden_size", 0, "hidden_size|0"),
    ("hidden_size", -576, "hidden_size|-576"),
    ("hidden_size", 10**30, "hidden_size"),
    ("hidden_size", 576.5, "hidden_size|576.5"),
    ("hidden_size", "576", "hidden_size|'576'"),
    ("hidden_size", float("nan"), "hidden_size|nan"),
    ("num_hidden_layers", 10**12, "num_hidden_layers"),
    ("num_attention_heads", 7, "7|expected"),
    ("num_key_value_heads", 4, "num_attention_heads|4"),
    ("vocab_size", True, "vocab_size"),
    ("model_type", 5, "model_type|5"),
    ("model_type", None, "model_type|missing"),
    ("tie_word_embeddings", "yes", "tie_word_embeddings|true or false"),
]


@pytest.mark.parametrize(("content", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_configurations(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    check(refused(PREDICT, "--model", str(file)), f"config.json|{words}")


@pytest.mark.parametrize(("field", "value", "words"), FIELDS)
def test_impossible_fields(field: str, value: object, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    changed = {k: v for k, v in CONFIG.items() if k not in (field, "head_dim")}
    file.write_text(json.dumps(changed if value is None else changed | {field: value}))
    check(refused(PLAN, "--model", str(tmp_path)), f"{tmp_path.name}|{words}")


@pytest.mark.parametrize("option", ["gpu", "stack"])
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("title", "titel", "titel|title"),
        ('title = "', "title = ", "not valid TOML"),
        ("basis", "[basis", "not valid TOML"),
        ("=", "", "not valid TOML"),
        ("[source]", "[sources]", "sources"),
        ("_s = ", "_s = -1 #", "expected a number"),
        ("_s = ", "_s = nan #", "expected a number"),
        ("_s = ", "_s = 'x' #", "expected a number"),
    ],
)
def test_broken_profiles(option: str, before: str, after: str, words: str, tmp_path: Path) -> None:
    good = PROFILE if option == "gpu" else STACK
    assert before in good
    file = tmp_path / "mine.toml"
    file.write_text(good.replace(before, after, 1))
    check(refused(PREDICT, f"--{option}", str(file)), f"mine.toml|{words}")


@pytest.mark.parametrize("option", ["model", "gpu", "stack"])
def test_files_that_cannot_be_read(option: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").mkdir()
    (tmp_path / "b.toml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.toml").symlink_to(tmp_path / "c.toml")
    os.mkfifo(tmp_path / "d.toml")
    (tmp_path / "e.toml").write_bytes(b"\xff\xfe")
    with (tmp_path / "f.toml").open("wb") as huge:
        huge.truncate(10**12)
    (tmp_path / "g.toml").write_text("")
    (tmp_path / "h.toml").write_text("closed to us")
    (tmp_path / "h.toml").chmod(0)  # the text is refused even where permissions do not bind
    for file in tmp_path.iterdir():
        assert file.name in refused(PREDICT, f"--{option}", str(file))


@pytest.mark.parametrize("size", [1, 300, len(PROFILE) // 2, len(PROFILE) - 2])
def test_truncated_profiles(size: int, tmp_path: Path) -> None:
    file = tmp_path / "cut.toml"
    file.write_text(PROFILE[:size])
    check(refused(PREDICT, "--gpu", str(file)), "cut.toml")


@pytest.mark.parametrize("option", ["batch", "ttft", "gpu-memory", "max-loss", "report"])
def test_empty_values_are_none(option: str) -> None:
    check(refused(PLAN, f"--{option}", ""), f"--{option}: got ''; expected a value, or omit")


@pytest.mark.parametrize("name", ["/", ".", "no/such/page.html", "z" * 300, "a\0b", "a\nb"])
def test_reports_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    place = str(tmp_path / name) if name != "/" else name
    check(refused(PLAN, "--report", place), "--report|existing, writable folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tpot 1e-6", "TPOT p90 would|target of 0.001ms"),
        ("--ttft 1e-6", "TTFT p90 would|target of 0.001ms"),
        ("--gpu-memory 0.01", "weights of smollm2-135m need 0.25 GiB per GPU, and 0.01 GiB"),
        ("--model llama2-70b --host-memory 0.5", "weights of llama2-70b need 128 GiB"),
        ("--tpot 1e-6 --lossy --acceptance 1", "TPOT p90 would"),
    ],
)
def test_impossible_limits(options: str, words: str) -> None:
    check(refused(PLAN, *options.split(), code=IMPOSSIBLE), f"no plan meets the targets|{words}")
