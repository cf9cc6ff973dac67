"""What ``torch.cuda`` says of the GPU that ``pretended`` pretends."""

from contextlib import nullcontext
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
MEMORY = 2**31  # as little as a benchmark asks for, since the host has to hold it [B]
CACHE = 2**16  # [B]
HELD = 2**20  # at most, as an allocator would tell [B]


class _Event:
    """A moment of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = perf_counter()

    def elapsed_time(self, later: "_Event") -> float:
        return 1e3 * (later.at - self.at)

    def synchronize(self) -> None:
        return None


class _Stream:
    """Work runs when it is queued: an order that streams and marks allow."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = GPU

    def record_event(self) -> _Event:
        made = _Event()
        made.record()
        return made

    def wait_event(self, event: _Event) -> None:
        assert event.at

    def wait_stream(self, other: "_Stream") -> None:
        return None

    def synchronize(self) -> None:
        return None


def stands_for_cuda() -> dict[str, Any]:
    properties = SimpleNamespace(
        name="Pretended GPU", total_memory=MEMORY, memory_bus_width=5120, uuid="0",
        multi_processor_count=132, L2_cache_size=CACHE, major=CAPABILITY[0], minor=CAPABILITY[1],
    )  # fmt: skip
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    current = _Stream()
    nothing = lambda *_, **__: None  # noqa: E731
    return {
        "Event": _Event, "Stream": _Stream, "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: current, "synchronize": nothing,
        "set_device": nothing, "device": lambda device: nullcontext(),
        "device_count": lambda: 1, "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY), "_sleep": nothing,
        "memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: HELD, "reset_peak_memory_stats": nothing,
        "cudart": lambda: runtime,
    }  # fmt: skip
