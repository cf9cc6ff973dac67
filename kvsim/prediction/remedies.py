"""What would make a point fit: each change is tried, with what it gives."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.prediction.generate import Prediction
from kvsim.prediction.pool import longest_prompt

WEIGHTS = ("fp8", "int8", "int4")
GPUS = (2, 4, 8)


@frozen
class Remedy:
    """A change as the command line takes it, and the prediction with it."""

    option: str
    prediction: Prediction


def remedies(prediction: Prediction) -> Iterator[Remedy]:
    """Changes after which a point of one batch fits, the gentlest of each kind."""
    d, batch = prediction.deployment, int(prediction.batch[0])
    most = int(prediction.max_batch[0])
    if 0 < most < batch:
        yield Remedy(f"--batch {most}", replace(prediction, batch=np.array([float(most)])))
    prompt = longest_prompt(prediction.technique, d, batch, prediction.generate)
    if 0 < prompt < prediction.prompt:
        yield Remedy(f"--prompt {prompt}", replace(prediction, prompt=prompt))
    for kind, values in (("weights", WEIGHTS), ("tp", GPUS)):
        for value in values:
            found = _tried(prediction, **{kind: value})
            if found is not None:
                yield Remedy(f"--{kind} {value}", found)
                break


def _tried(prediction: Prediction, **change: object) -> Prediction | None:
    """The prediction with a change of the deployment, if it can run and fits."""
    d = prediction.deployment
    if "weights" in change and (
        d.weights != "fp16" or (change["weights"] == "fp8" and "fp8" not in d.hardware.flops)
    ):
        return None
    if "tp" in change and int(str(change["tp"])) <= d.tp:
        return None
    try:
        other = replace(prediction, deployment=replace(d, **change))  # type: ignore[arg-type]
        return other if bool(other.fits[0]) else None
    except InputError:
        return None
