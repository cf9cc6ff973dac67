"""PyramidKV: each layer runs as SnapKV with its own budget."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Budgets from three eighths of the prompt down to an eighth."""
    return [f"budget={4 * max(2, run.prompt // 16)},window=4,beta=2"]
