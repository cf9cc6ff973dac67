"""What a measured card should reach: the shipped profile of its model."""

import re
from collections.abc import Mapping

from kvsim.evidence.machine.solve import Known
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import hardware_names, load_hardware

FORMS = ("pcie", "nvl", "ada")  # words that distinguish cards of one model number
ALIKE = (0.7, 1.4)  # memory over the profile's, within which a card may be the same
LOW = {"compute": 0.55, "hbm": 0.75, "h2d": 0.75, "d2h": 0.75}
"""Shares of a shipped number below which something is wrong: a power cap, a narrow link."""


def find_datasheet(device: str, memory: float) -> Hardware | None:
    """The shipped profile of a card by the name its driver gives, if there is one.

    Parameters
    ----------
    memory : what its driver reports. [B]
    """
    numbers = _numbers(device)
    named = [load_hardware(name) for name in hardware_names() if numbers & _numbers(name)]
    alike = [h for h in named if ALIKE[0] < memory / h.gpu_memory < ALIKE[1]]

    def differs(h: Hardware) -> tuple[bool, int]:
        forms = sum((form in h.name) != (form in device.lower()) for form in FORMS)
        return abs(memory / h.gpu_memory - 1) > 0.1, forms

    return min(alike, key=differs, default=None)


def _numbers(name: str) -> set[str]:
    """Model numbers in a name, with the letters before them and without."""
    found = re.findall(r"(?:rtx|gtx)?([a-z]*\d{1,4}[a-z]*)\b", name.lower().replace("rtx ", "rtx"))
    return {number for number in found if not re.fullmatch(r"\d+(gb|g)?|hbm\d\w*|sxm\d", number)
            or re.fullmatch(r"\d{4}", number)}  # fmt: skip


def stated(hardware: Hardware | None, key: str) -> float | None:
    """What a profile says under a key of its file, of rates and latencies."""
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
    """Measured rates far below what the card's data sheet says."""
    short = []
    for key, known in found.items():
        reference, limit = stated(hardware, key), LOW.get(key.partition(".")[0], 0.0)
        if reference and not key.endswith("latency_s") and known.value < limit * reference:
            short.append(
                f"{key} is {known.value:.3g}, {100 * known.value / reference:.0f} % of the "
                f"data sheet's {reference:.3g}"
            )
    return short
