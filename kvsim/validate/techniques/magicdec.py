"""MagicDec: runs as its parts, drafts over a small cache of their own."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Two drafts over half of the prompt."""
    return [f"budget={2 * max(1, run.prompt // 4)},gamma=2"]
