"""FlexGen: runs as its parts, shares of weights and cache in host memory, by columns."""

from kvsim.validate.parts.base import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Everything on the host, and a half of weights and cache.

    Whole heads stay on the GPU; those of a whole batch can be halved more often than those of
    its parts.
    """
    return [f"parts={run.batch}", "weights_gpu=50,cache_gpu=50,parts=1"]
