"""Every answer that rests on the host says what is assumed of it, and JSON too."""

import json

import pytest

from tests.support.commands import run_and_keep
from tests.support.envelope import answer_in

SAID = "host memory size of a6000"
ON = ("--model", "phi-3-mini-128k")
AT = ("--batch", "8", "--prompt", "2000", "--generate", "100")
ROWS = ("0,100000,40", "2000,100001,40", "4000,100002,40")  # none without the host's memory
TRACE = "\n".join(("arrival_s,prompt_tokens,generate_tokens", *ROWS, ""))
COMMANDS = {
    "predict": ("predict", *ON, "--gpu", "a6000", *AT, "--technique"),
    "plan --offline": ("plan", *ON, "--gpu", "a6000", "--offline", *AT, "--only"),
    "plan": (
        "plan", *ON, "--gpu", "a6000", *AT[2:], "--ttft", "100s", "--tpot", "2s", "--only",
    ),
    "plan --trace": (
        "plan", *ON, "--gpu", "a6000", "--trace", "FILE", "--ttft", "1000s", "--tpot", "20s",
        "--only",
    ),
    "simulate": ("simulate", *ON, "--gpu", "a6000", "--trace", "FILE", "--technique"),
    "capacity": (
        "capacity", *ON, "--gpus", "a6000", "--tp", "1", "--trace", "FILE", "--ttft", "1000s",
        "--tpot", "20s", "--only",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("trace") / "few.csv"
    place.write_text(TRACE)
    return str(place)


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        *((name, "offload") for name in COMMANDS),
        *((name, "full") for name in ("predict", "simulate")),
    ],
)
def test_the_host_is_named_where_an_answer_rests_on_it(
    name: str, technique: str, trace: str
) -> None:
    command = [trace if word == "FILE" else word for word in COMMANDS[name]]
    ended, found = run_and_keep(*command, technique)
    assert ended.code == 0, ended.err
    written = json.dumps(found.envelope())
    for said in (" ".join(ended.out.split()), written):
        assert (SAID in said) is (technique == "offload")
    answer_in(written)
