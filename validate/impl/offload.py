"""A cache in host memory, or a share of it, by rows or by columns."""

from kvsim.validate.impl.base import SmallRun
from kvsim.validate.impl.hostcache import HostCache


class Offload(HostCache):
    """Offloading with prefetch; all that it does is shared."""

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """By rows, and by columns with a part per sequence."""
        return ["", f"schedule=column,parts={run.batch}"]
