"""The units of a session in order of priority, and their implementation.

``python -m kvsim.validate.session.work DEVICE FOLDER`` is the worker: it imports PyTorch once,
reads a unit per line, and writes each result itself.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from kvsim.validate.registry import IMPLEMENTATIONS
from kvsim.validate.runner import BY_USE, Form, Unit
from kvsim.validate.session.queue import die_with_parent, serve
from kvsim.validate.session.state import SessionState

REPOSITORY = Path(__file__).resolve().parents[3]
PROFILES: dict[Form, str] = {"long": "full.toml", "short": "quick.toml"}
"""Profiles of the two forms of the calibration, from the better one."""
COMPILERS = 16  # processes that compile kernels at once
TIMED_MODEL: dict[str, tuple[str, int]] = {"cuda": ("llama3.1-8b", 4), "cpu": ("smollm2-135m", 2)}
"""Model that techniques are timed on, and the layers that it is cut to."""
TIMED_SIZES: dict[str, dict[Form, tuple[tuple[int, int], ...]]] = {
    "cuda": {
        "short": ((8, 8192),),
        "long": ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (64, 1024), (1, 65536)),
    },
    "cpu": {"short": ((2, 96),), "long": ((1, 128), (2, 96), (2, 384))},
}
"""Batches and prompts by kind of device."""
COUNTED_MODELS = (("smollm2-135m", 0), ("llama2-7b", 2))
"""Models whose tokens and counts are compared, and the layers they are cut to (0: all)."""
ORACLE_KERNELS = ("attention", "factors", "quantise", "topk", "gather", "lanes")
Result = dict[str, Any]


def all_units(device: str) -> list[Unit]:
    """List the units of a session.

    The card's description and peak rates come first, then the calibration on which all predictions
    depend, then comparisons of techniques with their predictions in order of use, then refinements
    and checks.

    Parameters
    ----------
    device
        ``cuda:N``, or ``cpu`` for a rehearsal.
    """
    # which need a second model, and prompts that begin alike
    others = sorted(set(IMPLEMENTATIONS) - set(BY_USE) - {"draft", "cascade"})
    timed = [Unit(f"point {name}", 70.0, 20.0, ("calibration",), 180.0) for name in BY_USE]
    more = [Unit(f"point {name}", 70.0, 15.0, ("calibration",), 180.0) for name in others]
    return [
        Unit("facts", 10.0),
        Unit("ceilings", 20.0),
        Unit("calibration", 480.0, 130.0, most=1200.0, resumes=True),
        *timed,
        *(Unit(f"kernels {name}", 60.0, 25.0) for name in ORACLE_KERNELS[:1]),
        *more,
        *(Unit(f"kernels {name}", 60.0, 15.0) for name in ORACLE_KERNELS[1:]),
        *(Unit(f"counts {model} {layers}", 60.0) for model, layers in COUNTED_MODELS),
        Unit("compile", 200.0, 40.0),
        Unit("sanitizer", 60.0, most=180.0),
    ]


def profile_of(state: SessionState) -> Path | None:
    """Return the best profile that a session has measured so far, or None."""
    return next((p for name in PROFILES.values() if (p := state.path(name)).exists()), None)


def facts(device: str, state: SessionState, form: Form) -> Result:
    """Describe the device and the software."""
    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.processor import Processor, available_memory
    from kvsim.version import __version__

    where = find_device(device)
    context = devices.context_memory(where)
    found, place = devices.describe(where), devices.place(where, quick=True)
    return {
        "context_B": context, "cache_B": place.cache,
        "conditions": devices.conditions(found, place),
        "device": found.name, "memory_B": found.memory, "facts": dict(found.facts),
        "suspicions": devices.suspicions(found), "host": Processor.detect().summary,
        "host_memory_B": devices.host_memory(), "free_host_memory_B": available_memory(),
        "python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": _version("triton"), "kvsim": __version__, "date": str(date.today()),
    }  # fmt: skip


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def ceilings(device: str, state: SessionState, form: Form) -> Result:
    """Measure the best rates of memory, products and the link."""
    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.bench.compute import product
    from kvsim.validate.bench.traffic import d2h, h2d, memory_works
    from kvsim.validate.bench.work import measure, timers
    from kvsim.validate.machine import find_device

    place = devices.place(find_device(device), quick=True)
    clocks = timers(place.device)
    found: Result = {}
    asked = [(w, "hbm") for w in memory_works(place) if w.case["cached"] == "no"][:3]
    asked += [(product(place, "fp16", rows, 4096, 4096), "flops") for rows in (256, 4096)]
    for name, works in (("h2d", h2d), ("d2h", d2h)):
        asked.append(([w for w in works(place) if w.case["memory"] == "pinned"][-1], name))
    with torch.inference_mode():
        for work, what in asked:
            if float(work.op.flops) > place.most_flops:
                continue
            with work.make() as calls:
                seconds = min(measure(clocks[work.clock], calls, 0.5))
            amount = float(work.op.flops if what == "flops" else work.op.bytes[what])  # type: ignore[index]
            found[what] = max(found.get(what, 0.0), amount / seconds)
    return {"flops_per_s" if k == "flops" else f"{k}_B_per_s": v for k, v in found.items()}


def compile_kernels(device: str, state: SessionState, form: Form) -> Result:
    """Compile every kernel as it is launched; report its shared memory and spilt registers."""
    import torch

    from kvsim.validate.bench.device import compute_threads

    capability = "86"
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        capability = f"{major}{minor}"
    script = REPOSITORY / "tests" / "support" / "compile_kernels.py"
    few = ["--few"] if device == "cpu" or form == "short" else []
    parts = 1 if few else max(1, min(compute_threads(), COMPILERS))
    asked = [[sys.executable, str(script), capability, *few]]
    if parts > 1:
        asked = [[*asked[0], f"--part={i}/{parts}"] for i in range(parts)]
    with ThreadPoolExecutor(parts) as pool:
        runs = list(pool.map(_run, asked))
    return {
        "lines": [line for run in runs for line in run.stdout.splitlines()],
        "passed": not any(run.returncode for run in runs),
        "said": " ".join(run.stderr[-500:] for run in runs if run.returncode),
    }


def kernels(device: str, state: SessionState, form: Form, name: str) -> Result:
    """Compare a kernel's results with those of PyTorch's own ops, case by case.

    Parameters
    ----------
    device
        Name of the device; on ``cpu`` few cases run.
    state
        State of the session, which is not used.
    form
        Form of the session; ``short`` runs few cases.
    name
        Name of the kernel.
    """
    from kvsim.validate.kernels.language import interpreter_fault
    from kvsim.validate.machine import find_device

    oracles = import_module("tests.support.oracles").ORACLES  # a session runs in a checkout
    small = device == "cpu" or form == "short"
    try:
        cases = list(oracles[name](find_device(device), small))
    except Exception as problem:
        if said := interpreter_fault(problem):
            return {"cases": [], "passed": None, "said": said}
        raise
    return {"cases": cases, "passed": all(case["passed"] for case in cases)}


def sanitizer(device: str, state: SessionState, form: Form) -> Result:
    """Run attention under NVIDIA's memory checker, if it is installed."""
    tool = shutil.which("compute-sanitizer")
    if not tool or device == "cpu":
        return {"passed": None, "said": "compute-sanitizer is not installed"}
    checked = [sys.executable, "-c", CHECKED_KERNEL, device, str(state.path("checked"))]
    run = _run([tool, "--tool", "memcheck", "--error-exitcode", "3", *checked])
    return {"passed": run.returncode == 0, "said": run.stdout[-500:]}


def counts(device: str, state: SessionState, form: Form, model: str, layers: str) -> Result:
    """Compare tokens and counts of every technique, as ``kvsim validate`` does."""
    command = [sys.executable, "-m", "kvsim", "validate", "--model", model, "--layers", layers]
    run = _run([*command, "--device", device, "--json"])
    if run.returncode not in (0, 1):
        raise SystemExit(run.stderr[-500:] or "kvsim validate failed")
    found: Result = json.loads(run.stdout)
    return found


def calibration(device: str, state: SessionState, form: Form) -> Result:
    """Measure a profile and a stack, continuing earlier measurements."""
    out = state.path(PROFILES[form])
    quick = ["--quick"] if device == "cpu" or form == "short" else []
    command = [sys.executable, "-m", "kvsim", "calibrate", "--device", device, "--out", str(out)]
    run = _run([*command, *quick, "--json"], told=True)
    if run.returncode:
        raise RuntimeError(f"kvsim calibrate ended with code {run.returncode}")
    found: Result = json.loads(run.stdout)
    return found


def point(device: str, state: SessionState, form: Form, name: str) -> Result:
    """Time a technique at several points, and compare with predictions."""
    import torch

    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.validate.bench import device as devices
    from kvsim.validate.counts.check import representative
    from kvsim.validate.counts.expected import TIMED_GENERATED, RandomPrompts
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.architecture import load_architecture
    from kvsim.validate.times.compared import Compared, SkippedPoint
    from kvsim.validate.times.points import Grid, compare_times

    where = find_device(device)
    if where.type == "cpu":
        torch.set_num_threads(devices.compute_threads())
    place = devices.place(where, quick=True)
    profile = profile_of(state)
    assert profile is not None
    hardware, stack = load_hardware(profile), load_stack(profile.with_suffix(".stack.toml"))
    model, layers = TIMED_MODEL[where.type]
    arch = load_architecture(model)
    found, left = [], []
    for batch, prompt in TIMED_SIZES[where.type][form]:
        grid = Grid(((model, layers),), (batch,), (prompt,), repeats=2)
        work = RandomPrompts(batch, prompt, TIMED_GENERATED)
        asked = [t for t in representative(arch.model, work) if str(t).partition(":")[0] == name]
        for step in compare_times(grid, asked[:1], where, place.half, hardware, stack):
            at = {"batch": batch, "prompt": prompt}
            if isinstance(step, Compared):
                rows = [asdict(m) for m in (*step.whole, *step.ops)]
                graphs = "replayed" if step.eager is None else f"not replayed: {step.eager}"
                one = {
                    "technique": str(step.technique),
                    "rounds": graphs,
                    "replays": [asdict(replay) for replay in step.replays],
                    "measured": rows,
                }
                found.append(at | one)
            elif isinstance(step, SkippedPoint):
                left.append(at | {"technique": str(step.technique), "reason": step.reason})
            else:
                print(step, flush=True)
    if not found and not left:
        raise RuntimeError(f"{name} has no settings that could be timed")
    about = {"model": model, "layers": layers, "profile": profile.name}
    return {**about, "found": found, "left": left}


def _run(command: list[str], told: bool = False) -> "subprocess.CompletedProcess[str]":
    """A command that ends with this process.

    Parameters
    ----------
    told : what it says goes to the unit's log at once, since it may be ended before it is over.
    """
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=None if told else subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=die_with_parent,
    )


WORK: dict[str, Callable[..., Result]] = {
    "facts": facts,
    "ceilings": ceilings,
    "compile": compile_kernels,
    "kernels": kernels,
    "sanitizer": sanitizer,
    "counts": counts,
    "calibration": calibration,
    "point": point,
}
CHECKED_KERNEL = """
import sys
from pathlib import Path
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import do
Path(sys.argv[2]).mkdir(exist_ok=True)
do(sys.argv[1], SessionState(Path(sys.argv[2])), "kernels attention", "short")
"""
"""What the sanitizer watches, in a process of its own."""


def do(device: str, state: SessionState, unit: str, form: Form) -> None:
    """Run a unit, and store its result with its form and duration."""
    (what, *settings), begin = unit.split(), monotonic()
    found = WORK[what](device, state, form, *settings)
    state.write(unit, {**found, "form": form, "took_s": round(monotonic() - begin, 2)})


def main() -> None:
    """Run the units named on standard input."""
    device, folder = sys.argv[1:3]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
    state = SessionState(Path(folder))

    def do_one(unit: str, form: Form) -> None:
        do(device, state, unit, form)
        gc.collect()
        if device != "cpu":
            import torch

            torch.cuda.empty_cache()

    serve(do_one)


if __name__ == "__main__":
    main()
