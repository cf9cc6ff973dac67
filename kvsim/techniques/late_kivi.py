"""SpeCache's storage: KIVI's layout, filled once a step has attended."""

from kvsim.engine.formats import Format, kivi
from kvsim.frozen import frozen
from kvsim.techniques.axes import Storage
from kvsim.techniques.settings import param


@frozen
class LateKivi(Storage):
    """KIVI's layout, packed after attention so that a step's own tokens are attended to in fp16.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, algorithms 1 to 3.
    """

    name = "late-kivi"
    preset = False

    bits: float = param(2, "bits per cached number", choices=(1, 2, 4, 8))
    group: int = param(64, "numbers that share a scale", low=8, high=1024)
    residual: int = param(64, "latest tokens kept in fp16", high=1e6)

    @property
    def stored(self) -> Format:
        """Packed groups and an fp16 residual."""
        return kivi(self.bits, self.group, self.residual, late=True)

    @property
    def by_token(self) -> bool:
        """Keys of a group of tokens share their scales."""
        return False
