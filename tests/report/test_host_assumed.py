"""Every answer that rests on the host says what is assumed of it, and JSON too."""

from html import unescape
from pathlib import Path

import pytest

from kvsim.planner import alternatives, question
from kvsim.planner.question import Admission
from tests.support.commands import run
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
    for more in ((), ("--json",)):
        found = run(*command, technique, *more)
        assert found.code == 0, found.err
        said = " ".join(found.out.split())
        assert (SAID in said) is (technique == "offload"), more
        if more:
            answer_in(found.out)


SWEEPS = {
    "predict": 'technique = ["{technique}"]\nbatch = [4, 8]\ncontext = [2000]',
    "simulate": 'technique = ["{technique}"]\ntrace = ["{trace}"]',
    "capacity": 'trace = ["{trace}"]\nttft_target_s = [1000]\ntpot_target_s = [20]',
}


@pytest.mark.parametrize("technique", ["offload", "full"])
@pytest.mark.parametrize("kind", SWEEPS)
def test_the_page_of_a_sweep_names_it(
    kind: str, technique: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = Admission(only=(technique,))  # where a fleet is free to choose
    monkeypatch.setattr(question, "Admission", lambda: only)
    monkeypatch.setattr(alternatives, "GPUS_PER_REPLICA", (1, 2))
    spec, page = tmp_path / "grid.toml", tmp_path / "F.html"
    grid = SWEEPS[kind].format(technique=technique, trace=trace)
    spec.write_text(
        f'kind = "{kind}"\n[grid]\nmodel = ["phi-3-mini-128k"]\ngpu = ["a6000"]\n{grid}\n'
    )
    done = run("sweep", str(spec), "--out", str(tmp_path / "out"), "--report", str(page))
    assert done.code == 0, done.err
    assert (SAID in unescape(page.read_text(encoding="utf-8"))) is (technique == "offload")
