"""``kvsim plan --trace`` through the command line."""

from pathlib import Path

import pytest

from tests.support.commands import replaced, run
from tests.support.envelope import answer_in

BASE = ("plan", "--model", "llama3-8b", "--gpu", "a6000", "--trace", "sample:chat")


def test_a_trace_gets_a_plan_and_the_replicas_that_carry_it(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = run(*BASE, "--ttft", "3s", "--tpot", "100ms", "--rate", "4x", "--report", str(page))
    assert done.code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= 100
    assert "replicas serve the trace" in " ".join(done.out.split())
    assert "Plotly" in page.read_text()


def test_the_replicas_are_the_fewest_that_simulate_finds() -> None:
    asked = (*BASE, "--ttft", "3s", "--tpot", "100ms", "--rate", "4x", "--sure", "0.5")
    answer = answer_in(run(*asked, "--json").out)
    count, choice = answer["load"]["trace_replicas"], answer["choice"]
    shares = [
        answer_in(run(
            "simulate", *BASE[1:], "--rate", "4x",
            "--technique", choice["technique"],
            "--max-tokens", str(choice["max_tokens"]), "--replicas", str(n), "--route",
            "least-loaded", "--ttft", "3s", "--tpot", "100ms", "--json",
        ).out)["good_share"]
        for n in (count - 1, count)
    ]  # fmt: skip
    assert shares[0] < 0.9 <= shares[1]


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
        (("--tpot", "0.000001"), 1, "no plan meets the targets"),
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
    assert done.err.startswith(f"kvsim: {lonely[0]}: has no effect without --trace; add --trace")
    assert len(done.err.splitlines()) == 1
