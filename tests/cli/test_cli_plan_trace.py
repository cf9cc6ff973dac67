"""``kvsim plan --trace`` through the command line."""

from pathlib import Path

from tests.support.commands import line, run
from tests.support.envelope import answer_in

BASE = ("plan", "--model", "llama3-8b", "--gpu", "a6000", "--trace", "sample:chat")


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


def test_many_requests_beyond_the_context_are_told_in_a_sentence() -> None:
    result = run("plan", "--model", "llama3.1-8b", "--gpu", "h100", "--trace", "sample:code",
                 "--max-model-len", "2048")  # fmt: skip
    told = " ".join(result.out.split())
    assert "requests are longer than the 2,048 tokens that llama3.1-8b accepts and are left" in told


def test_few_requests_without_a_target_for_the_first_token_have_a_plan(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    where = ("plan", "--model", "smollm2-135m", "--gpu", "t4", "--trace", str(trace))
    trace.write_text("arrival_s,prompt_tokens,generate_tokens\n0,10,5\n1,200,9\n")
    assert run(*where, "--ttft", "none").code == 0
    trace.write_text("when,foo,bar\n0,10,5\n")
    assert "this command has none of these options: use kvsim traces convert" in line(*where)
