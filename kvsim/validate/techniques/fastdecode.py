"""FastDecode: runs as its parts, attention on the CPU, the parts of the batch in alternation."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """The batch in one part, and a part per sequence."""
    return ["parts=1", f"parts={run.batch}"] if run.batch > 1 else ["parts=1"]
