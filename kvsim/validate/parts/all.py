"""Every token is kept and read."""

from kvsim.validate.parts.selecting import LayerCache


class All(LayerCache):
    """What selections do if they do nothing."""

    replays = True
