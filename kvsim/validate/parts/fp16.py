"""Keys and values in the number format of the model."""

from kvsim.validate.parts.bytoken import ByToken, Codec, Plain


class Fp16(ByToken):
    """Keys and values stay as they come."""

    def codecs(self) -> tuple[Codec, Codec]:
        """They stay as they are."""
        return Plain(), Plain()
