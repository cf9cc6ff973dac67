"""FastDecode: runs as its parts, attention on the CPU."""

from kvsim.validate.impl.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """The batch in one part."""
    return ["parts=1"]
