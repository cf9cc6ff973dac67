"""Shares of weights and cache in host memory, by columns."""

from kvsim.validate.impl.base import SmallRun
from kvsim.validate.impl.hostcache import HostCache


class Flexgen(HostCache):
    """Streamed shares of matrices beside those of the cache; a part of the batch at a time.

    References
    ----------
    .. [1] Y. Sheng et al., "FlexGen", ICML 2023, sections 4.2 and 4.4.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """Everything on the host, and a half of weights and cache.

        Whole heads stay on the GPU; those of a whole batch can be halved more often than those of
        its parts.
        """
        return [f"parts={run.batch}", "weights_gpu=50,cache_gpu=50,parts=1"]
