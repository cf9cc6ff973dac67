"""The units of a session, in the order in which they are worth the time."""

import sys
from collections.abc import Iterator

from kvsim.validate.session.run import Unit
from kvsim.validate.session.state import SessionState

KERNELS = ("attention", "factors", "quantise", "topk", "gather", "lanes")
COUNTED = (("smollm2-135m", 0), ("llama2-7b", 2))
"""Models, and the layers they are cut to (0: all)."""
TIMED = (("smollm2-135m", 0), ("llama2-7b", 4))
SHORT = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (64, 1024))
"""Batches and prompts that every technique runs."""
LONG = ((1, 65536), (64, 8192), (8, 65536))
LONG_TECHNIQUES = ("full", "kivi", "quantspec", "specache:k=64")
POINT_LIMIT = 90.0  # of one timed point [s]
POINT_START = 20.0  # PyTorch, weights, kernels that are compiled [s]
FULL_POINT = 65536  # tokens of a batch's prompts for which a point may take all of its time


def all_units(device: str, state: SessionState) -> list[Unit]:
    """Facts and ceilings, kernels, tokens and counts, calibration, timed points, rates."""

    def unit(name: str, seconds: float, **more: object) -> Unit:
        command = (sys.executable, "-m", "kvsim.validate.session.work", name, device)
        return Unit(name, seconds, (*command, str(state.folder)), **more)  # type: ignore[arg-type]

    return [
        unit("facts", 10.0),
        unit("ceilings", 20.0),
        unit("compile", 40.0),
        *(unit(f"kernels {name}", 30.0) for name in KERNELS),
        unit("sanitizer", 60.0, most=180.0),
        *(unit(f"counts {model} {layers}", 60.0) for model, layers in COUNTED),
        unit("calibration", 60.0, most=1200.0, goes_on=True),
        *(
            unit(name, seconds, most=POINT_LIMIT, needs=("calibration",))
            for name, seconds in _points()
        ),
        unit("rates", 60.0, most=180.0, needs=("ceilings",)),
    ]


def _points() -> Iterator[tuple[str, float]]:
    for kind, sizes in (("short", SHORT), ("long", LONG)):
        for batch, prompt in sizes:
            share = min(1.0, batch * prompt / FULL_POINT)
            for model, layers in TIMED:
                seconds = POINT_START + (POINT_LIMIT - POINT_START - 10) * share
                yield f"point {kind} {model} {layers} {batch} {prompt}", seconds
