"""What a session has found, in a few files that can be kept."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsim.files import replace_text, replacing
from kvsim.validate.runner import Unit
from kvsim.validate.session.state import SessionState
from kvsim.validate.session.work import profile_of

REPORT_FILES = {
    "environment.json": ("facts", "ceilings"),
    "tests.json": ("compile", "kernels", "sanitizer", "counts"),
    "points.json": ("point",),
}
"""Files, and the kinds of units in them."""
COPIED_FILES = {
    ".toml": "profile.toml",
    ".stack.toml": "stack.toml",
    ".samples.jsonl": "samples.jsonl",
}
"""Files beside the profile, and their names in the report."""
MAX_REPORT_BYTES = 16 * 2**20  # of all files together [B]


def write_report(state: SessionState, units: Sequence[Unit], folder: Path) -> list[Path]:
    """Write what there is so far; the files, at most seven.

    Samples that would make it larger than the limit are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = {u.name: found for u in units if (found := state.read(u.name)) is not None}
    written = []
    for name, kinds in REPORT_FILES.items():
        part = {key: value for key, value in results.items() if key.split()[0] in kinds}
        if part:
            written.append(_write(folder / name, part))
    kernels = {"best_shares": shares(state), **results.get("rates", {})}
    written.append(_write(folder / "kernels.json", kernels))
    profile = profile_of(state)
    for ending, name in COPIED_FILES.items():
        source = Path() if profile is None else profile.with_suffix(ending)
        if not source.is_file():
            continue
        size = sum(path.stat().st_size for path in written) + source.stat().st_size
        if size < MAX_REPORT_BYTES:
            with replacing(folder / name) as draft:
                shutil.copyfile(source, draft)
            written.append(folder / name)
    return written


def shares(state: SessionState) -> dict[str, Any]:
    """Of every kernel's samples, the best share of the measured bandwidth and of the peak.

    Empty before there is a calibration, and where a full bundle has left its samples out.
    """
    profile = profile_of(state)
    if profile is None or not profile.with_suffix(".samples.jsonl").is_file():
        return {}
    from kvsim.evidence.machine.samples import read_samples
    from kvsim.machines.profiles import load_hardware

    hardware = load_hardware(profile)
    _, samples = read_samples(profile.with_suffix(".samples.jsonl"))
    found: dict[str, dict[str, float]] = {}
    for s in samples:
        bytes_ = float(s.op.bytes.get("hbm", 0.0))
        rates = {
            "bandwidth": bytes_ / s.seconds / hardware.links["hbm"].bandwidth,
            "arithmetic": float(s.op.flops) / s.seconds / hardware.flops["fp16"],
        }
        best = found.setdefault(f"{s.benchmark} {s.op.kernel}", {"samples": 0.0})
        best["samples"] += 1
        for name, rate in rates.items():
            best[name] = max(best.get(name, 0.0), rate)
    return found


def _write(path: Path, part: Mapping[str, object]) -> Path:
    replace_text(path, json.dumps(part, indent=1, default=str) + "\n")
    return path
