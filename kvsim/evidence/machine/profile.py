"""A calibration as two files: the machine, and kvsim's own software on it."""

from kvsim.evidence.leastsquares import BLIND
from kvsim.evidence.machine.fit import Calibration
from kvsim.evidence.machine.solve import Known
from kvsim.evidence.stackfile import numbers_text
from kvsim.files import toml_lines
from kvsim.frozen import frozen

BASE = "kvsim"  # the stack that a calibrated one extends
LINKS = ("hbm", "dram", "h2d", "d2h", "link")
UNSEEN = "held-out error not measured yet; kvsim validate --gpu with this profile measures it"


@frozen
class Machine:
    """What a profile says of a machine besides its rates."""

    name: str  # as the driver says
    gpu_memory: int  # [B]
    host_memory: int  # [B]
    context_memory: int  # what driver and libraries hold before anything is loaded [B]
    cache: int  # [B]
    notes: tuple[str, ...] = ()


def hardware_text(found: Calibration, machine: Machine, today: str) -> str:
    """TOML of the machine, every number with its uncertainty as its source."""
    numbers: dict[str, float] = {k: known.value for k, known in found.hardware.items()}
    sources = {k: told(known, today) for k, known in found.hardware.items()}
    given = f"driver, {today}"
    for key, value in (
        ("memory.gpu_capacity_B", machine.gpu_memory),
        ("memory.host_capacity_B", machine.host_memory),
        ("memory.l2_B", machine.cache),
    ):
        numbers[key], sources[key] = float(value), given
    for link in LINKS:
        for name, other in (("bandwidth_Bps", "h2d.bandwidth_Bps"), ("latency_s", "")):
            key = f"{link}.{name}"
            if key in numbers:
                continue
            if link == "link":
                numbers[key] = numbers[other or "h2d.latency_s"]
                sources[key] = "not measured, there is one device: as h2d"
            else:
                numbers[key] = 0.0
                sources[key] = "none of its own: kernels' floors hold it"
    head = {
        "title": machine.name, "basis": "measured", "device": machine.name, "date": today,
        "notes": list(machine.notes),
    }  # fmt: skip
    return numbers_text(head, numbers, sources)


def stack_text(found: Calibration, machine: Machine, today: str, error: str = UNSEEN) -> str:
    """TOML of the software, extending the shipped stack ``kvsim`` by what was measured."""
    numbers = {k: known.value for k, known in found.stack.items()}
    sources = {k: told(known, today) for k, known in found.stack.items()}
    numbers["memory.context_memory_B"] = float(max(machine.context_memory, 1))
    sources["memory.context_memory_B"] = f"in use before anything was loaded, {today}"
    head = {
        "title": f"kvsim's own implementations on {machine.name}", "basis": "calibrated",
        "error": error, "extends": BASE, "device": machine.name, "date": today,
        "fit": f"microbenchmarks, and ops of short runs that no validation uses, of {today}",
    }  # fmt: skip
    # a CPU does what it is asked to at once, by kernels of its own
    flags = {} if "time.launch_s" in found.stack else {"time.counted_launches": False}
    return numbers_text(head, numbers, sources, flags=flags)


def with_error(text: str, error: str) -> str:
    """A stack's TOML with another statement of its error."""
    lines = text.splitlines(keepends=True)
    stated = next(i for i, line in enumerate(lines) if line.startswith("error = "))
    return "".join([*lines[:stated], toml_lines({"error": error}), *lines[stated + 1 :]])


def told(known: Known, today: str) -> str:
    """Where a number comes from and how well it is known."""
    parts = [f"measured on {today}, {known.samples} samples of {known.benchmark}"]
    if known.error <= BLIND:
        parts.append(f"+-{100 * known.error:.2g} %")
    else:
        parts.append("not identified by them")
    parts.append(f"which it meets within {100 * known.residual:.2g} % (median)")
    if known.confused:
        parts.append(f"not separable from {', '.join(known.confused)}")
    return "; ".join(parts)
