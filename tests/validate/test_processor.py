"""What a process may use of machines that are not here: caches, nodes, containers."""

from pathlib import Path

import pytest

from kvsim.validate.processor import Processor, available_memory, memory_limit

GIB = 2**30


def write(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, cores: int, cores_per_cache: int, cache: str, nodes: int = 1) -> Path:
    """A tree as the kernel shows it."""
    texts = {
        "sys/devices/system/cpu/online": f"0-{cores - 1}\n",
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
    }
    for cpu in range(cores):
        first = cpu // cores_per_cache * cores_per_cache
        last = min(first + cores_per_cache, cores) - 1
        place = f"sys/devices/system/cpu/cpu{cpu}/cache"
        texts[f"{place}/index0/size"] = "48K\n"
        texts[f"{place}/index0/shared_cpu_list"] = f"{cpu}\n"
        texts[f"{place}/index3/size"] = f"{cache}\n"
        texts[f"{place}/index3/shared_cpu_list"] = f"{first}-{last}\n"
    each = cores // nodes
    for node in range(nodes):
        where = f"sys/devices/system/node/node{node}/cpulist"
        texts[where] = f"{node * each}-{(node + 1) * each - 1}\n"
    return write(root, texts)


@pytest.mark.parametrize(
    ("cores", "per_cache", "cache", "nodes", "expected"),
    [
        (2, 2, "491520K", 1, (2, 480)),  # a virtual machine that shows its whole host's cache
        (8, 4, "8M", 1, (8, 16)),
        (128, 8, "32M", 2, (64, 256)),  # one node of two, eight caches of it
        (4, 4, "1048576K", 1, (4, 1024)),
    ],
)
def test_caches_that_cores_share_count_once_and_one_node_is_used(
    cores: int, per_cache: int, cache: str, nodes: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    found = Processor.detect(machine(tmp_path, cores, per_cache, cache, nodes))
    assert (found.cores, found.cache / 2**20) == expected
    assert (found.nodes, found.node) == (nodes, 0)


def test_a_machine_that_says_nothing_has_a_usual_cache(tmp_path: Path) -> None:
    found = Processor.detect(write(tmp_path, {"sys/devices/system/cpu/online": "0-3"}))
    assert (found.cores, found.cache, found.nodes) == (4, 2**25, 1)
    assert available_memory(tmp_path) == memory_limit(tmp_path) == 2**63


def test_containers_limit_time_and_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, 16, 16, "32M")
    write(root, {
        "proc/self/cgroup": "0::/pod/one\n",
        "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/pod/one/memory.max": "max\n",
        "sys/fs/cgroup/pod/one/cpu.max": "350000 100000\n",
    })  # fmt: skip
    assert available_memory(root) == 6 * GIB  # files in the page cache can be forgotten
    assert memory_limit(root) == 8 * GIB
    assert Processor.detect(root).cores == 3


def test_the_older_kind_of_containers(tmp_path: Path) -> None:
    root = machine(tmp_path, 4, 4, "32M")
    write(root, {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert available_memory(root) == GIB
    assert Processor.detect(root).cores == 4
