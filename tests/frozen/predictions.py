"""Predictions, and what ``kvsim reproduce`` predicts for each published row.

Two draws make up ``data/predictions``: 2,000 in which every technique meets every stack and every
model, and 1,000 on engine stacks with tensor, pipeline, data and expert parallelism, 8-bit and
4-bit weights, experts, drafts and hybrid models.
"""

from functools import cache

import numpy as np

from kvsim.evidence import published
from kvsim.evidence.predicted import predict as predict_row
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from tests.frozen.store import Answer, Kind

FIELDS = (
    "model", "gpu", "stack", "technique", "weights", "tp", "pp", "dp", "ep", "batch", "prompt",
    "generate",
)  # fmt: skip
QUANTITIES = ("ttft_s", "decode_s", "gpu_bytes", "host_bytes", "max_batch")


def predict(case: str) -> Answer:
    """Compute the prediction of a case, the values of :data:`FIELDS` separated by `` | ``."""
    at = dict(zip(FIELDS, case.split(" | "), strict=True))
    spread = (int(at[name]) for name in ("tp", "pp", "dp", "ep"))
    hardware, stack = load_hardware(at["gpu"]), load_stack(at["stack"])
    d = Deployment(load_model(at["model"]), hardware, stack, at["weights"], *spread)
    batch = np.array([float(at["batch"])])
    found = Prediction(parse(at["technique"]), d, batch, int(at["prompt"]), int(at["generate"]))
    numbers = [float(np.ravel(getattr(found, name))[0]) for name in QUANTITIES]
    return {"ttft_s, decode_s, gpu_bytes, host_bytes, max_batch": numbers}


@cache
def _published(paper: str) -> list[float]:
    return [predict_row(row) for row in published.read(paper)]


def reproduce(case: str) -> Answer:
    """Compute the prediction of one published row, named ``PAPER row NUMBER``."""
    paper, _, row = case.partition(" row ")
    return {"predicted": _published(paper)[int(row)]}


PREDICTIONS = Kind("predictions", predict, every=8)
REPRODUCED = Kind("reproduced", reproduce)
