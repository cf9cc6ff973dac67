"""One unit of a session in a process of its own: ``python -m kvsim.validate.session.work``."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvsim.validate.session.run import LONG_TECHNIQUES, REPOSITORY, SessionState, die_with_parent

PROFILE_FILE = "profile.toml"
COMPILERS = 16  # processes that compile kernels at once
Result = dict[str, Any]


def facts(device: str, state: SessionState) -> Result:
    """What the device and the software are."""
    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.processor import Processor, available_memory
    from kvsim.version import __version__

    where = find_device(device)
    found = devices.describe(where)
    return {
        "device": found.name, "memory_B": found.memory, "facts": dict(found.facts),
        "suspicions": devices.suspicions(found), "host": Processor.detect().summary,
        "host_memory_B": devices.host_memory(), "free_host_memory_B": available_memory(),
        "python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": _version("triton"), "kvsim": __version__,
    }  # fmt: skip


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def ceilings(device: str, state: SessionState) -> Result:
    """The best rates of memory, products and the link."""
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
    asked += [(list(works(place))[-1], name) for name, works in (("h2d", h2d), ("d2h", d2h))]
    with torch.inference_mode():
        for work, what in asked:
            if float(work.op.flops) > place.most_flops:
                continue
            with work.make() as calls:
                seconds = min(measure(clocks[work.clock], calls, 0.5))
            amount = float(work.op.flops if what == "flops" else work.op.bytes[what])  # type: ignore[index]
            found[what] = max(found.get(what, 0.0), amount / seconds)
    return {"flops_per_s" if k == "flops" else f"{k}_B_per_s": v for k, v in found.items()}


def compile_kernels(device: str, state: SessionState) -> Result:
    """Every kernel as it is launched, compiled for this card; with shared memory and spills."""
    import torch

    from kvsim.validate.bench.device import compute_threads

    capability = "86"
    if device != "cpu":
        major, minor = torch.cuda.get_device_capability(torch.device(device))
        capability = f"{major}{minor}"
    script = REPOSITORY / "tests" / "support" / "compile_kernels.py"
    few = ["--few"] if device == "cpu" else []
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


def kernels(device: str, state: SessionState, name: str, size: str = "") -> Result:
    """A kernel against its plain twin, over few cases on a CPU or if they shall be small."""
    from kvsim.validate.machine import find_device
    from kvsim.validate.session.oracles import ORACLES

    small = device == "cpu" or size == "small"
    cases = list(ORACLES[name](find_device(device), small))
    return {"cases": cases, "passed": all(case["passed"] for case in cases)}


def sanitizer(device: str, state: SessionState) -> Result:
    """Attention under NVIDIA's memory checker, where that is installed."""
    tool = shutil.which("compute-sanitizer")
    if not tool or device == "cpu":
        return {"passed": None, "said": "compute-sanitizer is not installed"}
    here = [sys.executable, "-m", "kvsim.validate.session.work", "kernels attention small", device]
    run = _run(
        [tool, "--tool", "memcheck", "--error-exitcode", "3", *here, str(state.path("checked"))]
    )
    return {"passed": run.returncode == 0, "said": run.stdout[-500:]}


def rates(device: str, state: SessionState) -> Result:
    """What every kernel reaches of the memory's rate and of the rate of issue."""
    import torch

    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.session import rates as reached

    place = devices.place(find_device(device), quick=True)
    peaks, found = reached.peaks_of(state.read("ceilings")), []
    clock = ""
    with torch.inference_mode(), devices.running(place.device) as since:
        for name, work in reached.largest(place):
            row = reached.rate(name, work, place.device, peaks, reached.compiled)
            clock = since().get("clocks.sm", clock)
            issue = 0.0 if place.on_cpu else reached.issue_rate(place.device, clock)
            found.append(reached.of_issue(row, issue) | {"clocks.sm": clock})
    return {"kernels": found}


def counts(device: str, state: SessionState, model: str, layers: str) -> Result:
    """Tokens and counts of every technique, as ``kvsim validate`` finds them."""
    command = [sys.executable, "-m", "kvsim", "validate", "--model", model, "--layers", layers]
    run = _run([*command, "--device", device, "--json"])
    if run.returncode not in (0, 1):
        raise SystemExit(run.stderr[-500:] or "kvsim validate failed")
    found: Result = json.loads(run.stdout)
    return found


def calibration(device: str, state: SessionState) -> Result:
    """A profile and a stack; it continues from what was measured before."""
    out = state.path(PROFILE_FILE)
    quick = ["--quick"] if device == "cpu" else []
    command = [sys.executable, "-m", "kvsim", "calibrate", "--device", device, "--out", str(out)]
    run = _run([*command, *quick, "--json"], told=True)
    if run.returncode:
        raise SystemExit(run.returncode)
    found: Result = json.loads(run.stdout)
    return found


def point(
    device: str, state: SessionState, kind: str, model: str, layers: str, batch: str, prompt: str
) -> Result:
    """Times of all techniques at one point, beside their predictions."""
    import torch

    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.techniques import parse
    from kvsim.validate.bench import device as devices
    from kvsim.validate.machine import find_device
    from kvsim.validate.times.compared import Compared, SkippedPoint
    from kvsim.validate.times.points import Grid, compare_times

    where = find_device(device)
    if where.type == "cpu":
        torch.set_num_threads(devices.compute_threads())
    place = devices.place(where, quick=True)
    profile = state.path(PROFILE_FILE)
    hardware, stack = load_hardware(profile), load_stack(profile.with_suffix(".stack.toml"))
    asked = [parse(text) for text in LONG_TECHNIQUES] if kind == "long" else []
    grid = Grid(((model, int(layers)),), (int(batch),), (int(prompt),), repeats=2)
    found, left = [], []
    for step in compare_times(grid, asked, where, place.half, hardware, stack):
        if isinstance(step, Compared):
            rows = [asdict(m) for m in (*step.whole, *step.ops)]
            graphs = "replayed" if step.eager is None else f"not replayed: {step.eager}"
            found.append({"technique": str(step.technique), "rounds": graphs, "measured": rows})
        elif isinstance(step, SkippedPoint):
            left.append({"technique": str(step.technique), "reason": step.reason})
        else:
            print(step, flush=True)
    return {
        "model": model,
        "batch": int(batch),
        "prompt": int(prompt),
        "found": found,
        "left": left,
    }


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
    "facts": facts, "ceilings": ceilings, "compile": compile_kernels, "kernels": kernels,
    "sanitizer": sanitizer, "counts": counts, "rates": rates, "calibration": calibration,
    "point": point,
}  # fmt: skip


def main() -> None:
    """Do the unit that the arguments name, and keep its result."""
    name, device, folder = sys.argv[1:4]
    what, *settings = name.split()
    state = SessionState(Path(folder))
    state.folder.mkdir(parents=True, exist_ok=True)
    state.write(name, WORK[what](device, state, *settings))


if __name__ == "__main__":
    main()
