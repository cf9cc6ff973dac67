"""How an engine schedules requests: the settings users know from their serving engine."""

import re
from dataclasses import fields, replace
from math import inf, isfinite, isnan

from kvsim import options
from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.machines.hardware import GIB, NVME_READ_RATE, NVME_WRITE_RATE

PREFILLS = ("chunked", "whole")
PRIORITIES = ("decode", "prefill")
PREEMPTIONS = ("recompute", "swap")
ADMISSIONS = ("prompt", "chunk", "request")
PREFIX_LOADS = ("split", "faster", "load", "recompute")
SPLIT, FASTER, LOAD, RECOMPUTE = range(len(PREFIX_LOADS))
NIC_RATE = 25e9
"""Typical, and assumed where nothing else is given: one 200 Gb/s port in each direction (HDR
InfiniBand). [B/s]"""

MAY_BE_ZERO = ("cache_block", "max_model_len", "max_seqs", "max_tokens")
CLOSED_BATCH = 1024, 2**19
"""What FlexGen reads and decodes at once: a whole batch, whatever its size."""
OLDEST_BY_CARD = 9  # minor version of vLLM 0 since which its limits are by the card's memory
TRTLLM_BEFORE_DEFAULTS = ("2024",)  # limits were built into each engine, without usual ones
SGLANG_MEMORY = (35, 60, 160)  # of a GPU from which SGLang's prompt chunks are longer [GiB]


def choose_limits(deployment: Deployment) -> tuple[int, int]:
    """Return an engine's default limits of a pass on a GPU.

    Parameters
    ----------
    deployment : model, machine and software.

    Returns
    -------
    tuple of int
        Sequences and tokens in a pass at most, as documented for vLLM [1]_, SGLang [2]_ and
        TensorRT-LLM [3]_. FlexGen has none; other engines are given those of vLLM on small cards.

    References
    ----------
    .. [1] ``EngineArgs.get_batch_defaults`` in ``vllm/engine/arg_utils.py`` of vLLM 0.33.0,
       https://github.com/vllm-project/vllm
    .. [2] ``--max-running-requests`` (2,048 to 4,096, by the size of the cache; the lower end is
       taken) and ``--chunked-prefill-size`` (by the memory of the GPU) of SGLang 0.5,
       https://docs.sglang.io/advanced_features/server_arguments.html
    .. [3] ``max_batch_size`` and ``max_num_tokens`` of ``BuildConfig`` in TensorRT-LLM 1.0,
       https://nvidia.github.io/TensorRT-LLM
    """
    hardware, own = deployment.hardware, Rules()
    if deployment.stack.family == "flexgen":
        return CLOSED_BATCH
    memory = hardware.gpu_memory / GIB
    engine, _, version = deployment.stack.name.partition("@")[0].partition("-")
    if engine == "trtllm" and version not in TRTLLM_BEFORE_DEFAULTS:
        return 2048, 8192
    if engine == "sglang":
        tokens = (2048, 4096, 8192, 16384)[sum(memory >= least for least in SGLANG_MEMORY)]
        return 2048, tokens
    minor = re.fullmatch(r"(?:0\.(\d+))?", version)
    if engine != "vllm" or minor is None or int(minor[1] or OLDEST_BY_CARD) < OLDEST_BY_CARD:
        return own.max_seqs, own.max_tokens
    if memory >= 160:
        return 1024, 16384
    small = "a100" in hardware.name or hardware.name == "gb10"
    if memory >= 70 and not small:
        return 1024, 8192
    return own.max_seqs, own.max_tokens


def choose_admission(deployment: Deployment) -> str:
    """Choose how much memory must be free before an engine starts a prompt, by its default.

    TensorRT-LLM never evicts a request unless told otherwise: it starts a prompt only if its
    longest answer fits too, beside those of all running requests [1]_. Other engines start a prompt
    that fits, and preempt requests later.

    Parameters
    ----------
    deployment : model, machine and software.

    Returns
    -------
    str
        ``request`` or ``prompt``.

    References
    ----------
    .. [1] ``CapacitySchedulerPolicy.GUARANTEED_NO_EVICT``, the default of TensorRT-LLM,
       https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html
    """
    return "request" if deployment.stack.name.startswith("trtllm") else "prompt"


@frozen
class Rules:
    """Scheduling of one replica, with the defaults of vLLM on a card of less than 70 GiB.

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

    max_seqs: int = 256  # most sequences in a step; 0: the engine's default [sequences]
    max_tokens: int = 2048  # most tokens in a step; 0: the engine's default [tokens]
    block_tokens: int = 16  # tokens per KV block [tokens]
    blocks: int = 0  # KV blocks per replica; 0: as many as fit in GPU memory
    prefill: str = "chunked"
    priority: str = "decode"
    preemption: str = "recompute"
    admission: str = ""  # memory that must be free for a prompt to begin: of the whole prompt, of
    # its first part, or of the answer too beside all running ones; "": the engine's
    ahead: bool = False  # whether a pass is scheduled while the one before runs (asynchronous)
    max_model_len: int = 0  # longest request accepted; 0: the model's context [tokens]
    prefix_caching: bool = False  # whether prompt blocks are kept until memory is needed
    host_cache: float = 0.0  # host memory for stored prompt blocks and swapped sequences [B]
    nvme_cache: float = 0.0  # NVMe space of each replica for stored prompt blocks [B]
    remote_cache: float = 0.0  # remote store for prompt blocks, shared by all replicas [B]
    cache_ttl: float = inf  # time after their last use at which stored blocks are dropped [s]
    cache_block: int = 0  # tokens stored and loaded together; 0: the trace's block [tokens]
    prefix_load: str = "split"  # how stored blocks of a prompt are used
    nvme_read: float = NVME_READ_RATE  # [B/s]
    nvme_write: float = NVME_WRITE_RATE  # [B/s]
    nic: float = NIC_RATE  # network rate of each replica, in each direction [B/s]

    def __post_init__(self) -> None:
        choices = {
            "prefill": PREFILLS,
            "priority": PRIORITIES,
            "preemption": PREEMPTIONS,
            "admission": ADMISSIONS,
            "prefix_load": PREFIX_LOADS,
        }
        for f in fields(self):
            value, option = getattr(self, f.name), f"--{f.name.replace('_', '-')}"
            if f.name in choices:
                if value not in choices[f.name] and not (f.name == "admission" and not value):
                    expected = " or ".join(choices[f.name])
                    raise InputError(f"{option}: got {value!r}; expected {expected}")
            elif f.name in ("cache_ttl", "nvme_read", "nvme_write", "nic"):
                if isnan(value) or value <= 0:
                    raise InputError(f"{option}: got {value!r}; expected a number above 0")
            elif f.name in ("host_cache", "nvme_cache", "remote_cache"):
                if not (isfinite(value) and value >= 0):
                    raise InputError(f"{option}: got {value!r}; expected 0 or more bytes")
            elif f.name not in ("prefix_caching", "ahead") and not (
                f.name in MAY_BE_ZERO and value == 0
            ):
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{option}: got {value!r}; expected a whole number")
                options.check_range(option, value)
        self._refuse_what_does_nothing()

    def without_prefixes(self) -> "Rules":
        """Return these rules without prefix caching, as for replicas that only decode."""
        names = [f.name for f in fields(self)]
        kept = names[: names.index("prefix_caching")]
        return Rules(**{name: getattr(self, name) for name in kept})

    def _refuse_what_does_nothing(self) -> None:
        """Refuse settings of memories in which nothing is stored.

        Raises
        ------
        InputError
            Naming the setting and what it needs.
        """
        for name in ("nvme_cache", "remote_cache"):
            if getattr(self, name) and not self.prefix_caching:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option}: needs prefix blocks; add --prefix-caching")
        needs = {
            "cache_ttl": ("--host-cache, --nvme-cache or --remote-cache", self.tiers),
            "cache_block": ("--host-cache, --nvme-cache or --remote-cache", self.tiers),
            "prefix_load": ("--host-cache, --nvme-cache or --remote-cache", self.tiers),
            "nvme_read": ("--nvme-cache", self.nvme_cache > 0),
            "nvme_write": ("--nvme-cache", self.nvme_cache > 0),
            "nic": ("--remote-cache", self.remote_cache > 0),
        }
        defaults = {f.name: f.default for f in fields(self)}
        for name, (other, there) in needs.items():
            if getattr(self, name) != defaults[name] and not there:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option}: has no effect without {other}; add it or omit it")

    def scale_to(self, deployment: Deployment) -> "Rules":
        """Return the rules of a whole replica, each of whose ranks follows these rules.

        A rank has ``max_seqs`` of its own, and each of its micro-batches ``max_tokens``. Whether
        passes are scheduled ahead depends on the engine. If so, a request that arrives during a
        pass misses the next pass, which is already scheduled, and joins the one after it.

        Parameters
        ----------
        deployment : model, machine and software.

        Returns
        -------
        Rules
            The same with both limits for all ranks together.
        """
        seqs, tokens = choose_limits(deployment)
        seqs = deployment.dp * (self.max_seqs or seqs)
        tokens = deployment.lanes * (self.max_tokens or tokens)
        ahead = deployment.stack.time.asynchronous
        admission = self.admission or choose_admission(deployment)
        return replace(self, max_seqs=seqs, max_tokens=tokens, ahead=ahead, admission=admission)

    @property
    def tiers(self) -> bool:
        """Whether any memory besides the GPU keeps prefix blocks."""
        stored = self.host_cache + self.nvme_cache + self.remote_cache
        return self.prefix_caching and stored > 0
