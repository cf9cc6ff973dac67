"""Everything on the GPU."""

from kvsim.validate.impl.placing import Placing


class Gpu(Placing):
    """What placements do if they do nothing."""
