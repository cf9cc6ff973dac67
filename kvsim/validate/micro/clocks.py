"""What a GPU runs at while it is measured: its driver is asked every second."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread

FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)
"""What ``nvidia-smi --query-gpu`` is asked."""
EVERY = 1.0  # [s]

Ask = Callable[[], Mapping[str, str]]
Since = Callable[[], dict[str, str]]
"""What was seen since it was last asked, by field: one value, or ``lowest to highest``."""


@contextmanager
def watched(ask: Ask, every: float = EVERY) -> Iterator[Since]:
    """Ask while the block runs, in a thread of its own.

    Parameters
    ----------
    ask : what the driver says now, by field; nothing where it does not answer.
    every : between two questions. [s]
    """
    seen: dict[str, list[str]] = {}
    lock, over = Lock(), Event()

    def look() -> None:
        found = ask()
        with lock:
            for name, value in found.items():
                seen.setdefault(name, []).append(value)

    def keep_looking() -> None:
        while not over.wait(every):
            look()

    def since() -> dict[str, str]:
        if not seen:  # what took less than a second is looked at once
            look()
        with lock:
            found = {name: _range(values) for name, values in seen.items()}
            seen.clear()
        return found

    thread = Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield since
    finally:
        over.set()
        thread.join()


def _range(values: list[str]) -> str:
    """One value, or the lowest and the highest; texts in the order in which they came."""
    different = list(dict.fromkeys(values))
    try:
        different.sort(key=float)
    except ValueError:
        return ", ".join(different)
    return different[0] if len(different) == 1 else f"{different[0]} to {different[-1]}"
