"""What has to be decided before any test module is imported."""

import os
from pathlib import Path
from typing import Any

import pytest

if not Path("/dev/nvidiactl").exists():  # Triton chooses its interpreter when first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse="KVSIM_ULPS" in os.environ)
def _another_cpu(monkeypatch: Any) -> None:
    """Runs round as they would elsewhere; see ``tests.support.ulps``."""
    from tests.support.ulps import move_inputs

    move_inputs(monkeypatch)
