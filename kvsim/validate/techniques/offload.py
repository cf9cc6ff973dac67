"""Offloading: runs as its parts, a cache or a share of it in host memory."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """By rows, and by columns with a part per sequence."""
    return ["", f"schedule=column,parts={run.batch}"]
