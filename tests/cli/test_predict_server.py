"""Batches of `kvsim predict` run without a server, whose work for requests is not in them."""

from tests.support.commands import run

SHORT = ("predict", "--technique", "full", "--model", "llama3.1-8b", "--gpu", "h100", "--tp", "8",
         "--prompt", "512", "--generate", "1")  # fmt: skip


def test_a_batch_does_not_wait_for_a_server() -> None:
    for stack in ("trtllm", "fused"):
        told = run(*SHORT, "--batch", "8", "--stack", stack)
        assert told.code == 0, told.err
        assert "Limit:" in told.out and "host work for requests" not in told.out
