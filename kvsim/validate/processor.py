"""Cores, cache and memory of the host that this process may use.

Containers are given a share of a machine, and the kernel says which. A machine with several NUMA
nodes is used one node at a time: memory of another node would be measured as if it were near.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvsim.files import system_text
from kvsim.frozen import frozen

SYSTEM_ROOT = Path("/")
UNKNOWN_CACHE = 2**25
"""Where the kernel does not say: a usual last-level cache. [B]"""


@frozen
class Processor:
    """The part of the host's processor that is used."""

    cpus: tuple[int, ...]  # CPUs of one NUMA node
    cores: int  # number of cores that these are worth under a CPU quota
    cache: int  # size of their last-level caches [B]
    node: int  # index of the NUMA node
    nodes: int  # number of NUMA nodes of the machine

    @classmethod
    def detect(cls, root: Path = SYSTEM_ROOT) -> "Processor":
        """Find the NUMA node with the most CPUs that this process may run on."""
        allowed = _allowed(root)
        nodes = {n: cpus & allowed for n, cpus in _nodes(root).items()} or {0: allowed}
        node = max(sorted(nodes), key=lambda n: len(nodes[n]))
        cpus = tuple(sorted(nodes[node] or allowed))
        cores = max(1, min(len(cpus), int(_quota(root))))
        return cls(cpus, cores, _cache(root, cpus), node, len(nodes))

    @property
    def summary(self) -> str:
        """Describe the processor in one line."""
        more = f", node {self.node} of {self.nodes}" if self.nodes > 1 else ""
        limited = f" of {len(self.cpus)}" if self.cores < len(self.cpus) else ""
        return f"{self.cores}{limited} cores{more}, {self.cache / 2**20:.0f} MiB of cache"

    def bind(self) -> None:
        """Bind the process to the CPUs of the node, so that its memory is local."""
        if self.nodes > 1 and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cpus)


def available_memory(root: Path = SYSTEM_ROOT) -> int:
    """Measure the memory that kernel and container let this process allocate. [B]"""
    found = re.search(r"MemAvailable:\s+(\d+) kB", system_text(root / "proc/meminfo"))
    free = int(found[1]) * 1024 if found else 2**63  # not Linux
    for limit, used in _memory_limits(root):
        free = min(free, max(0, limit - used))
    return free


def memory_limit(root: Path = SYSTEM_ROOT) -> int:
    """Read the container's memory limit.

    Returns
    -------
    int
        Limit; 2**63 if there is none. [B]
    """
    return min((limit for limit, _ in _memory_limits(root)), default=2**63)


def _allowed(root: Path) -> set[int]:
    if root == SYSTEM_ROOT:
        return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else {0}
    return _numbers(system_text(root / "sys/devices/system/cpu/online"))


def _nodes(root: Path) -> dict[int, set[int]]:
    """Return the CPUs of every NUMA node that has any."""
    places = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(p.name[4:]): _numbers(system_text(p / "cpulist")) for p in places}
    return {node: cpus for node, cpus in found.items() if cpus}


def _cache(root: Path, cpus: tuple[int, ...]) -> int:
    """Return the size of the CPUs' last-level caches, counting shared ones once. [B]"""
    shared: dict[tuple[int, ...], int] = {}
    for cpu in cpus:
        sizes = []
        for place in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            size = re.fullmatch(r"(\d+)([KM])", system_text(place / "size").strip())
            if size:
                among = tuple(sorted(_numbers(system_text(place / "shared_cpu_list")) or {cpu}))
                sizes.append((int(size[1]) * {"K": 2**10, "M": 2**20}[size[2]], among))
        if sizes:
            largest, among = max(sizes)
            shared[among] = largest
    return sum(shared.values()) or UNKNOWN_CACHE


def _quota(root: Path) -> float:
    """Return the CPU time that the container may use. [cores]"""
    found = [float("inf")]
    for folder in _groups(root):
        limit = system_text(folder / "cpu.max").split()
        if not limit:  # the older kind of groups
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limit = [system_text(folder / "cpu" / name).strip() for name in names]
        if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit() and int(limit[1]):
            found.append(int(limit[0]) / int(limit[1]))
    return min(2.0**31, *found)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory of each of the container's groups. [B]"""
    for folder in _groups(root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            most, now = (system_text(folder / name).strip() for name in (limit, used))
            if most.isdigit():
                yield int(most), _reclaimable(folder, int(now or 0))


def _reclaimable(folder: Path, used: int) -> int:
    """Return a group's memory use without files that the kernel can drop. [B]"""
    stat = system_text(folder / "memory.stat") or system_text(folder / "memory/memory.stat")
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
    return max(0, used - int(found[1]) if found else used)


def _groups(root: Path) -> list[Path]:
    """Return the container's control group and its parents."""
    top = root / "sys/fs/cgroup"
    found = re.search(r"^0::/(.*)$", system_text(root / "proc/self/cgroup"), re.M)
    folder = top / found[1] if found and found[1] else top
    folders = [folder, *folder.parents]
    return [f for f in folders if f == top or top in f.parents] or [top]


def _numbers(text: str) -> set[int]:
    """Return the integers in a list of ranges such as ``0-3,8``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found
