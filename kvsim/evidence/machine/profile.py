"""A calibration as two files: the machine, and kvsim's own software on it."""

import re
from collections.abc import Mapping

from kvsim.evidence.leastsquares import BLIND
from kvsim.evidence.machine.fit import Calibration
from kvsim.evidence.machine.solve import Known
from kvsim.evidence.stackfile import numbers_text
from kvsim.files import toml_lines
from kvsim.frozen import frozen
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import hardware_names, load_hardware
from kvsim.machines.schema import LINK_NAMES

FORMS = ("pcie", "nvl", "ada")  # words that distinguish cards of one model number
SIMILAR_RATIO = (0.7, 1.4)  # memory over the profile's, within which a card may be the same
LOW = {"compute": 0.55, "hbm": 0.75, "h2d": 0.75, "d2h": 0.75}
"""Shares of a shipped number below which something is wrong: a power cap, a narrow link."""


def find_datasheet(device: str, memory: float) -> Hardware | None:
    """Find the shipped profile of a card by the name its driver gives.

    Parameters
    ----------
    device
        The card's name.
    memory
        Memory that its driver reports. [B]

    Returns
    -------
    Hardware or None
        The best match, if there is one.
    """
    numbers = _numbers(device)
    named = [load_hardware(name) for name in hardware_names() if numbers & _numbers(name)]
    alike = [h for h in named if SIMILAR_RATIO[0] < memory / h.gpu_memory < SIMILAR_RATIO[1]]

    def differs(h: Hardware) -> tuple[bool, int]:
        forms = sum((form in h.name) != (form in device.lower()) for form in FORMS)
        return abs(memory / h.gpu_memory - 1) > 0.1, forms

    return min(alike, key=differs, default=None)


def _numbers(name: str) -> set[str]:
    """Model numbers in a name, with the letters before them and without."""
    found = re.findall(r"(?:rtx|gtx)?([a-z]*\d{1,4}[a-z]*)\b", name.lower().replace("rtx ", "rtx"))
    return {
        number
        for number in found
        if not re.fullmatch(r"\d+(gb|g)?|hbm\d\w*|sxm\d", number) or re.fullmatch(r"\d{4}", number)
    }


def profile_number(hardware: Hardware | None, key: str) -> float | None:
    """Look up a rate or latency of a profile by the key of its file.

    Parameters
    ----------
    hardware
        The profile, if any.
    key
        Dotted key, as ``"hbm.bandwidth_Bps"``.

    Returns
    -------
    float or None
        The number in the key's unit; None where the profile does not state it.
    """
    if hardware is None:
        return None
    table, _, name = key.partition(".")
    if table == "compute":
        if name == "cpu_fp32_FLOPps":
            return None  # shipped profiles assume a host
        return hardware.flops.get(name.removesuffix("_FLOPps"))
    link = hardware.links[table]
    return link.bandwidth if name == "bandwidth_Bps" else link.latency or None


def shortfalls(found: Mapping[str, Known], hardware: Hardware | None) -> list[str]:
    """List measured rates that are far below the card's data sheet.

    Parameters
    ----------
    found
        Measured numbers by key.
    hardware
        The card's shipped profile, if there is one.

    Returns
    -------
    list of str
        One sentence per rate.
    """
    short = []
    for key, known in found.items():
        reference, limit = profile_number(hardware, key), LOW.get(key.partition(".")[0], 0.0)
        if reference and not key.endswith("latency_s") and known.value < limit * reference:
            short.append(
                f"{key} is {known.value:.3g}, {100 * known.value / reference:.0f} % of the "
                f"data sheet's {reference:.3g}"
            )
    return short


BASE = "kvsim"  # the stack that a calibrated one extends
UNVALIDATED = "held-out error not measured yet; kvsim validate --gpu with this profile measures it"


@frozen
class Machine:
    """Properties of a measured machine, as the driver and the operating system report them.

    Attributes
    ----------
    name
        Name of the device, as its driver reports it.
    gpu_memory
        Memory of the GPU. [B]
    host_memory
        Memory of the host. [B]
    context_memory
        GPU memory in use by the driver and libraries before anything is loaded. [B]
    cache
        Size of the L2 cache. [B]
    notes
        Remarks for the profile.
    """

    name: str
    gpu_memory: int
    host_memory: int
    context_memory: int
    cache: int
    notes: tuple[str, ...] = ()


def hardware_text(found: Calibration, machine: Machine, today: str) -> str:
    """Format a calibrated machine as a TOML profile.

    Parameters
    ----------
    found
        The calibration.
    machine
        Properties that the driver reports.
    today
        Date of the measurement.

    Returns
    -------
    str
        Text of the file; each number's source states its uncertainty.
    """
    numbers: dict[str, float] = {k: known.value for k, known in found.hardware.items()}
    sources = {k: source_text(known, today) for k, known in found.hardware.items()}
    given = f"driver, {today}"
    for key, value in (
        ("memory.gpu_capacity_B", machine.gpu_memory),
        ("memory.host_capacity_B", machine.host_memory),
        ("memory.l2_B", machine.cache),
    ):
        numbers[key], sources[key] = float(value), given
    for link in LINK_NAMES:
        for name, other in (("bandwidth_Bps", "h2d.bandwidth_Bps"), ("latency_s", "")):
            key = f"{link}.{name}"
            if key in numbers:
                continue
            if link == "link":
                numbers[key] = numbers[other or "h2d.latency_s"]
                sources[key] = "not measured, there is one device: as h2d"
            else:
                numbers[key] = 0.0
                sources[key] = "no latency of its own: the kernels' minimum times include it"
    told = {"basis": "measured", "device": machine.name, "date": today}
    head = {"title": machine.name, **told, "notes": list(machine.notes)}
    return numbers_text(head, numbers, sources)


def stack_text(found: Calibration, machine: Machine, today: str, error: str = UNVALIDATED) -> str:
    """Format calibrated software as a TOML stack that extends the shipped stack ``kvsim``.

    Parameters
    ----------
    found
        The calibration.
    machine
        Properties that the driver reports.
    today
        Date of the measurement.
    error
        The stack's known error, in words.

    Returns
    -------
    str
        Text of the file; each number's source states its uncertainty.
    """
    numbers = {k: known.value for k, known in found.stack.items()}
    sources = {k: source_text(known, today) for k, known in found.stack.items()}
    numbers["memory.context_memory_B"] = float(max(machine.context_memory, 1))
    sources["memory.context_memory_B"] = f"in use before anything was loaded, {today}"
    head = {
        "title": f"kvsim's own implementations on {machine.name}",
        "basis": "calibrated",
        "error": error,
        "extends": BASE,
        "device": machine.name,
        "date": today,
        "fit": f"microbenchmarks, and ops of short runs that no validation uses, of {today}",
    }
    # a CPU does what it is asked to at once, by kernels of its own
    flags = {} if "time.launch_s" in found.stack else {"time.counted_launches": False}
    return numbers_text(head, numbers, sources, flags=flags)


def with_error(text: str, error: str) -> str:
    """Replace the statement of error in a stack's TOML.

    Parameters
    ----------
    text
        Text of the file.
    error
        The new statement.

    Returns
    -------
    str
        Text of the changed file.
    """
    lines = text.splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if line.startswith("error = "))
    return "".join([*lines[:place], toml_lines({"error": error}), *lines[place + 1 :]])


def source_text(known: Known, today: str) -> str:
    """Describe where a calibrated number comes from and how well it is known.

    Parameters
    ----------
    known
        The number with its errors.
    today
        Date of the measurement.

    Returns
    -------
    str
        The source, as a stack or profile states it.
    """
    parts = [f"measured on {today}, {known.samples} samples of {known.benchmark}"]
    if known.error <= BLIND:
        parts.append(f"+-{100 * known.error:.2g} %")
    else:
        parts.append("not identified by them")
    parts.append(f"which it meets within {100 * known.residual:.2g} % (median)")
    if known.confused:
        parts.append(f"not separable from {', '.join(known.confused)}")
    return "; ".join(parts)
