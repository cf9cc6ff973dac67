"""The simulator's compiled functions as the Python that they are written in."""

import sys

import pytest


def run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every function of the serving room call the others uncompiled, so that Python may."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kvsim.serving"):
            for key, value in list(vars(module).items()):
                plain = getattr(value, "py_func", None)
                if plain is not None:
                    monkeypatch.setattr(module, key, plain)
