"""Everything on the GPU."""

from kvsim.validate.parts.placing import Placing


class Gpu(Placing):
    """What placements do if they do nothing."""
