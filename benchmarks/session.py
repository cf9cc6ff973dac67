"""Every unit of ``make.py gpu`` on a GPU that is pretended, with the PyTorch that runs this.

    python -m benchmarks.session                some minutes of CPU; also with a build for CUDA
    python -m benchmarks.session --state DIR    keeps results there; run again, it goes on

Asked: every unit's Python path runs, of whatever build PyTorch is, and all techniques that have a
real implementation are counted and timed. Nothing is measured: kernels are interpreted or give
zeros. With PyPI's build for CUDA it needs no more than PyTorch, NumPy, SciPy and Typer.
"""

import gc
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kvsim.report.session import make_result
from kvsim.validate.registry import IMPLEMENTATIONS
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import all_units
from tests.support.pretended_session import run_unit
from tests.support.small_llama import small_config

OTHER_VOCABULARY = {"draft"}  # its model does not fit the small one


def main() -> None:
    """Print a line per unit; exit 1 where one does not run or a technique is missing."""
    arguments = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    arguments.add_argument("--state", type=Path, help="keep results here, and go on from them")
    kept: Path | None = arguments.parse_args().state
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    with TemporaryDirectory() as folder:
        missing = run_all(kept.resolve() if kept else Path(folder))
    if missing:
        sys.exit(f"missing: {', '.join(sorted(missing))}")


def run_all(place: Path) -> set[str]:
    """Every unit whose result is not there yet; the techniques that some unit did not run."""
    (place / "model").mkdir(parents=True, exist_ok=True)
    model = small_config(place / "model", (4, 2), 64, 1, 256)
    state, missing = SessionState.open(place, "pretended"), set[str]()
    names = (
        "facts", "ceilings", "compile",
        "kernels factors", "kernels quantise", "kernels topk", "kernels gather",
        "sanitizer", f"counts {model} 1", "calibration",
        *(f"point {name}" for name in IMPLEMENTATIONS if name not in OTHER_VOCABULARY),
    )  # fmt: skip
    for name in names:
        if state.read(name) is not None:
            taken = "done before"
        else:
            begin = process_time()
            state.write(name, run_unit(name, state, model, interpreted=name.startswith("kernels")))
            taken = f"{process_time() - begin:.0f} s of CPU"
        found = state.read(name)
        assert found is not None
        done = found.get("techniques", ())
        ran = {one["technique"].partition(":")[0] for one in done}
        if done:
            missing |= set(IMPLEMENTATIONS) - ran - OTHER_VOCABULARY
        if name.startswith("point") and not found["found"]:
            missing.add(name.split()[1])
        techniques = f", {len(ran)} techniques" if ran else ""
        print(f"{name.partition('/')[0].strip()} runs{techniques} ({taken})", flush=True)
        gc.collect()
        gc.freeze()  # every counted run collects: what is there now stays out of it
    units = all_units("cuda:0")
    make_result(state, units).write(place / "index.html")
    print(f"page: {place / 'index.html'}")
    return missing


if __name__ == "__main__":
    main()
