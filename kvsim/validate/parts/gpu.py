"""Everything on the GPU."""

from kvsim.validate.parts.placing import CachePlacement


class Gpu(CachePlacement):
    """What placements do if they do nothing."""
