"""How engines are told where evicted blocks go: host memory, and drives."""

from typing import TYPE_CHECKING

from kvsim.emit.flags import flag
from kvsim.emit.served import GB, Served

if TYPE_CHECKING:
    from kvsim.emit.engines import EngineSettings

QUANTO_BITS = (2, 4)


def sglang(served: Served, found: "EngineSettings") -> None:
    """Each GPU's process has its share of host memory, which must exceed its cache on the GPU."""
    if served.host_cache:
        found.add("--enable-hierarchical-cache")
        found.add("--hicache-size", served.host_gb_each)
        if served.host_cache <= served.spread.gpus * served.cache_bytes:
            found.lacks(
                f"{served.host_gb_each} GB of host memory for each GPU beside "
                f"{served.cache_bytes / GB:.0f} GB of cache on it: SGLang starts only if the "
                "host's is the larger"
            )
    if served.nvme_cache:
        found.add("--hicache-storage-backend", "file")
        found.lacks(f"how much of the drive it uses ({served.nvme_gb} GB here)")


def lmcache(served: Served, found: "EngineSettings") -> str:
    """LMCache's own file; every GPU's process has a store of its own.

    Its sizes are called GB and counted in GiB, as vLLM's are.
    """
    for name in ("LMCACHE_CONFIG_FILE", "chunk_size", "local_cpu", "max_local_cpu_size"):
        found.used.append(flag("lmcache", name))
    each = f"{served.host_gib_each:g}"
    file = f"# lmcache.yaml\nchunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: {each}\n"
    if served.nvme_cache:
        found.used += [flag("lmcache", name) for name in ("local_disk", "max_local_disk_size")]
        file += "local_disk: file:///FOLDER_ON_THE_DRIVE\n"
        file += f"max_local_disk_size: {served.nvme_gib_each:g}\n"
    return file


def hf(served: Served, found: "EngineSettings") -> list[tuple[str, str]]:
    """Arguments for a cache that is quantised, or in host memory but for one layer."""
    offload, kivi = served.terms.get("offload"), served.terms.get("kivi")
    if offload is not None:
        found.used.append(flag("hf", "cache_implementation"))
        if float(offload.settings["host_share"]) < 1:
            found.lacks("host_share: all layers but the current one go to host memory")
        return [("cache_implementation", '"offloaded"')]
    if kivi is None:
        return []
    if kivi.settings["bits"] not in QUANTO_BITS:
        found.lacks(f"{kivi}: the quanto backend has 2 and 4 bits")
        return []
    config = {
        "backend": '"quanto"',
        "nbits": int(kivi.settings["bits"]),
        "q_group_size": kivi.settings["group"],
        "residual_length": kivi.settings["residual"],
    }
    names = ("cache_implementation", *(f"cache_config.{name}" for name in config))
    found.used += [flag("hf", name) for name in names]
    found.lacks(
        "keys packed per channel and values per token, as KIVI does: generate packs both alike, "
        "so the loss of quality is another"
    )
    told = ", ".join(f'"{name}": {value}' for name, value in config.items())
    return [("cache_implementation", '"quantized"'), ("cache_config", f"{{{told}}}")]


def no_drive(served: Served, found: "EngineSettings") -> None:
    """An engine that has no setting for drives."""
    if served.nvme_cache:
        found.lacks(f"{served.nvme_gb} GB of NVMe for evicted blocks: --emit lmcache has them")
