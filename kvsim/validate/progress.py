"""How far a list of equal runs is, and how long the rest takes by what they took so far."""

from time import monotonic

from kvsim.validate.runner import duration


class Progress:
    """How far runs are.

    Parameters
    ----------
    total : runs in all.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, monotonic()

    def line(self, what: str) -> str:
        """Name the run that is next.

        Returns
        -------
        str
            Its number, the minutes that are left, and its name.
        """
        left, rest = self._total - self._done, ""
        if self._done and left:
            rest = duration((monotonic() - self._begin) / self._done * left)
        self._done += 1
        rest = f"{rest} left" if rest.endswith("min") else ""
        return f"{self._done} of {self._total}{rest}: {what}"
