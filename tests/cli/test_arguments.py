"""Times, token counts and lists as users type them."""

import shlex
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.errors import InputError
from kvsim.inputs import (
    duration,
    parse_amount,
    parse_count,
    parse_counts,
    parse_joined,
    parse_number,
    parse_per_gpu,
    parse_token_counts,
    parse_tokens,
    parse_words,
    several,
    words_among,
    zero_or,
)
from kvsim.options import SPELLINGS, TABLE, options_of, read_spellings
from tests.support.commands import line, run
from tests.support.envelope import answer_in

PREDICT = ("predict", "--model", "llama2-7b", "--gpu", "a6000", "--technique", "full")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500ms", 0.5), ("2s", 2.0), ("2", 2.0), ("0.05", 0.05), ("1e-6", 1e-6), ("3 min", 180.0),
     (" 250 us ", 2.5e-4), ("none", float("inf")), ("1e3ms", 1.0)],
)  # fmt: skip
def test_times_have_units(text: str, expected: float) -> None:
    assert duration(60)("--ttft", text, None) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["50", "1.5", "1e3"])
def test_a_bare_number_that_may_be_milliseconds_is_asked_about(text: str) -> None:
    with pytest.raises(InputError, match=f"--tpot: .*write {text}ms or {text}s"):
        duration(1)("--tpot", text, None)


@pytest.mark.parametrize("text", ["", "x", "-1s", "0ms", "1h", "1.2.3s", "nan", "inf", "1e99s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--ttft: got .* such as 500ms or 2s, or none"):
        duration(60)("--ttft", text, None)


def test_tokens_are_read_as_vllm_reads_them() -> None:
    read = [parse_tokens("--prompt", text) for text in ("4096", "4k", "4K", "1.5k", "1M")]
    assert read == [4096, 4000, 4096, 1500, 1048576]
    with pytest.raises(InputError, match="4k \\(4,000\\) or 4K \\(4,096\\)"):
        parse_tokens("--prompt", "32kb")
    with pytest.raises(InputError, match=r"1\.0001k' is 1000\.1 tokens"):
        parse_tokens("--prompt", "1.0001k")


def test_words() -> None:
    assert parse_words("--only", "full, KVPR,full") == ["full", "kvpr"]
    with pytest.raises(InputError, match="--tp: got '3'; expected one of auto, 1, 2"):
        words_among("auto", "1", "2")("--tp", "1,3", None)
    with pytest.raises(InputError, match="separated by commas"):
        parse_words("--tp", "1,,2")


@pytest.mark.parametrize(
    ("parse", "given", "expected"),
    [
        (parse_count, 8, 8), (parse_count, 8.0, 8), (parse_count, np.int64(8), 8),
        (parse_counts, range(1, 4), [1, 2, 3]), (parse_counts, 4, [4]),
        (parse_token_counts, ["4k", 2048], [4000, 2048]), (parse_number, 0.1, 0.1),
        (duration(1), 0.05, 0.05), (parse_joined, ["full", "kivi:bits=4"], "full,kivi:bits=4"),
        (parse_per_gpu, {"h100": 2.5}, {"h100": 2.5}), (parse_per_gpu, "h100=2.5", {"h100": 2.5}),
        (zero_or(parse_number), 0, 0.0), (several(parse_count), [1, "2"], [(1, 1), ("2", 2)]),
    ],
)  # fmt: skip
def test_numbers_of_python_stay_numbers(parse: Any, given: object, expected: object) -> None:
    assert parse("--x", given, None) == expected


@pytest.mark.parametrize("given", [True, None, 1.5, "x", [], {}, object(), float("nan")])
def test_what_is_no_count_is_refused_in_one_line(given: object) -> None:
    for parse in (parse_count, parse_counts):
        with pytest.raises(InputError, match=r"--x: got .*; expected .*whole number"):
            parse("--x", given)


def test_python_names_keywords_and_the_command_options() -> None:
    with pytest.raises(InputError, match=r"^batch: got 0; expected a whole number from 1 to"):
        kvsim.predict("llama2-7b", "a6000", batch=0)
    assert line(*PREDICT, "--batch", "0").startswith("--batch: got 0; expected a whole number")
    with pytest.raises(InputError, match=r"generate: ask for 5,200 rows together; expected at"):
        kvsim.predict(
            "llama2-7b",
            "a6000",
            ["full", "kivi"],
            batch=range(1, 27),
            prompt=range(1, 51),
            generate=[1, 2],
        )
    with pytest.raises(InputError, match=r"^per_class: has no effect without trace; add trace"):
        kvsim.plan("llama2-7b", "a6000", per_class=True)


def test_the_line_of_a_call_is_quoted_and_gives_the_same() -> None:
    found = kvsim.predict("llama2-7b", "a6000", "offload + kivi", batch=[1, 8])
    words = shlex.split(found.command)
    assert words[words.index("--technique") + 1] == "offload + kivi"
    assert answer_in(run(*words[1:], "--json").out)["rows"] == found.envelope()["rows"]


@pytest.mark.parametrize("command", sorted({c for option in TABLE for c in option.commands}))
def test_defaults_are_values_that_their_options_can_have(command: str) -> None:
    for option in options_of(command).values():
        if option.default is not None:
            option.value(option.default)
        for other in (
            *option.needs.get(command, "").split(),
            *option.excludes.get(command, "").split(),
        ):
            assert other in options_of(command), (option.name, other)


SPELLED = [
    ("plan", "--gpu l40s --gpus 2", "--gpu l40s --total-gpus 2"),
    ("plan", "--gpu 2x4090", "--gpu 4090 --total-gpus 2"),
    ("plan", "--gpu 1x4090", "--gpu 4090"),
    ("capacity", "--gpu 1x4090", "--gpu 4090 --max-gpus 1"),
    ("plan", "--gpu=h100x8", "--gpu h100 --total-gpus 8"),
    ("plan", "--gpus h100,l40s --tp 2", "--gpus h100,l40s --tp 2"),
    ("plan", "--gpu gtx1070 --max-num-seqs=64", "--gpu gtx1070 --max-seqs 64"),
    ("predict", "--gpu rx9070xt -ngl 20", "--gpu rx9070xt --n-gpu-layers 20"),
    ("predict", "--num-gpus 4 --isl 1k", "--tp 4 --prompt 1k"),
    ("simulate", "--qps 3 --tensor-parallel-size 2", "--rate 3 --tp 2"),
    ("capacity", "--gpu h100 --gpus 8", "--gpu h100 --max-gpus 8"),
    ("models", "--qps 3", "--qps 3"),
    ("predict", "--engine ollama", "--stack ollama"),
    ("plan", "--engine ollama", "--engine ollama"),
]


@pytest.mark.parametrize(("command", "typed", "meant"), SPELLED)
def test_options_may_have_the_names_of_engines(command: str, typed: str, meant: str) -> None:
    assert read_spellings(command, typed.split()) == meant.split()


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ("--gpu 2xl40s", "2"),
        ("--gpu l40s --gpus 4 --tpot 50ms", "4"),
        ("--gpu l40s --tp 2", ""),
        ("--gpu l40s --tensor-parallel-size=2", ""),
        ("--gpu 2xl40s --tp 2", ""),
        ("--gpu l40s", ""),
    ],
)
def test_gpus_that_share_one_model_are_announced_unless_tp_is_typed(typed: str, count: str) -> None:
    said = run("simulate", *typed.split(), "--model", "no-such").err
    assert (
        f"--tp {count}); kvsim plan --total-gpus {count} compares" in said
        if count
        else ("share one copy" not in said)
    )


@pytest.mark.parametrize("meant", sorted(set(SPELLINGS.values())))
def test_the_names_of_engines_stand_for_options(meant: str) -> None:
    known = {flag for o in TABLE for flag in (o.flag, *o.also)}
    assert meant in known


@pytest.mark.parametrize("text", ["1000000", "1e6", "1M", "1000k", " 1.0 m ", 1_000_000])
def test_large_numbers_may_be_short(text: str) -> None:
    assert parse_amount("--jobs", text, None) == 1_000_000


@pytest.mark.parametrize("text", ["", "x", "1.5", "-1M", "1e-3", "inf", "1g"])
def test_what_is_no_large_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--jobs: got .*whole number, such as 1000000, 1e6 or 1M"):
        parse_amount("--jobs", text, None)


def test_several_values_of_an_option_of_one_name_the_command_that_compares_them() -> None:
    assert line(*PREDICT, "--tp", "1,2").endswith("kvsim plan --tp 1,2 compares them")
