"""What has to be decided before any test module is imported."""

import atexit
import gc
import os
from typing import Any

import pytest

# Triton chooses its interpreter when first imported; kernels on a GPU are `make.py gpu`'s to check
os.environ["TRITON_INTERPRET"] = "1"

# two runs of tests and the commands they start share the cores: threads that spin while they wait
# for work take ten times as long as one thread that has all of it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


YOUNG = (
    20_000  # objects made between two looks for cycles, thirty times as many as Python waits for
)


def pytest_configure() -> None:
    """Look for no cycles while modules are imported: they leave none, and looking takes longer."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Never look again at what is imported and collected by now."""
    gc.freeze()
    gc.set_threshold(YOUNG)
    gc.enable()


@atexit.register
def _at_the_end() -> None:
    """Libraries that count what is left find nothing; pytest has looked for the last time."""
    gc.unfreeze()


@pytest.fixture(autouse="KVSIM_ULPS" in os.environ)
def _another_cpu(monkeypatch: Any) -> None:
    """Runs round as they would elsewhere; see ``tests.support.ulps``."""
    from tests.support.ulps import move_inputs

    move_inputs(monkeypatch)


UNKNOWN = pytest.StashKey[list[str]]()
"""What tests/support/left_out.py names and no collected file has; a test of the house looks."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, and most of those that are alike, unless they are asked for."""
    from tests.support.left_out import left_out, unknown_names

    config.stash[UNKNOWN] = unknown_names([item.nodeid for item in items], config.args)
    out = [item for item in items if left_out(item.nodeid, config.args)]
    config.hook.pytest_deselected(items=out)
    gone = set(map(id, out))
    items[:] = [item for item in items if id(item) not in gone]
