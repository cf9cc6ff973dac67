"""What has to be decided before any test module is imported."""

import os
from typing import Any

import pytest

# Triton chooses its interpreter when first imported; kernels on a GPU are `make.py gpu`'s to check
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse="KVSIM_ULPS" in os.environ)
def _another_cpu(monkeypatch: Any) -> None:
    """Runs round as they would elsewhere; see ``tests.support.ulps``."""
    from tests.support.ulps import move_inputs

    move_inputs(monkeypatch)
