"""A cache in host memory, or a share of it, by rows or by columns."""

from kvsim.validate.impl.hostcache import HostCache


class Offload(HostCache):
    """Offloading with prefetch; all that it does is shared."""
