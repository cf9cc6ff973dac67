"""Comparisons of real runs hold on other CPUs: two corners of what ``make.py test --cpus`` runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
CORNERS = {
    "oldest": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
        "KVSIM_TEST_THREADS": "1", "KVSIM_ULPS": "1",
    },
    "two threads": {
        "ATEN_CPU_CAPABILITY": "avx2", "KVSIM_TEST_THREADS": "2", "KVSIM_ULPS": "2",
    },
}  # fmt: skip
COMPARED = (
    "test_impl_packed.py::test_kivi_is_its_algorithm_with_a_residual_that_rolls[kivi-4]",
    "test_impl_speculation.py::test_quantspec_is_greedy_decoding_of_its_target[4]",
    "test_impl_eviction.py::test_what_attention_says_is_kept[lengths0-h2o:heavy=9,recent=15-NaiveH2o]",
    "test_impl_lossless.py::test_kvpr_at_every_split_of_prompts_that_differ[5]",
    "test_validate_decoder.py::test_logits_and_tokens_are_those_of_transformers[qwen3]",
)


@pytest.mark.parametrize("corner", CORNERS)
def test_real_runs_agree_on_another_cpu(corner: str) -> None:
    asked = [str(ROOT / "tests" / "validate" / name) for name in COMPARED]
    command = [sys.executable, "-Im", "pytest", "-q", "-p", "no:cacheprovider", *asked]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | CORNERS[corner], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert f"{len(COMPARED)} passed" in run.stdout
