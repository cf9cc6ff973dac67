"""Keys and values in the number format of the model."""

from kvsim.validate.impl.bytoken import ByToken, Codec, Plain


class Fp16(ByToken):
    """Nothing is packed."""

    def codecs(self) -> tuple[Codec, Codec]:
        """As they are."""
        return Plain(), Plain()
