"""KCache: runs as its parts, top values from the host."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """A quarter of the values is fetched."""
    return [f"n={max(1, run.prompt // 4)}"]
