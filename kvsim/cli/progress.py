"""How far a long run is, on standard error."""

import sys
from time import monotonic

PATIENCE = 2.0  # a run shorter than this says nothing [s]
TERMINAL, LOG = 0.5, 10.0  # between two lines on a terminal, and in a log [s]


class ProgressLine:
    """Says now and then how many requests are done."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.live = sys.stderr.isatty()
        self.next = monotonic() + PATIENCE
        self.said = False

    def __call__(self, done: int) -> None:
        """Take note of the requests that are done."""
        if monotonic() < self.next:
            return
        self.next = monotonic() + (TERMINAL if self.live else LOG)
        self.said = True
        line = f"kvsim: {self.what}: {done:,} of {self.total:,} requests"
        print(f"\r{line}" if self.live else line, end="" if self.live else "\n", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the line that was overwritten so far."""
        if self.live and self.said:
            print(file=sys.stderr)
