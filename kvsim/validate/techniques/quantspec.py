"""QuantSpec: runs as its parts, a hierarchical cache whose upper halves drafts read."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Two drafts, and groups that fit the head."""
    return [f"gamma=2,group={run.group},residual={2 * run.group},weight_bits={run.weight_bits}"]
