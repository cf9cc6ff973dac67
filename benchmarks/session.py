"""Every unit of ``make.py gpu`` on a GPU that is pretended, with the PyTorch that runs this.

    python -m benchmarks.session        two minutes of CPU; also with a build that has CUDA

Asked: every unit's Python path runs, of whatever build PyTorch is, and all techniques that have a
real implementation are counted and timed. Nothing is measured: kernels are interpreted or give
zeros. With PyPI's build for CUDA it needs no more than PyTorch, NumPy, SciPy and Typer.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kvsim.report.session import write_page
from kvsim.validate.impl import IMPLEMENTATIONS
from kvsim.validate.micro import budget
from kvsim.validate.session.report import write_report
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.units import all_units
from tests.support.pretended_session import run_unit
from tests.support.small_llama import small_config

OTHER_VOCABULARY = {"draft"}  # its model does not fit the small one


def main() -> None:
    """Print a line per unit; exit 1 where one does not run or a technique is missing."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    missing: set[str] = set()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "model").mkdir()
        model = small_config(place / "model", (4, 2), 64, 1, 256)
        state = SessionState.of(place, "pretended")
        budget.LEAST = 1
        names = (
            "facts", "ceilings", "compile",
            "kernels factors", "kernels quantise", "kernels topk", "kernels gather",
            "sanitizer", f"counts {model} 1", "calibration", "rates", f"point short {model} 1 1 40",
        )  # fmt: skip
        for name in names:
            state.write(name, run_unit(name, state, model, interpreted=name.startswith("kernels")))
            found = state.read(name)
            assert found is not None
            done = found.get("techniques") or found.get("found")
            ran = {one["technique"].partition(":")[0] for one in done} if done else set()
            if done:
                missing |= set(IMPLEMENTATIONS) - ran - OTHER_VOCABULARY
            print(name.split("/")[0], "runs" + (f", {len(ran)} techniques" if ran else ""))
        units = all_units("cuda:0", state)
        files = write_report(state, units, place / "report")
        write_page(place / "report" / "index.html", state, units)
        print(f"report: {len(files)} files and a page")
    if missing:
        sys.exit(f"missing: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
