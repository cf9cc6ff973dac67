"""What every setting of every technique is by default and may be, as ``settings.txt`` has it.

A changed default or range changes what plans consider and what the documentation says; it is meant
to be seen. ``python -m tests.techniques.test_settings`` writes the file anew. A technique that the
file does not name is new, and free to change until it is written down.
"""

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.axes.base import Launches
from kvsim.techniques.notation import terms
from tests.support.shipped import PLACE, SHIPPED


def lines() -> Iterator[str]:
    """One per setting, and one per technique with what a plan considers."""
    d = Deployment(load_model("llama2-7b"), load_hardware("a6000"), load_stack("fused"))
    for name, kind in sorted(terms().items()):
        for setting in fields(kind):
            about = setting.metadata
            if "low" in about:
                many = ", ".join(map(str, about["choices"]))
                whole = "whole" if about["whole"] else "real"
                span = f"{about['low']:.15g} to {about['high']:.15g}, {whole}"
                yield f"{name}:{setting.name} = {setting.default}; {span}" + f"; {many}" * bool(
                    many
                )
        stated = vars(getattr(kind, "launches", Launches()))
        if own := {phase: dict(each) for phase, each in stated.items() if each}:
            yield f"{name}: kvsim's own kernels {own}"
        if name not in TECHNIQUES:
            continue
        with np.printoptions(threshold=100, linewidth=10_000):
            considered = [shown for one in kind().options(d, 1024, 128) for shown in [repr(one)]]
        yield f"{name}: a plan considers {'; '.join(considered)}".replace("\n", " ")


def test_settings_are_as_listed() -> None:
    listed = PLACE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines() if line.partition(":")[0] in SHIPPED] == listed


if __name__ == "__main__":
    PLACE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
