"""Every token is kept and read."""

from kvsim.validate.impl.selecting import Selecting


class All(Selecting):
    """What selections do if they do nothing."""

    replays = True
