"""SpeCache: runs as its parts, exact pairs beside a cache that is packed late."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """A quarter of the pairs is fetched."""
    return [f"group={run.group},residual={run.group},k={max(1, run.prompt // 4)}"]
