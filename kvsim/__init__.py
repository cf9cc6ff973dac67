"""Predict and plan key-value cache techniques for large language models.

From Python as on the command line::

    import kvsim

    kvsim.predict("llama3.1-8b", "h100", technique="full,kivi", batch=[1, 8], prompt="8k")
    best = kvsim.plan("meta-llama/Llama-3.1-8B-Instruct", "RTX 4090", prompt="4k", tpot="50ms")
    best.choice.batch, best.ttft, best.tpot
    kvsim.sweep("llama3.1-8b", "h100", batch=[1, 8, 64], prompt=[1024, 8192]).frame()

What they give has ``.answer``, ``.choice``, ``.rows``, ``.frame()``, ``.to_dict()`` and
``.figure()``. Nothing is imported before it is used.
"""

from typing import TYPE_CHECKING, Any

from kvsim.version import __version__ as __version__

if TYPE_CHECKING:
    from kvsim.api import GPU as GPU
    from kvsim.api import Model as Model
    from kvsim.api import Technique as Technique
    from kvsim.api import Workload as Workload
    from kvsim.api import calibrate as calibrate
    from kvsim.api import calibrate_run as calibrate_run
    from kvsim.api import capacity as capacity
    from kvsim.api import explore as explore
    from kvsim.api import plan as plan
    from kvsim.api import predict as predict
    from kvsim.api import register_technique as register_technique
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
    "register_technique",
    "reproduce",
    "simulate",
    "sweep",
)
OBJECTS = ("GPU", "Model", "Technique", "Workload")
"""What Python users call; ``kvsim.api`` has them, and those whose names are packages here."""


def __getattr__(name: str) -> Any:
    """Import the functions and objects when one is first asked for."""
    if name not in FUNCTIONS + OBJECTS:
        raise AttributeError(f"module 'kvsim' has no attribute {name!r}")
    from kvsim import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*FUNCTIONS, *OBJECTS, "__version__"]
