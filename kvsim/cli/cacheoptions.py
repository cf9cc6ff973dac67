"""Options of the memories that keep prefix blocks besides the GPU's."""

from typing import TYPE_CHECKING, Annotated, Any

from kvsim.cli.arguments import count, gib, number, option, seconds
from kvsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsim.serving.pools import TwoPools
    from kvsim.serving.rules import Rules

GB = 1e9  # [B]
AUTO = "auto"  # of --prefix-load: every way is played, the best is kept

HostCache = Annotated[
    str | None, option("--host-cache", "GIB", "Host memory for stored and swapped cache.")
]
NvmeCache = Annotated[
    str | None, option("--nvme-cache", "GIB", "NVMe space of each replica for stored cache.")
]
RemoteCache = Annotated[
    str | None, option("--remote-cache", "GIB", "A store for cache that all replicas share.")
]
CacheTtl = Annotated[
    str | None,
    option("--cache-ttl", "TIME", "Stored blocks are forgotten so long after their last use."),
]
CacheBlock = Annotated[
    str | None, option("--cache-block", "N", "Tokens that are stored and loaded together.")
]
PrefixLoad = Annotated[
    str | None,
    option(
        "--prefix-load",
        "HOW",
        "Stored blocks of a prompt: load, recompute, the faster, split (recompute the first ones "
        "while the others are loaded), or auto, if not given: the one with the least mean TTFT.",
    ),
]
NvmeRead = Annotated[str | None, option("--nvme-read", "GB/S", "Rate of each replica's drive.")]
NvmeWrite = Annotated[str | None, option("--nvme-write", "GB/S", "Rate of each replica's drive.")]
Nic = Annotated[str | None, option("--nic", "GB/S", "Each replica's network, in one direction.")]
GpuShare = Annotated[
    str | None, option("--gpu-memory-utilization", "X", "Share of GPU memory to use; 0.9.")
]

PrefillReplicas = Annotated[
    str | None,
    option("--prefill-replicas", "N", "Of --replicas: they read prompts, the others decode."),
]
Transfer = Annotated[
    str | None,
    option("--transfer", "HOW", "How caches go to the others: layers (as they are made) or whole."),
]


def two_pools(
    replicas: int, prefill: str | None, transfer: str | None, nic: str | None
) -> "TwoPools | None":
    """Replicas by what they do; None where all do both.

    Raises
    ------
    InputError
        If a pool would be empty, or a way of transfer is given without pools.
    """
    from kvsim.serving.pools import TRANSFERS, TwoPools
    from kvsim.serving.rules import NIC_RATE

    if prefill is None:
        if transfer is not None:
            raise InputError("--transfer: does nothing without --prefill-replicas; add it")
        return None
    first = count("--prefill-replicas", prefill)
    rate = NIC_RATE if nic is None else number("--nic", nic) * GB
    return TwoPools(first, replicas - first, transfer or TRANSFERS[0], rate)


def ways_to_load(rules: "Callable[[str], Rules]", given: str | None) -> "tuple[Rules, ...]":
    """Rules with the way of loading prefixes that was given; with auto, those with each way.

    Parameters
    ----------
    rules : the rules with a way of loading.
    given : the way; None for auto where any memory besides the GPU keeps prefix blocks.

    Raises
    ------
    InputError
        For an unknown way.
    """
    from kvsim.serving.rules import LOADS, SPLIT

    if given is None:
        usual = rules(LOADS[SPLIT])
        if not usual.tiers:
            return (usual,)
        given = AUTO
    if given not in (*LOADS, AUTO):
        raise InputError(
            f"--prefix-load: got {given[:40]!r}; expected {', '.join(LOADS)} or {AUTO}"
        )
    return tuple(map(rules, LOADS if given == AUTO else (given,)))


def memories(given: dict[str, str | None], prefix_load: str) -> dict[str, Any]:
    """Settings of ``Rules`` from what was given under their names."""
    found: dict[str, Any] = {"prefix_load": prefix_load}
    for name, text in given.items():
        if text is None:
            continue
        option_name = f"--{name.replace('_', '-')}"
        if name == "cache_ttl":
            found[name] = seconds(option_name, text, 1e7)
        elif name == "cache_block":
            found[name] = count(option_name, text)
        elif name.endswith("_cache"):
            found[name] = gib(option_name, text)
        else:
            found[name] = number(option_name, text) * GB
    return found


def usable_memory(gpu_memory: str | None, share: str | None, whole: float) -> float | None:
    """Memory of each GPU that the engine may use; None for the usual share. [B]

    Raises
    ------
    InputError
        If both are given.
    """
    if share is None:
        return None if gpu_memory is None else gib("--gpu-memory", gpu_memory)
    if gpu_memory is not None:
        raise InputError(
            "--gpu-memory-utilization: --gpu-memory says the same in GiB; give one of them"
        )
    return number("--gpu-memory-utilization", share, share=True) * whole
