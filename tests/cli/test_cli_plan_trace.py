"""``kvsim plan --trace`` through the command line."""

from pathlib import Path

import pytest

from tests.support.commands import replaced, run
from tests.support.envelope import answer_in

BASE = ("plan", "--model", "llama3-8b", "--gpu", "a6000", "--trace", "sample:chat")


def test_a_trace_gets_a_plan_whose_figures_are_simulated(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run(*BASE, "--ttft", "3", "--tpot", "0.1", "--rate", "0.5", "--report", str(page))
    assert done.code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= 100
    for word in ("choice", "full", "simulated", "carries", "Basis"):
        assert word in done.out
    text = page.read_text()
    assert "Plotly" in text and "Time to first token" in text
    assert "http://" not in text.split("<body>")[1].split("<script", 1)[0]


def test_the_plan_is_what_simulate_says_of_it() -> None:
    done = run(*BASE, "--json", "--rate", "2", "--ttft", "none", "--tpot", "none")
    assert done.code == 0, done.err
    answer = answer_in(done.out)
    choice, said = answer["choice"], answer["simulated"]
    again = run(
        "simulate", "--model", "llama3-8b", "--gpu", "a6000", "--trace", "sample:chat",
        "--rate", "2", "--technique", choice["technique"],
        "--max-seqs", str(choice["max_seqs"]), "--json",
    )  # fmt: skip
    simulated = answer_in(again.out)
    for key in ("ttft_s", "tpot_s", "latency_s", "goodput_per_s", "finished"):
        assert simulated[key] == said[key], key


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompt", "5"), 2, "--prompt and --trace"),
        (("--generate", "5"), 2, "--generate and --trace"),
        (("--batch", "auto"), 2, "--batch and --trace"),
        (("--rate", "nan"), 2, "--rate"),
        (("--rate", "0"), 2, "--rate"),
        (("--max-seqs", "0"), 2, "--max-seqs"),
        (("--max-tokens", "x"), 2, "--max-tokens"),
        (("--objective", "fun"), 2, "--objective"),
        (("--trace", "nowhere.csv"), 2, "nowhere.csv"),
        (("--tpot", "0.000001"), 1, "no plan meets the targets on this trace"),
        (("--report", "/nowhere/x.html"), 2, "--report"),
    ],
)
def test_bad_input_gets_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*replaced(BASE, *arguments))
    assert done.code == code
    assert len(done.err.strip().splitlines()) == 1
    assert message in done.err
    assert not done.out


@pytest.mark.parametrize("lonely", [("--per-class",), ("--rate", "2")], ids=lambda a: a[0])
def test_options_of_a_trace_need_one(lonely: tuple[str, ...]) -> None:
    done = run("plan", "--model", "llama3-8b", "--gpu", "a6000", *lonely)
    assert done.code == 2
    assert done.err.startswith(f"kvsim: {lonely[0]}: does nothing without --trace; add --trace")
    assert len(done.err.splitlines()) == 1
