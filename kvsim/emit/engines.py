"""The settings of each engine; what it has no setting for is said."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from textwrap import wrap

from kvsim.emit import apart, drafts, memories, spread
from kvsim.emit.flags import MANUALS, Flag, flag
from kvsim.emit.served import Served
from kvsim.errors import unknown
from kvsim.frozen import frozen
from kvsim.techniques.terms import Term

WIDTH = 100  # of comments
QUANTISED = {
    "fp8-block": "fp8 weights with a scale per block: serve a checkpoint that is quantised so",
    "int8": "weights of 8 bits: serve a checkpoint that is quantised so (W8A16)",
    "int4": "weights of 4 bits: serve a checkpoint that is quantised so (GPTQ or AWQ)",
    "int4-g32": "weights of 4 bits in groups of 32: serve a checkpoint that is quantised so",
    "mxfp4": "weights in MXFP4: serve a checkpoint that is stored so",
    "nvfp4": "weights in NVFP4: serve a checkpoint that is stored so",
}
TURBOQUANT = {
    (8, 4): "turboquant_k8v4",
    (4, 4): "turboquant_4bit_nc",
    (3, 4): "turboquant_k3v4_nc",
    (3, 3): "turboquant_3bit_nc",
}
"""vLLM's formats by the bits of keys and values."""


@dataclass
class EngineSettings:
    """Settings as they come together.

    Attributes
    ----------
    lines
        Text to paste, in order.
    used
        The flags in it.
    missing
        What the engine has no setting for, in words.
    """

    engine: str
    options: list[tuple[str, str]] = field(default_factory=list)
    used: list[Flag] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, name: str, value: object = "") -> None:
        """One flag, checked against the list."""
        self.used.append(flag(self.engine, name))
        self.options.append((name, str(value)))

    def lacks(self, what: str) -> None:
        """Say that there is no setting for something."""
        self.missing.append(what)


@frozen
class Emitted:
    """Settings to paste, the flags they hold, and what the engine has none for."""

    engine: str
    text: str
    flags: tuple[Flag, ...]
    missing: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as one line."""
        return " ".join(part.strip() for part in self.text.split("\\\n"))


def emit(engine: str, served: Served) -> Emitted:
    """The settings of an engine for a replica.

    Raises
    ------
    InputError
        For an unknown engine.
    """
    if engine not in WRITERS:
        raise unknown("engine", engine, WRITERS)
    found = EngineSettings(engine)
    if served.apart is None:
        text = WRITERS[engine](served, found)
    else:
        text = apart.both(served, found, WRITERS[engine])
    return Emitted(engine, text, tuple(found.used), tuple(found.missing))


def _shell(command: str, options: list[tuple[str, str]]) -> str:
    """A command line, one option per line."""
    parts = [command]
    for name, value in options:
        quoted = f"'{value}'" if value.startswith("{") else value
        parts.append(f"  {name} {quoted}".rstrip())
    return " \\\n".join(parts)


def _no_technique(s: Served, found: EngineSettings, known: tuple[str, ...]) -> None:
    """Parts of the technique that the engine has no setting for."""
    title = MANUALS[found.engine].title
    for name, term in s.terms.items():
        if name not in ("full", *known):
            found.lacks(f"{term}: {title} has no setting for it; it needs code of its own")
    if not s.technique.uniform:
        found.lacks(f"layers that differ ({s.technique}): {title} treats all alike")


def turboquant(terms: Iterable[Term]) -> str:
    """vLLM's name of the format, if it has these bits."""
    term = next((x for x in terms if x.name == "turboquant"), None)
    if term is None:
        return ""
    keys, values = term.settings["bits"], term.settings["value_bits"]
    return TURBOQUANT.get((keys, keys if values == "same" else values), "")


def _quantised(s: Served, found: EngineSettings) -> None:
    if s.weights in QUANTISED and not s.released:
        found.lacks(QUANTISED[s.weights])


def _vllm(s: Served, found: EngineSettings) -> str:
    spread.vllm(s, found)
    found.add("--max-model-len", s.max_model_len)
    found.add("--max-num-seqs", s.max_seqs)
    found.add("--max-num-batched-tokens", s.max_tokens)
    found.add("--gpu-memory-utilization", f"{s.utilisation:g}")
    found.add("--block-size", s.block_tokens)
    if s.prefix_caching:
        found.add("--enable-prefix-caching")
    turbo = turboquant(s.terms.values())
    if "fp8" in s.terms or turbo:
        found.add("--kv-cache-dtype", turbo or "fp8")
    if s.weights in ("fp8", "fp8-dynamic") and not s.released:
        found.add("--quantization", "fp8")
    if s.host_cache and not s.role:
        found.add("--kv-offloading-size", f"{s.host_gib:g}")
        found.add("--kv-offloading-backend", "native")
    memories.no_drive(s, found)
    apart.vllm(s, found)
    drafts.vllm(s, found)
    _no_technique(s, found, ("fp8", *drafts.VLLM, *(("turboquant",) if turbo else ())))
    _quantised(s, found)
    return _shell(f"vllm serve {s.model}", found.options)


def _sglang(s: Served, found: EngineSettings) -> str:
    found.add("--model-path", s.model)
    spread.sglang(s, found)
    found.add("--context-length", s.max_model_len)
    # of all ranks together
    found.add("--max-running-requests", s.spread.dp * s.max_seqs)
    found.add("--chunked-prefill-size", s.spread.dp * s.max_tokens)
    found.add("--mem-fraction-static", f"{s.static_share:g}")
    found.add("--page-size", s.block_tokens)
    if "fp8" in s.terms:
        found.add("--kv-cache-dtype", "fp8_e4m3")
    if s.weights in ("fp8", "fp8-dynamic") and not s.released:
        found.add("--quantization", "fp8")
    memories.sglang(s, found)
    apart.sglang(s, found)
    drafts.sglang(s, found)
    _no_technique(s, found, ("fp8", *drafts.SGLANG))
    _quantised(s, found)
    return _shell("python -m sglang.launch_server", found.options)


def _trtllm(s: Served, found: EngineSettings) -> str:
    copies = spread.trtllm(s, found)
    found.add("--max_seq_len", s.max_model_len)
    found.add("--max_batch_size", s.max_seqs)
    found.add("--max_num_tokens", s.max_tokens)
    found.add("--enable_chunked_prefill")
    file = f"{s.role or 'kv'}.yaml"
    found.add("--config", file)
    command = _shell(f"trtllm-serve {s.model}", found.options)
    found.used.append(flag("trtllm", "kv_cache_config.enable_block_reuse"))
    # in the file: its kv_cache_config takes the place of what the command line says of the cache
    found.used.append(flag("trtllm", "kv_cache_config.free_gpu_memory_fraction"))
    share = f"  free_gpu_memory_fraction: {s.free_share:g}"
    entries = ["  enable_block_reuse: true", share]
    if "fp8" in s.terms:
        found.used.append(flag("trtllm", "kv_cache_config.dtype"))
        entries.append("  dtype: fp8")
    if s.host_cache:
        found.used.append(flag("trtllm", "kv_cache_config.host_cache_size"))
        entries.append(f"  host_cache_size: {int(s.host_cache / s.spread.gpus)}")
    _no_technique(s, found, ("fp8", *drafts.TRTLLM))
    if s.weights != "fp16" and not s.released:
        found.lacks(f"weights in {s.weights}: serve a checkpoint that is quantised so")
    memories.no_drive(s, found)
    entries += drafts.trtllm(s, found)
    entries += [*apart.trtllm(s, found), *copies]
    return f"# {file}\nkv_cache_config:\n" + "\n".join(entries) + "\n\n" + command


def _lmcache(s: Served, found: EngineSettings) -> str:
    """vLLM with LMCache as the store of evicted blocks."""
    below = emit("vllm", s)
    found.missing += [x for x in below.missing if "NVMe" not in x]
    if not s.host_cache:
        found.lacks("a host cache: nothing is kept in host memory here, so LMCache has no use")
        return below.text
    found.used += [x for x in below.flags if not x.name.startswith("--kv-offloading")]
    found.add("--kv-offloading-size", f"{s.host_gib:g}")
    found.add("--kv-offloading-backend", "lmcache")
    file = memories.lmcache(s, found)
    command = below.text.replace(
        "--kv-offloading-backend native", "--kv-offloading-backend lmcache"
    )
    found.used.append(flag("lmcache", "PYTHONHASHSEED"))  # else no process finds another's blocks
    return f"{file}\nPYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=lmcache.yaml {command}"


def _hf(s: Served, found: EngineSettings) -> str:
    found.used.append(flag("hf", "max_length"))
    before, drafted = drafts.hf(s, found)
    arguments = [("max_length", str(s.max_model_len)), *memories.hf(s, found), *drafted]
    _no_technique(s, found, ("offload", "kivi", "draft", "ngram"))
    spread.none(s, found)
    memories.no_drive(s, found)
    _quantised(s, found)
    found.lacks("a batch limit and continuous batching: generate takes one batch at a time")
    told = "".join(f", {name}={value}" for name, value in arguments)
    loaded = f'AutoModelForCausalLM.from_pretrained("{s.model}", dtype="auto", device_map="auto")'
    return "\n".join((f"model = {loaded}", *before, f"model.generate(**inputs{told})"))


def _llamacpp(s: Served, found: EngineSettings) -> str:
    found.add("--model", "MODEL.gguf")
    found.add("--ctx-size", s.max_model_len * s.max_seqs)
    found.add("--parallel", s.max_seqs)
    found.add("--batch-size", s.max_tokens)
    found.add("--n-gpu-layers", "all")
    if s.spread.tp > 1:
        found.add("--split-mode", "row")
    spread.none(s, found)
    _no_technique(s, found, ())
    if s.terms.keys() & {"fp8", "kivi"}:
        found.lacks("its own formats q8_0 and q4_0 (--cache-type-k, --cache-type-v) are others")
    if s.host_cache:
        found.lacks("host memory for evicted blocks")
    memories.no_drive(s, found)
    if s.weights != "fp16" and not s.released:
        found.lacks(f"weights in {s.weights}: convert the model to the GGUF format that is nearest")
    return _shell("llama-server", found.options)


WRITERS: dict[str, Callable[[Served, EngineSettings], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "lmcache": _lmcache,
    "hf": _hf,
    "llamacpp": _llamacpp,
}
"""What ``--emit`` takes, and who writes it."""


def shown(found: Emitted) -> str:
    """The settings with where they come from and what is missing, as comments."""
    manual = MANUALS[found.engine]
    lines = [f"# {manual.title} ({manual.version}; {manual.source})", found.text]
    for what in found.missing:
        lines += wrap(
            f"# No setting: {what}.", WIDTH, subsequent_indent="#   ", break_on_hyphens=False
        )
    return "\n".join(lines)
