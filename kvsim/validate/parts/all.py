"""Every token is kept and read."""

from kvsim.validate.parts.selecting import Selecting


class All(Selecting):
    """What selections do if they do nothing."""

    replays = True
