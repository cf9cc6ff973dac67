"""Description of a device, its clocks, and signs that make measurements suspicious."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Lock, Thread

import torch

from kvsim.errors import InputError
from kvsim.files import system_text
from kvsim.frozen import frozen
from kvsim.validate.bench.work import Bench
from kvsim.validate.machine import free_memory
from kvsim.validate.processor import Processor, memory_limit
from kvsim.validate.times.clock import keep_busy

WATCHED_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.active",
)
"""What ``nvidia-smi --query-gpu`` is asked."""
WATCH_SECONDS = 1.0  # [s]

Ask = Callable[[], Mapping[str, str]]
Since = Callable[[], dict[str, str]]
"""What was seen since it was last asked, by field: one value, or ``lowest to highest``."""


@contextmanager
def watched(ask: Ask, every: float = WATCH_SECONDS) -> Iterator[Since]:
    """Query the driver at intervals while the block runs, in a separate thread.

    Parameters
    ----------
    ask
        Returns the driver's current values by field; empty if it does not answer.
    every
        Time between two queries. [s]
    """
    seen: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    lock, over = Lock(), Event()

    def look() -> None:
        found = ask()
        with lock:
            for name, value in found.items():
                seen.setdefault(name, []).append(value)

    def keep_looking() -> None:
        while not over.wait(every):
            look()

    def collect() -> dict[str, str]:
        if not (seen or last):
            look()
        with lock:
            last.update({name: _range(values) for name, values in seen.items()})
            seen.clear()
        return dict(last)  # what took less than a second ran at what was seen before it

    thread = Thread(target=keep_looking, daemon=True)
    thread.start()
    try:
        yield collect
    finally:
        over.set()
        thread.join()


def _range(values: list[str]) -> str:
    """Format one value, or the smallest and the largest; texts in order of appearance."""
    different = list(dict.fromkeys(values))
    try:
        different.sort(key=float)
    except ValueError:
        return ", ".join(different)
    return different[0] if len(different) == 1 else f"{different[0]} to {different[-1]}"


CPUINFO = Path("/proc/cpuinfo")
STATM = Path("/proc/self/statm")
CPU_MOST = 2**31  # what one work's inputs may take where caches are small [B]
NEEDED = 2**31  # a suite with little less memory would measure caches [B]
MAX_INPUT_BYTES = 2**33  # what one work's inputs may take [B]
BUSY = 0.1  # share of a GPU's memory that others may hold
QUERY = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "power.default_limit",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "ecc.mode.current",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)
"""What ``nvidia-smi --query-gpu`` is asked."""
HBM_BUS = 1024  # bits that a bus of HBM has at least
HBM_CARDS = r"HBM|\b(P100|V100|A30|A100|A800|H20|H100|H200|H800|GH200|B100|B200|GB200|B300)\b"
LOOKED_AT = 0.5  # how long a card is kept busy while its driver is asked [s]


@frozen
class Device:
    """One device as its driver describes it.

    Attributes
    ----------
    name
        Name of the device.
    memory
        Size of its memory. [B]
    facts
        Driver, clocks, power and link, which are recorded with the samples.
    others
        Other processes that use it.
    """

    name: str
    memory: int
    facts: Mapping[str, str]
    others: int = 0


def describe(device: torch.device) -> Device:
    """Describe a device: its name, memory, and properties that the driver reports."""
    return _cuda(device) if device.type == "cuda" else _cpu()


def place(device: torch.device, quick: bool) -> Bench:
    """Describe the device of the suite and its limits.

    On a CPU one core is left free, for the copies that stand for the link between host and GPU.

    Parameters
    ----------
    device
        As PyTorch names it.
    quick
        Whether fewer and smaller cases are run.

    Raises
    ------
    InputError
        If less memory is free than the suite needs, or another process uses the GPU.
    """
    free = free_memory(device)
    if free < NEEDED:
        raise InputError(
            f"--device: {device} has {free / 2**30:.1f} GiB free, expected at least "
            f"{NEEDED / 2**30:.0f}; end the processes that use its memory"
        )
    if device.type == "cpu":
        cache = Processor.detect().cache
        return Bench(device, quick, cache, min(free // 2, max(CPU_MOST, 8 * cache)))
    total = torch.cuda.mem_get_info(device)[1]
    if free < (1 - BUSY) * total:
        raise InputError(
            f"--device: another process holds {(total - free) / 2**30:.1f} GiB of {device}; "
            f"measurements beside it would be wrong, end it or choose another GPU"
        )
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    return Bench(device, quick, cache, min(free // 4, MAX_INPUT_BYTES))


def context_memory(device: torch.device) -> int:
    """Measure the GPU memory that driver and libraries use before anything is loaded.

    Parameters
    ----------
    device
        The device; on a CPU the process's own memory is measured.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free - torch.cuda.memory_reserved(device))
    pages = int((system_text(STATM).split() or ["0", "0"])[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_memory() -> int:
    """Return the host's memory, or less if the process is limited to less. [B]"""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(whole, memory_limit())


def header(device: Device, quick: bool) -> dict[str, str | int | bool]:
    """Return the properties that samples must have in common to belong to one measurement.

    Parameters
    ----------
    quick
        Whether fewer and smaller cases are run.

    Returns
    -------
    dict
        Name and memory of the device [B], ``quick``, and versions of driver and libraries.
    """
    kept = ("driver_version", "threads", "torch", "cuda", "power.limit")
    facts = {key: device.facts[key] for key in kept if key in device.facts}
    if "driver_version" in facts:  # machines of one kind differ in its patch
        facts["driver_version"] = facts["driver_version"].partition(".")[0]
    return {"device": device.name, "memory": device.memory, "quick": quick, **facts}


def conditions(device: Device, place: Bench) -> list[str]:
    """Describe the conditions of a measurement for readers of its numbers.

    Parameters
    ----------
    place
        The device and its limits for benchmarks.

    Returns
    -------
    list of str
        One sentence or list of facts each.
    """
    said = [", ".join(f"{key} {value}" for key, value in device.facts.items())]
    if place.on_cpu:
        said.append(
            f"a CPU stands for the GPU: {device.facts['threads']} threads compute in bf16 (under "
            f"fp16), one more copies between two pools of memory, which stands for the link"
        )
    return said


def compute_threads() -> int:
    """Return the number of CPU threads that represent a GPU: all cores but one, which copies."""
    return max(1, Processor.detect().cores - 1)


def suspicions(device: Device) -> list[str]:
    """List signs that a device is slower than others of its kind, such as a power cap.

    Returns
    -------
    list of str
        One sentence each; empty if there are none.
    """
    f, found = device.facts, []
    limit, default = _figure(f, "power.limit"), _figure(f, "power.default_limit")
    if limit and default and limit < 0.99 * default:
        found.append(f"power is capped at {limit:.0f} of {default:.0f} W")
    for what, name in (("gen", "generation"), ("width", "width")):
        now, most = (_figure(f, f"pcie.link.{what}.{end}") for end in ("current", "max"))
        if now and most and now < most:
            found.append(f"the PCIe link runs at {name} {now:.0f} of {most:.0f}")
    if f.get("ecc.mode.current") == "Enabled" and f.get("memory kind") == "GDDR":
        found.append("ECC is on; on cards without HBM it costs bandwidth")
    if device.others:
        found.append(f"{device.others} other processes are using the GPU")
    if f.get("numa nodes", "1") not in ("0", "1"):
        found.append(
            f"the host has {f['numa nodes']} NUMA nodes; pin this process to the GPU's "
            f"(numactl --cpunodebind)"
        )
    busy = _figure(f, "load average")
    cores = _figure(f, "cores")
    if device.facts.get("kind") == "cpu" and busy and cores and busy > 0.5 * cores:
        found.append(f"other work ran beside: load average {busy:.1f} on {cores:.0f} cores")
    return found


def _cpu() -> Device:
    found = re.search(r"model name\s*:\s*(.+)", system_text(CPUINFO))
    processor = Processor.detect()
    cores = processor.cores
    name = f"{found[1].strip() if found else 'CPU'}, {cores} cores"
    facts = {
        "kind": "cpu",
        "cores": str(cores),
        "threads": str(torch.get_num_threads()),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "numa node": f"{processor.node} of {processor.nodes}",
        "cache": f"{processor.cache / 2**20:.0f} MiB",
        "torch": torch.__version__,
    }
    return Device(name, host_memory(), facts)


def running(device: torch.device) -> AbstractContextManager[Since]:
    """Record clocks and temperatures of a GPU while a block runs; nothing on a CPU."""
    if device.type == "cpu":
        return nullcontext(dict)
    card = _card(device.index or 0)
    return watched(
        lambda: smi_facts(lambda f: _smi(card, f"--query-gpu={','.join(f)}"), WATCHED_FIELDS)
    )


def _card(index: int) -> str:
    """Return the driver's name of a card: its UUID, as PyTorch may count cards differently."""
    properties = torch.cuda.get_device_properties(index)
    return f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else str(index)


def _cuda(device: torch.device) -> Device:
    index = device.index or 0
    properties = torch.cuda.get_device_properties(index)
    keep_busy(LOOKED_AT)  # clocks and link rest with an idle card
    card = _card(index)
    facts = smi_facts(lambda fields: _smi(card, f"--query-gpu={','.join(fields)}"))
    facts["memory kind"] = memory_kind(properties.name, getattr(properties, "memory_bus_width", 0))
    facts["attention"] = "flash, else memory-efficient, else plain; never cuDNN"
    facts |= {"kind": "cuda", "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    facts |= {"numa nodes": str(Processor.detect().nodes)}
    pids = re.findall(r"\d+", _smi(card, "--query-compute-apps=pid"))
    own = (os.getpid(), os.getppid())  # a session's worker has the card too, and waits
    others = sum(int(pid) not in own for pid in pids)
    return Device(properties.name, int(properties.total_memory), facts, others)


def smi_facts(ask: Callable[[Sequence[str]], str], fields: Sequence[str] = QUERY) -> dict[str, str]:
    """Query ``nvidia-smi`` for some fields.

    Parameters
    ----------
    ask
        Runs ``nvidia-smi`` for a list of fields. As one unknown field spoils the whole answer, the
        fields are then asked for one by one.
    fields
        Names of the fields.

    Returns
    -------
    dict of str to str
        Values by field, without fields that card or driver lack.
    """
    found = _values(fields, ask(fields))
    if not found:
        for field in fields:
            found |= _values([field], ask([field]))
    return found


def _values(fields: Sequence[str], answer: str) -> dict[str, str]:
    values = [value.strip() for value in answer.strip().split(",")]
    if len(values) != len(fields) or "not a valid field" in answer:
        return {}
    known = zip(fields, values, strict=True)
    return {key: value for key, value in known if value and not value.startswith("[")}


def memory_kind(name: str, bus: int) -> str:
    """Tell whether a card's memory is HBM or GDDR, by the width of its bus, else by its name.

    Parameters
    ----------
    name
        The card, as its driver names it.
    bus
        Width of its memory bus; 0 if it is not known. [bit]

    Returns
    -------
    str
        "HBM" or "GDDR".
    """
    if bus:
        return "HBM" if bus >= HBM_BUS else "GDDR"
    return "HBM" if re.search(HBM_CARDS, name) else "GDDR"


def _smi(card: str, query: str) -> str:
    command = ["nvidia-smi", f"--id={card}", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _figure(facts: Mapping[str, str], key: str) -> float | None:
    try:
        return float(facts[key])
    except (KeyError, ValueError):
        return None
