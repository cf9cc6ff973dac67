"""How far timed work is, and how long it still takes by what it took so far on this machine."""

from time import monotonic

SOON = 90  # longer is told in minutes [s]


class Progress:
    """How far timed work is.

    Parameters
    ----------
    total : parts, or the sizes of all of them together in any unit.
    """

    def __init__(self, total: float) -> None:
        self.total, self.done = total, 0.0
        self.begin = monotonic()

    @property
    def left(self) -> float:
        """What is still to be done, in the unit of the total."""
        return max(self.total - self.done, 0.0)

    @property
    def remaining(self) -> str:
        """About how long the rest will take, in words; empty until a part is done."""
        if not self.done or not self.left:
            return ""
        seconds = (monotonic() - self.begin) / self.done * self.left
        return f", about {seconds:.0f} s" if seconds < SOON else f", about {seconds / 60:.0f} min"

    def line(self, what: str) -> str:
        """Name the part that is next, where each counts one.

        Returns
        -------
        str
            Its number, the minutes that are left, and its name.
        """
        rest = f"{self.remaining} left" if self.remaining.endswith("min") else ""
        self.done += 1
        return f"{self.done:.0f} of {self.total:.0f}{rest}: {what}"
