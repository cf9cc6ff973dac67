"""Predict and plan key-value cache techniques for large language models.

From Python as on the command line::

    import kvsim

    kvsim.predict("llama3.1-8b", "h100", technique="full,kivi", batch=[1, 8], prompt="8k")
    kvsim.plan("llama3.1-8b", "h100", prompt=4096, tpot="50ms")
    kvsim.sweep("llama3.1-8b", "h100", batch=[1, 8, 64], prompt=[1024, 8192]).frame()

What they give has ``.answer``, ``.rows``, ``.frame()`` and ``.figure()``. Nothing is imported
before it is used.
"""

from typing import TYPE_CHECKING, Any

from kvsim.version import __version__ as __version__

if TYPE_CHECKING:
    from kvsim.api import calibrate as calibrate
    from kvsim.api import calibrate_run as calibrate_run
    from kvsim.api import capacity as capacity
    from kvsim.api import explore as explore
    from kvsim.api import plan as plan
    from kvsim.api import predict as predict
    from kvsim.api import reproduce as reproduce
    from kvsim.api import simulate as simulate
    from kvsim.api import sweep as sweep


FUNCTIONS = (
    "calibrate",
    "calibrate_run",
    "capacity",
    "explore",
    "plan",
    "predict",
    "reproduce",
    "simulate",
    "sweep",
)
"""What Python users call; ``kvsim.api`` has them, and those whose names are packages here."""


def __getattr__(name: str) -> Any:
    """Import the functions when one is first asked for."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    from kvsim import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*FUNCTIONS, "__version__"]
