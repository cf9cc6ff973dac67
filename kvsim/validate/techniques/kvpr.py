"""KVPR: runs as its parts, a cache in host memory of which some is recomputed."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Half of the prompt is recomputed."""
    return [f"split={run.prompt // 2}"]
