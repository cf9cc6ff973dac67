"""Comparisons of real runs hold on other CPUs: two corners of what ``make.py test --cpus`` runs."""

import os
import subprocess
import sys

import pytest

from tests.support.left_out import OTHER_CPUS
from tests.support.places import ROOT

pytest.importorskip("torch")

CORNERS = {
    "oldest": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
        "KVSIM_TEST_THREADS": "1", "KVSIM_ULPS": "1",
    },
    "two threads": {
        "ATEN_CPU_CAPABILITY": "avx2", "KVSIM_TEST_THREADS": "2", "KVSIM_ULPS": "2",
    },
}  # fmt: skip


@pytest.mark.parametrize("corner", CORNERS)
def test_real_runs_agree_on_another_cpu(corner: str) -> None:
    command = [sys.executable, "-Im", "pytest", "-q", "-p", "no:cacheprovider", *OTHER_CPUS]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | CORNERS[corner], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert f"{len(OTHER_CPUS)} passed" in run.stdout
