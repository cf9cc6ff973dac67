"""What `kvsim predict` says where the host's work for requests is the longest part."""

from tests.support.commands import run

SHORT = ("predict", "--technique", "full", "--model", "llama3.1-8b", "--gpu", "h100", "--tp", "8",
         "--prompt", "512", "--generate", "1")  # fmt: skip


def test_a_pass_that_waits_for_the_server_says_so() -> None:
    told = run(*SHORT, "--batch", "8", "--stack", "trtllm")
    assert told.code == 0, told.err
    assert "host work for requests" in told.out and "sending text" in told.out
    assert "host work for requests" not in run(*SHORT, "--batch", "8", "--stack", "fused").out
