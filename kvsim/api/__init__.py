"""The Python API: every command is a function, with the command's options as keyword arguments.

An argument may be a number or the text that the command line takes (``prompt="32k"``,
``tpot="50ms"``); where several values are allowed, give a list. The functions return a
:class:`kvsim.report.result.Result`. They raise :class:`kvsim.errors.InputError` for an invalid
argument and :class:`kvsim.errors.InfeasibleError` where nothing satisfies the request.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsim.api.calibrations import calibrate as calibrate
    from kvsim.api.calibrations import calibrate_run as calibrate_run
    from kvsim.api.fleets import capacity as capacity
    from kvsim.api.objects import GPU as GPU
    from kvsim.api.objects import Model as Model
    from kvsim.api.objects import Technique as Technique
    from kvsim.api.objects import Workload as Workload
    from kvsim.api.objects import gpus as gpus
    from kvsim.api.objects import models as models
    from kvsim.api.objects import register_technique as register_technique
    from kvsim.api.objects import stacks as stacks
    from kvsim.api.objects import techniques as techniques
    from kvsim.api.plans import plan as plan
    from kvsim.api.predictions import explore as explore
    from kvsim.api.predictions import predict as predict
    from kvsim.api.predictions import reproduce as reproduce
    from kvsim.api.predictions import sweep as sweep
    from kvsim.api.simulations import simulate as simulate
    from kvsim.api.validations import validate as validate
    from kvsim.api.validations import validate_layers as validate_layers
    from kvsim.api.validations import validate_plan as validate_plan
    from kvsim.api.validations import validate_quality as validate_quality

MODULES = {
    "calibrations": ("calibrate", "calibrate_run"),
    "fleets": ("capacity",),
    "objects": (
        *("GPU", "Model", "Technique", "Workload", "register_technique"),
        *("gpus", "models", "stacks", "techniques"),
    ),
    "plans": ("plan",),
    "predictions": ("explore", "predict", "reproduce", "sweep"),
    "simulations": ("simulate",),
    "validations": ("validate", "validate_layers", "validate_plan", "validate_quality"),
}
"""What each module offers; only those that a program uses are imported."""


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    for module, names in MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [name for names in MODULES.values() for name in names]
