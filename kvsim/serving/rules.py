"""How an engine schedules requests: the settings users know from their serving engine."""

from dataclasses import dataclass, fields
from math import isfinite

from kvsim import limits
from kvsim.errors import InputError

PREFILLS = ("chunked", "whole")
PRIORITIES = ("decode", "prefill")
PREEMPTIONS = ("recompute", "swap")
ADMISSIONS = ("prompt", "chunk")


@dataclass(frozen=True)
class Rules:
    """Scheduling of one replica, with the defaults of vLLM 0.19.

    Each step has a budget of ``max_tokens``. ``chunked`` prefill fills it with decoding sequences
    and parts of prompts together, whichever ``priority`` says first; ``whole`` prefill gives
    prompts steps of their own, which decoding waits for. A sequence that finds no memory for its
    next token preempts the one admitted last: its cache is dropped and computed again, or swapped
    to host memory.

    Raises
    ------
    InputError
        For a setting out of range, named by its option.
    """

    max_seqs: int = 256  # sequences in a step at most [sequences]
    max_tokens: int = 2048  # tokens of all sequences in a step at most [tokens]
    block_tokens: int = 16  # tokens per KV block [tokens]
    blocks: int = 0  # KV blocks per replica; 0: what the memory of the GPU leaves
    prefill: str = "chunked"
    priority: str = "decode"
    preemption: str = "recompute"
    admission: str = "prompt"  # memory that must be free for a prompt to begin: all it needs, or
    # only what its first part needs
    prefix_caching: bool = False  # computed prompt blocks stay until their memory is needed
    host_cache: float = 0.0  # host memory that evicted prompt blocks and swapped sequences use [B]

    def __post_init__(self) -> None:
        choices = {
            "prefill": PREFILLS,
            "priority": PRIORITIES,
            "preemption": PREEMPTIONS,
            "admission": ADMISSIONS,
        }
        for f in fields(self):
            value, option = getattr(self, f.name), f"--{f.name.replace('_', '-')}"
            if f.name in choices:
                if value not in choices[f.name]:
                    expected = " or ".join(choices[f.name])
                    raise InputError(f"{option}: got {value!r}; expected {expected}")
            elif f.name == "host_cache":
                if not (isfinite(value) and value >= 0):
                    raise InputError(f"{option}: got {value!r}; expected 0 or more bytes")
            elif f.name != "prefix_caching":
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{option}: got {value!r}; expected a whole number")
                limits.check(option, value)
