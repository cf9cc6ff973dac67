"""The functions that the command line and Python users call; ``kvsim.options`` has their keywords.

Every value may be written as on the command line (``prompt="32k"``, ``tpot="50ms"``) or as a
number; several are a list. Errors are ``kvsim.errors.InputError`` and ``InfeasibleError``.
"""

from kvsim.api.calibrations import calibrate, calibrate_run
from kvsim.api.fleets import capacity
from kvsim.api.lists import gpus, models, stacks, techniques
from kvsim.api.objects import GPU, Model, Technique, Workload, register_technique
from kvsim.api.plans import plan
from kvsim.api.predictions import explore, predict, reproduce, sweep
from kvsim.api.simulations import simulate
from kvsim.api.validations import validate, validate_layers, validate_plan, validate_quality

__all__ = [
    "GPU",
    "Model",
    "Technique",
    "Workload",
    "calibrate",
    "calibrate_run",
    "capacity",
    "explore",
    "gpus",
    "models",
    "plan",
    "predict",
    "register_technique",
    "reproduce",
    "simulate",
    "stacks",
    "sweep",
    "techniques",
    "validate",
    "validate_layers",
    "validate_plan",
    "validate_quality",
]
