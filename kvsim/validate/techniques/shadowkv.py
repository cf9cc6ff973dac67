"""ShadowKV: runs as its parts, landmarks over keys of low rank with values on the host."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Half of the prompt in chunks of 4, one of them an outlier, and keys of rank 8."""
    return [f"budget={4 * max(1, run.prompt // 8)},chunk=4,outliers=1,rank=8"]
