"""Keys and values in the number format of the model."""

from kvsim.validate.parts.bytoken import Codec, PerTokenCache, Plain


class Fp16(PerTokenCache):
    """Keys and values stay as they come."""

    def codecs(self) -> tuple[Codec, Codec]:
        """They stay as they are."""
        return Plain(), Plain()
