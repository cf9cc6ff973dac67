"""Configuration of serving engines: command lines, files, and settings an engine does not have.

Each engine has a section that covers parallelism, limits, formats, offloading, speculative
decoding, and disaggregated prefill and decode. All words of commands are quoted with
:func:`shlex.quote`, and values in files are written in the syntax of the format.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import dumps
from textwrap import indent, wrap
from typing import TypeAlias, Union

from kvsim.emit.flags import MANUALS, Flag, find_flag, turboquant
from kvsim.emit.served import CHECKPOINTS, GB, Served
from kvsim.errors import unknown
from kvsim.frozen import frozen
from kvsim.machines.gguf import BASES
from kvsim.models.configs import CHECKPOINT_OF, load_model
from kvsim.serving.rules import Rules
from kvsim.techniques.heads import find_head, no_head
from kvsim.techniques.released import WHOLE_BLOCKS, describe_cut_block

BREAK = "\0"
"""Between the options of a command until its layout is chosen; no argument can hold it."""
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*(:/[\w./-]*)?", re.ASCII)
RESERVED = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
"""Words that YAML 1.1 or 1.2 does not read as text."""
UNPRINTABLE = re.compile("[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What YAML takes for line breaks, or not at all; JSON has escapes for what is below."""

Setting = str | int | float | bool
Yaml: TypeAlias = Union[  # noqa: UP007 - refers to itself
    Setting, Mapping[str, "Yaml"], Sequence[Union[Setting, Mapping[str, "Yaml"]]]  # noqa: UP007
]


@frozen
class Emitted:
    """The configuration of an engine.

    Attributes
    ----------
    engine
        Name of the engine.
    text
        Files and commands, one option per line.
    line
        The command on one line.
    flags
        Flags that are used.
    missing
        Requirements for which the engine has no setting, in words.
    """

    engine: str
    text: str
    line: str
    flags: tuple[Flag, ...]
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command on one line; if it reads a file, a hint to ``--emit``."""
        *file, command = self.line.splitlines() or [""]
        return f"{command} (`--emit {self.engine}` writes its file)" if file else command


@dataclass
class EngineSettings:
    """The configuration of an engine under construction.

    Attributes
    ----------
    engine
        Name of the engine.
    options
        Options of the command with their values, in order.
    used
        Flags used so far.
    missing
        Requirements for which the engine has no setting, in words.
    """

    engine: str
    options: list[tuple[str, str]] = field(default_factory=list)
    used: list[Flag] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def use(self, *names: str) -> None:
        """Record flags that the answer mentions outside the command.

        Parameters
        ----------
        *names
            Names of the flags.
        """
        self.used += [find_flag(self.engine, name) for name in names]

    def add(self, name: str, value: object = "", when: object = True) -> None:
        """Add an option to the command.

        Parameters
        ----------
        name
            The option, such as ``--max-model-len``.
        value
            Its value; empty for a flag.
        when
            Whether to add it.
        """
        if when:
            self.use(name)
            self.options.append((name, str(value)))

    def lack(self, what: str, when: object = True) -> None:
        """Record a requirement for which the engine has no setting.

        Parameters
        ----------
        what
            The requirement, in words; or a whole sentence on what to do, which ends in a stop.
        when
            Whether to record it.
        """
        if when:
            self.missing.append(what)

    def command(self, *words: str) -> str:
        """Return the command that starts with ``words`` and has the options added so far."""
        return write_command(words, self.options)

    def finish(self, text: str) -> Emitted:
        """Return the finished configuration.

        Parameters
        ----------
        text
            Text with marks where a long command may be broken.

        Returns
        -------
        Emitted
            The configuration.
        """
        laid_out, line = text.replace(BREAK, " \\\n  "), text.replace(BREAK, " ")
        return Emitted(self.engine, laid_out, line, tuple(self.used), tuple(self.missing))


def write_path(name: str) -> str:
    """Return a path that cannot be mistaken for an option: ``-x`` becomes ``./-x``.

    Parameters
    ----------
    name
        File, folder or repository.
    """
    return f"./{name}" if name.startswith("-") else name


def write_command(words: tuple[str, ...], options: list[tuple[str, str]]) -> str:
    """Return a command with all words quoted.

    Parameters
    ----------
    words
        The first words.
    options
        Options and their values; empty for flags.

    Returns
    -------
    str
        The command, with marks where it may be broken.
    """
    parts = [shlex.join(words)]
    parts += [shlex.join([name, value] if value else [name]) for name, value in options]
    return BREAK.join(parts)


def write_yaml(settings: Mapping[str, Yaml]) -> str:
    """Return settings as YAML.

    Parameters
    ----------
    settings
        Scalars, mappings and lists by key.
    """
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{key}:", indent(write_yaml(value), "  ")]
        elif isinstance(value, str | int | float):
            lines.append(f"{key}: {_yaml_scalar(value)}")
        else:
            lines.append(f"{key}:")
            for item in value:
                text = write_yaml(item) if isinstance(item, Mapping) else _yaml_scalar(item)
                lines.append("- " + indent(text, "  ")[2:])
    return "\n".join(lines)


def _yaml_scalar(value: Setting) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) or (PLAIN.fullmatch(value) and value.lower() not in RESERVED):
        return str(value)
    # a YAML string in double quotes has JSON's escapes, and takes fewer characters as they are
    text = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_python(value: Setting | Mapping[str, Setting]) -> str:
    """Return a value as Python source.

    Parameters
    ----------
    value
        The value.
    """
    if isinstance(value, Mapping):
        inner = (f"{write_python(key)}: {write_python(x)}" for key, x in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr("'" + value)[2:]  # repr takes double quotes where there is a single one
    return repr(value)


WIDTH = 100  # of comments [characters]
NO_DRAFT_MODEL = ("mtp", "ngram", "suffix")  # drafts that take no model of their own
LOOKUP_TOKENS = 3  # last tokens that n-grams match at most, as in the engines' examples
FP8_WEIGHTS = ("fp8", "fp8-dynamic")  # which vLLM and SGLang make of any checkpoint as they load it
ROLE_WORK = {"prefill": "read prompts", "decode": "decode"}


def emit(engine: str, served: Served) -> Emitted:
    """Write the configuration of an engine for a replica.

    Parameters
    ----------
    engine
        A key of :data:`WRITERS`, such as ``vllm``.
    served
        What to serve.

    Returns
    -------
    Emitted
        The configuration.

    Raises
    ------
    InputError
        If the engine is unknown.
    """
    if engine not in WRITERS:
        raise unknown("engine", engine, WRITERS)
    settings = EngineSettings(engine)
    served = _with_tuned_model(served, settings)
    if served.apart is None:
        text = WRITERS[engine](served, settings)
    else:
        text = _write_roles(served, settings, served.apart)
    if served.route and served.replicas > 1:
        settings.lack(f"{served.replicas} of these, and {ROUTERS[served.route]}")
    return settings.finish(text)


def _with_tuned_model(s: Served, settings: EngineSettings) -> Served:
    """Serve the tuned version of a published model where a draft head is known for that alone."""
    for method in s.terms:
        _, tuned = find_head(method, s.model)
        if s.model == s.base and tuned not in ("", s.base) and s.draft_model[0] != method:
            settings.lack(
                f"a head trained for {s.model}: {tuned} is served instead, for which this one was"
            )
            return replace(s, model=tuned, base=tuned)
    return s


def annotate(emitted: Emitted) -> str:
    """Return a configuration with comments on its source and on missing settings.

    Parameters
    ----------
    emitted
        The configuration.

    Returns
    -------
    str
        Text to copy.
    """
    manual = MANUALS[emitted.engine]
    lines = [f"# {manual.title} ({manual.version}; {manual.source})", emitted.text]
    for what in emitted.missing:
        told = f"# {what}" if what.endswith(".") else f"# No setting: {what}."
        further = "#   "
        lines += wrap(told, WIDTH, subsequent_indent=further, break_on_hyphens=False)
    return "\n".join(lines)


ROUTERS = {
    "round-robin": "a router that takes each in turn, as most routers do",
    "least-loaded": "a router that takes the one with the fewest unfinished requests, as nginx "
    "does with least_conn",
    "prefix-aware": "a router that takes the one which holds most of a prompt's prefix",
    "cache-and-load": "a router that weighs cached prefixes against load, as llm-d, or SGLang's "
    "and vLLM's with --policy cache_aware",
}
"""What must stand in front of several replicas, by the router that was played."""


# Engines that only prefill or only decode

CONNECTING = {
    "vllm": "the proxy that sends each request first to one kind of engine and then to the other; "
    "on several machines VLLM_NIXL_SIDE_CHANNEL_HOST of each engine is its own address",
    "sglang": "the addresses in the router's command; on several machines --host of each engine; "
    "on one machine --port and --base-gpu-id of each, and --disaggregation-bootstrap-port of those "
    "that read prompts (8998 if not set)",
    "trtllm": "the orchestrator (trtllm-serve disaggregated) and its list of servers",
    "k8s": "the proxy that sends each request first to one Service and then to the other, and "
    "VLLM_NIXL_SIDE_CHANNEL_HOST, the address of each pod",
}
"""What connects the engines and is not known here, for those that can be split."""


def _write_roles(served: Served, settings: EngineSettings, counts: tuple[int, int]) -> str:
    """Write both kinds of engine, one after the other."""
    engine = settings.engine
    if engine not in CONNECTING:
        title = MANUALS[engine].title
        settings.lack(f"prefill and decode on engines of their own: {title} is not written for it")
        return WRITERS[engine](served, settings)
    parts = []
    for count, role in zip(counts, ROLE_WORK, strict=True):
        own = EngineSettings(engine)
        one = replace(served.with_role(role), replicas=served.replicas * count)
        text = WRITERS[engine](one, own)
        parts.append(f"# {count} of these {ROLE_WORK[role]}\n{text}")
        settings.used += [x for x in own.used if x not in settings.used]
        settings.missing += [x for x in own.missing if x not in settings.missing]
    if engine == "sglang":
        parts.append(_sglang_router(settings, counts))
    settings.lack(CONNECTING[engine])
    return "\n\n".join(parts)


# What several engines share

OWN_TOKENIZERS = (
    *("moonshotai/Kimi-K2", "moonshotai/Kimi-Linear", "moonshotai/Moonlight"),
    *("baichuan-inc/Baichuan2", "internlm/internlm2"),
)
"""Checkpoints whose tokenizers are code in their repositories: engines refuse it unless told."""
USUAL_BLOCK_TOKENS = Rules().block_tokens
"""Tokens per block unless asked otherwise: left to the engine then, as some of its attention
kernels take blocks of another size alone (64 for DeepSeek-V3.2 in vLLM and SGLang)."""


def _note_technique(s: Served, settings: EngineSettings, known: Iterable[str]) -> None:
    """Note parts of the technique other than ``known``."""
    title = MANUALS[settings.engine].title
    for name, term in s.terms.items():
        if name not in ("full", *known):
            settings.lack(f"{term}: {title} has no setting for it; it needs custom code")
    if not s.technique.uniform:
        settings.lack(f"layers that differ ({s.technique}): {title} treats all alike")


def _note_tree(s: Served, settings: EngineSettings, drafting: str) -> None:
    width = s.terms[drafting].settings.get("width", 1)
    if width != 1:
        title = MANUALS[settings.engine].title
        settings.lack(f"trees of drafts (width {width}): {title} drafts a chain")


def _name_drafter(s: Served, settings: EngineSettings, drafting: str) -> str:
    """Name the checkpoint that drafts: a model of the catalogue, or a head trained for this one.

    Empty where no head is known, which is noted: the engine would not start without one.
    """
    if drafting == "draft":
        model = load_model(str(s.terms[drafting].settings["model"]))
        return model.repository or model.name
    method, own = s.draft_model
    if method == drafting:
        return own
    base = s.base or s.model
    head, tuned = find_head(drafting, base)
    if not head:
        settings.lack(f"{drafting}, left out above: {no_head(drafting, base)}")
    elif tuned != base:
        settings.lack(f"a head trained for {base}: this one is of {tuned}")
    return head


def _note_weights(s: Served, settings: EngineSettings, made: Iterable[str] = ()) -> None:
    """Note the checkpoint to load, unless it is named or the engine makes its weights' format."""
    if CHECKPOINT_OF in s.model or not (s.released or s.weights in ("fp16", *made)):
        which = CHECKPOINTS.get(s.weights, f"a checkpoint with {s.weights} weights")
        instead = f"replace {s.model} with the Hugging Face id or path of {which}"
        settings.lack(f"quantising weights to {s.weights} while loading: {instead}")
    option = "--trust_remote_code" if settings.engine == "trtllm" else "--trust-remote-code"
    told = f"The tokenizer of {s.model} contains code: review it, then add {option}."
    settings.lack(told, s.model.startswith(OWN_TOKENIZERS))
    cut = describe_cut_block(s.weights, s.expert_columns, s.spread.stage)
    if cut and settings.engine in WHOLE_BLOCKS:
        settings.lack(cut)


def _note_drives(s: Served, settings: EngineSettings) -> None:
    store = f"{s.nvme_gb} GB of NVMe for evicted blocks"
    settings.lack(f"{store}: --emit lmcache has them", s.nvme_cache)


def _note_spread(s: Served, settings: EngineSettings) -> None:
    """Note every degree that an engine without any of them lacks."""
    given = (("--pp", s.spread.pp), ("--dp", s.spread.dp), ("--ep", s.spread.ep))
    words = " ".join(f"{name} {value}" for name, value in given if value > 1)
    if words:
        settings.lack(f"{words}: {MANUALS[settings.engine].title} has no such layout")


def _note_nodes(s: Served, settings: EngineSettings) -> None:
    if s.nodes > 1:
        title = MANUALS[settings.engine].title
        some = "both" if s.nodes == 2 else f"all {s.nodes}"
        settings.lack(f"Start {title} on {some} machines, as its multi-node manual describes.")


# vLLM

VLLM_DRAFTS = dict.fromkeys(("eagle", "eagle3", "p-eagle"), "eagle3") | {"draft": "draft_model"}
VLLM_DRAFTS |= {name: name for name in ("dflash", "mtp", "ngram", "suffix")}
VLLM_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def _vllm(s: Served, settings: EngineSettings, offloading: str = "native") -> str:
    _vllm_spread(s, settings)
    settings.add("--max-model-len", s.max_model_len)
    settings.add("--max-num-seqs", s.max_seqs)
    settings.add("--max-num-batched-tokens", s.max_tokens)
    settings.add("--gpu-memory-utilization", f"{s.utilisation:g}")
    settings.add("--block-size", s.block_tokens, s.block_tokens != USUAL_BLOCK_TOKENS)
    settings.add("--enable-prefix-caching", when=s.prefix_caching)
    turbo = turboquant(s.terms.values())
    stored = str(s.terms["cache"].settings["format"]) if "cache" in s.terms else turbo
    settings.add("--kv-cache-dtype", stored or "fp8", "fp8" in s.terms or stored)
    settings.add("--quantization", "fp8", s.weights in FP8_WEIGHTS and not s.released)
    if s.host_cache and not s.role:
        settings.add("--kv-offloading-size", f"{s.host_gib:g}")
        settings.add("--kv-offloading-backend", offloading)
    _note_drives(s, settings)
    if s.role:
        transfer = {"kv_connector": "NixlConnector", "kv_role": VLLM_ROLES[s.role]}
        settings.add("--kv-transfer-config", dumps(transfer, separators=(",", ":")))
    if s.role and s.host_cache:
        settings.lack(
            f"{s.host_gib:g} GiB of host memory in addition to the transfer: --kv-offloading-size "
            "and --kv-transfer-config set one connector each, and both need vLLM's MultiConnector"
        )
    for name in VLLM_DRAFTS.keys() & s.terms.keys():
        config: dict[str, object] = {"method": VLLM_DRAFTS[name]}
        if name not in NO_DRAFT_MODEL:
            config["model"] = _name_drafter(s, settings, name)
            if not config["model"]:
                continue
        config["num_speculative_tokens"] = s.drafts
        if name == "p-eagle":
            config["parallel_drafting"] = True
        _note_tree(s, settings, name)
        if name == "ngram":  # without the least, vLLM looks up no fewer than the most
            config |= {"prompt_lookup_max": LOOKUP_TOKENS, "prompt_lookup_min": 1}
        settings.add("--speculative-config", dumps(config))
    known = ("fp8", "cache", *VLLM_DRAFTS, *(("turboquant",) if turbo else ()))
    _note_technique(s, settings, known)
    _note_weights(s, settings, FP8_WEIGHTS)
    return settings.command("vllm", "serve", write_path(s.model))


def _vllm_spread(s: Served, settings: EngineSettings) -> None:
    """vLLM has as many groups of whole experts as a stage has GPUs, or cuts every expert."""
    degrees = s.spread
    settings.add("--tensor-parallel-size", degrees.tp)
    settings.add("--pipeline-parallel-size", degrees.pp, degrees.pp > 1)
    settings.add("--data-parallel-size", degrees.dp, degrees.dp > 1)
    if degrees.ep == degrees.stage > 1:
        settings.add("--enable-expert-parallel")
    elif degrees.ep > 1:
        settings.lack(
            f"{degrees.ep} groups of whole experts on {degrees.stage} GPUs: vLLM has "
            f"--enable-expert-parallel for {degrees.stage} groups alone; ask for "
            f"--ep {degrees.stage} or 1"
        )
    _note_nodes(s, settings)


# vLLM with LMCache as the store of evicted blocks

LMCACHE_FILE = "lmcache.yaml"


def _lmcache(s: Served, settings: EngineSettings) -> str:
    below = EngineSettings("vllm")
    command = _vllm(s, below, offloading="lmcache")
    settings.missing += [x for x in below.missing if "NVMe" not in x]
    if not s.host_cache:
        settings.lack("a host cache: nothing is kept in host memory here, so LMCache has no use")
        return command
    settings.used += [x for x in below.used if not x.name.startswith("--kv-offloading")]
    settings.use("--kv-offloading-size", "--kv-offloading-backend", "LMCACHE_CONFIG_FILE")
    # its sizes are called GB and counted in GiB, as vLLM's are; every GPU's process has a store
    file: dict[str, Setting] = {"chunk_size": 256, "local_cpu": True}
    file["max_local_cpu_size"] = s.host_gib_each
    if s.nvme_cache:
        file["local_disk"] = "file:///FOLDER_ON_THE_DRIVE"
        file["max_local_disk_size"] = s.nvme_gib_each
    settings.use(*file, "PYTHONHASHSEED")  # without the seed no process finds another's blocks
    variables = f"PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE={LMCACHE_FILE}"
    started = re.sub(r"(?m)^(?=(\w+=\S* )*vllm serve)", f"{variables} ", command)
    return f"# {LMCACHE_FILE}\n{write_yaml(file)}\n\n{started}"


# vLLM on Kubernetes

VLLM_IMAGE = "vllm/vllm-openai:v0.33.0"
VLLM_PORT = 8000


def _k8s(s: Served, settings: EngineSettings) -> str:
    """Write a Deployment of vLLM and the Service that its replicas are reached by."""
    below = EngineSettings("vllm")
    _vllm(s, below)
    settings.used += below.used
    settings.missing += below.missing
    settings.use("replicas", "nvidia.com/gpu", "readinessProbe", "emptyDir")
    settings.lack(f"the nodes with {s.gpu or 'these GPUs'}: add a nodeSelector with your labels")
    settings.lack("a Hugging Face token for gated models: HF_TOKEN from a Secret")
    label = {"app": _name_service(s)}
    container: dict[str, Yaml] = {
        "name": "vllm",
        "image": VLLM_IMAGE,
        "command": [_escape_variables(word) for word in ("vllm", "serve", write_path(s.model))],
        "args": [_escape_variables(word) for option in below.options for word in option if word],
        "ports": [{"containerPort": VLLM_PORT}],
        "resources": {"limits": {"nvidia.com/gpu": str(s.spread.gpus)}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": VLLM_PORT}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Yaml] = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    deployment: dict[str, Yaml] = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": label["app"]},
        "spec": {
            "replicas": s.replicas,
            "selector": {"matchLabels": label},
            "template": {"metadata": {"labels": label}, "spec": pod},
        },
    }
    service: dict[str, Yaml] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": label["app"]},
        "spec": {"selector": label, "ports": [{"port": VLLM_PORT, "targetPort": VLLM_PORT}]},
    }
    return f"---\n{write_yaml(deployment)}\n---\n{write_yaml(service)}"


def _name_service(s: Served) -> str:
    """Return a name as a Service may have it: 63 letters, digits and hyphens, a letter first."""

    def clean(*words: str) -> str:
        return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")

    end = clean(f"tp{s.spread.tp}", s.role)
    begin = clean(s.gpu, s.model.rpartition("/")[2])
    if not begin[:1].isalpha():
        begin = clean("vllm", begin)
    return clean(begin[: 62 - len(end)], end)


def _escape_variables(word: str) -> str:
    """Return a word of a container's command, in which Kubernetes expands ``$(NAME)``."""
    return word.replace("$", "$$")


# SGLang

SGLANG_DRAFTS = {"eagle": "EAGLE3", "eagle2": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH"}
SGLANG_DRAFTS |= {"mtp": "NEXTN", "draft": "STANDALONE", "ngram": "NGRAM"}
SGLANG_ROUTER_PORT = 8000  # by default it would be 30000, the engines' own


def _sglang(s: Served, settings: EngineSettings) -> str:
    degrees = s.spread
    settings.add("--model-path", write_path(s.model))
    settings.add("--tp-size", degrees.stage)  # all GPUs of a stage, whatever attention does
    settings.add("--pp-size", degrees.pp, degrees.pp > 1)
    if degrees.dp > 1:
        settings.add("--dp-size", degrees.dp)
        settings.add("--enable-dp-attention")
    settings.add("--ep-size", degrees.ep, degrees.ep > 1)
    _note_nodes(s, settings)
    settings.add("--context-length", s.max_model_len)
    # of all ranks together
    settings.add("--max-running-requests", degrees.dp * s.max_seqs)
    settings.add("--chunked-prefill-size", degrees.dp * s.max_tokens)
    settings.add("--mem-fraction-static", f"{s.static_share:g}")
    settings.add("--page-size", s.block_tokens, s.block_tokens != USUAL_BLOCK_TOKENS)
    settings.add("--kv-cache-dtype", "fp8_e4m3", "fp8" in s.terms)
    settings.add("--quantization", "fp8", s.weights in FP8_WEIGHTS and not s.released)
    _sglang_memories(s, settings)
    if s.role:
        settings.add("--disaggregation-mode", s.role)
        settings.add("--disaggregation-transfer-backend", "nixl")
    _sglang_drafts(s, settings)
    _note_technique(s, settings, ("fp8", *SGLANG_DRAFTS))
    _note_weights(s, settings, FP8_WEIGHTS)
    return settings.command("python", "-m", "sglang.launch_server")


def _sglang_memories(s: Served, settings: EngineSettings) -> None:
    """Each GPU's process has its share of host memory, which must exceed its cache on the GPU."""
    if s.host_cache:
        settings.add("--enable-hierarchical-cache")
        settings.add("--hicache-size", s.host_gb_each)
        if s.host_cache <= s.spread.gpus * s.cache_bytes:
            settings.lack(
                f"{s.host_gb_each} GB of host memory for each GPU and "
                f"{s.cache_bytes / GB:.0f} GB of cache on it: SGLang starts only if the "
                "host's is the larger"
            )
    if s.nvme_cache:
        settings.add("--hicache-storage-backend", "file")
        settings.lack(f"how much of the drive it uses ({s.nvme_gb} GB here)")


def _sglang_drafts(s: Served, settings: EngineSettings) -> None:
    for name in SGLANG_DRAFTS.keys() & s.terms.keys():
        head = "" if name in NO_DRAFT_MODEL else _name_drafter(s, settings, name)
        if not head and name not in NO_DRAFT_MODEL:
            continue
        settings.add("--speculative-algorithm", SGLANG_DRAFTS[name])
        if head:
            settings.add("--speculative-draft-model-path", head)
        if name not in ("ngram", "dflash"):
            settings.add("--speculative-num-steps", s.drafts)
            settings.add("--speculative-eagle-topk", s.terms[name].settings.get("width", 1))
        settings.add("--speculative-num-draft-tokens", s.technique.drafting.verified)
        if s.spread.pp > 1:
            settings.lack("drafting with --pp-size: SGLang refuses the two together (PR 37154)")
        if name == "ngram" and s.spread.dp > 1:
            settings.lack("n-grams with --enable-dp-attention: SGLang refuses them (PR 28616)")


def _sglang_router(settings: EngineSettings, counts: tuple[int, int]) -> str:
    """Write the command of SGLang's router, which clients talk to."""
    options = [("--pd-disaggregation", "")]
    for count, role in zip(counts, ROLE_WORK, strict=True):
        hosts = (f"http://{role.upper()}_{i + 1}:30000" for i in range(count))
        options += [(f"--{role}", host) for host in hosts]
    options += [("--host", "0.0.0.0"), ("--port", str(SGLANG_ROUTER_PORT))]
    settings.use(*dict(options))
    command = write_command(("python", "-m", "sglang_router.launch_router"), options)
    return f"# in front of them\n{command}"


# TensorRT-LLM

TRTLLM_DRAFTS = {"eagle": "Eagle3", "eagle3": "Eagle3", "mtp": "MTP", "draft": "Draft_Target"}
TRTLLM_DRAFTS |= {"ngram": "NGram"}


def _trtllm(s: Served, settings: EngineSettings) -> str:
    copies_attention = _trtllm_spread(s, settings)
    settings.add("--max_seq_len", s.max_model_len)
    settings.add("--max_batch_size", s.max_seqs)
    settings.add("--max_num_tokens", s.max_tokens)
    settings.add("--enable_chunked_prefill")
    name = f"{s.role or 'kv'}.yaml"
    settings.add("--config", name)
    # in the file: its kv_cache_config takes the place of what the command line says of the cache
    cache: dict[str, Setting] = {"enable_block_reuse": True}
    cache["free_gpu_memory_fraction"] = s.free_share
    if "fp8" in s.terms:
        cache["dtype"] = "fp8"
    if s.host_cache:
        cache["host_cache_size"] = int(s.host_cache / s.spread.gpus)
    file: dict[str, Setting | Mapping[str, Setting]] = {"kv_cache_config": cache}
    _note_technique(s, settings, ("fp8", *TRTLLM_DRAFTS))
    _note_weights(s, settings)
    _note_drives(s, settings)
    for method in TRTLLM_DRAFTS.keys() & s.terms.keys():
        drafts = _trtllm_drafts(s, settings, method)
        if drafts:
            file["speculative_config"] = drafts
            _note_tree(s, settings, method)
        if method in ("draft", "ngram"):
            file["disable_overlap_scheduler"] = True
    if s.role:  # NIXL moves caches, in buffers for the longest prompt
        buffer: dict[str, Setting] = {"backend": "NIXL", "max_tokens_in_buffer": s.max_model_len}
        file["cache_transceiver_config"] = buffer
    if s.role == "prefill":
        file["disable_overlap_scheduler"] = True
    if copies_attention:
        file["enable_attention_dp"] = True
    for key, value in file.items():
        inner = [f"{key}.{x}" for x in value] if isinstance(value, Mapping) else [key]
        settings.use(*inner)
    command = settings.command("trtllm-serve", write_path(s.model))
    return f"# {name}\n{write_yaml(file)}\n\n{command}"


def _trtllm_spread(s: Served, settings: EngineSettings) -> bool:
    """Add degrees of parallelism; return whether every GPU has its own copy of attention."""
    degrees = s.spread
    settings.add("--tp_size", degrees.stage)
    settings.add("--pp_size", degrees.pp, degrees.pp > 1)
    settings.add("--ep_size", degrees.ep, degrees.ep > 1)
    if degrees.dp > 1 and degrees.tp > 1:
        settings.lack(
            f"{degrees.dp} copies of attention, each cut over {degrees.tp} GPUs: "
            f"enable_attention_dp copies it to all {degrees.stage}; ask for "
            f"--tp 1 --dp {degrees.stage}"
        )
    _note_nodes(s, settings)
    return degrees.dp > 1 and degrees.tp == 1


def _trtllm_drafts(s: Served, settings: EngineSettings, method: str) -> dict[str, Setting]:
    config: dict[str, Setting] = {"decoding_type": TRTLLM_DRAFTS[method], "max_draft_len": s.drafts}
    if method not in NO_DRAFT_MODEL:
        config["speculative_model"] = _name_drafter(s, settings, method)
        if not config["speculative_model"]:
            return {}
    if method == "ngram":
        config["max_matching_ngram_size"] = LOOKUP_TOKENS
    return config


# Hugging Face generate

QUANTO_BITS = (2, 4)
CONSTANT_DRAFTS: dict[str, Setting] = {
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0,
}
"""Keep the rounds of a draft model as long as planned, whatever it accepts or is sure of."""


def _hf(s: Served, settings: EngineSettings) -> str:
    arguments: dict[str, str] = {"max_length": write_python(s.max_model_len)}
    settings.use("max_length")
    lines = [_load("model", s.model, device_map="auto")]
    cache = _hf_cache(s, settings)
    arguments |= {name: write_python(value) for name, value in cache.items()}
    if "ngram" in s.terms:
        settings.use("prompt_lookup_num_tokens")
        arguments["prompt_lookup_num_tokens"] = write_python(s.drafts)
    elif "draft" in s.terms:
        own: dict[str, Setting] = {"num_assistant_tokens": s.drafts, **CONSTANT_DRAFTS}
        settings.use("assistant_model", *own)
        lines.append(_load("draft_model", _name_drafter(s, settings, "draft")))
        # generate reads them from the draft model's settings, not from the call
        lines += [f"draft_model.generation_config.{x} = {write_python(v)}" for x, v in own.items()]
        arguments["assistant_model"] = "draft_model"
    _note_technique(s, settings, ("offload", "kivi", "draft", "ngram"))
    _note_spread(s, settings)
    _note_drives(s, settings)
    _note_weights(s, settings)
    settings.lack(
        "a batch limit and continuous batching: generate takes one batch at a time, and serves "
        "requests that keep coming more slowly than planned"
    )
    call = "".join(f", {name}={value}" for name, value in arguments.items())
    return "\n".join((*lines, f"model.generate(**inputs{call})"))


def _load(variable: str, model: str, **more: Setting) -> str:
    options = "".join(f", {k}={write_python(v)}" for k, v in {"dtype": "auto", **more}.items())
    return f"{variable} = AutoModelForCausalLM.from_pretrained({write_python(model)}{options})"


def _hf_cache(s: Served, settings: EngineSettings) -> dict[str, Setting | Mapping[str, Setting]]:
    """Arguments for a cache that is quantised, or in host memory but for one layer."""
    offload, kivi = s.terms.get("offload"), s.terms.get("kivi")
    if offload is not None:
        settings.use("cache_implementation")
        if float(offload.settings["host_share"]) < 1:
            settings.lack("host_share: all layers but the current one go to host memory")
        return {"cache_implementation": "offloaded"}
    if kivi is None:
        return {}
    if kivi.settings["bits"] not in QUANTO_BITS:
        settings.lack(f"{kivi}: the quanto backend has 2 and 4 bits")
        return {}
    config: dict[str, Setting] = {
        "backend": "quanto",
        "nbits": int(kivi.settings["bits"]),
        "q_group_size": kivi.settings["group"],
        "residual_length": kivi.settings["residual"],
    }
    settings.use("cache_implementation", *(f"cache_config.{name}" for name in config))
    settings.lack(
        "keys packed per channel and values per token, as KIVI does: generate packs both alike, "
        "so the loss of quality is another"
    )
    return {"cache_implementation": "quantized", "cache_config": config}


# llama.cpp


LLAMACPP_CACHES = ("q8_0", "q4_0")
LLAMACPP_DRAFTS = dict.fromkeys(("eagle", "eagle3"), "draft-eagle3")
LLAMACPP_DRAFTS |= {"draft": "draft-simple", "mtp": "draft-mtp", "dflash": "draft-dflash"}
LLAMACPP_DRAFTS |= {"ngram": "ngram-simple"}
LLAMACPP_UBATCH = 512
"""Its default."""
LLAMACPP_SLOTS = 256
"""LLAMA_MAX_SEQ in src/llama-cparams.h: with more the server does not start."""
MORE_THAN_FIT = 4
"""Slots for each sequence of mean length that fits: some are shorter."""


def _llamacpp(s: Served, settings: EngineSettings) -> str:
    typed = s.weights in BASES
    settings.add("--model", f"MODEL-{s.weights.upper()}.gguf" if typed else "MODEL.gguf")
    # memory for the states of all slots is taken at the start
    wanted = min(s.max_seqs, MORE_THAN_FIT * s.fitting or s.max_seqs)
    slots = min(wanted, LLAMACPP_SLOTS)
    settings.add("--ctx-size", max(s.cache_tokens - int(slots * s.state_tokens), s.max_model_len))
    settings.add("--kv-unified")
    settings.add("--parallel", slots)
    settings.lack(f"{wanted:,} sequences at once: llama.cpp has {slots} slots", wanted > slots)
    settings.add("--batch-size", max(s.max_tokens, s.ubatch))
    settings.add("--ubatch-size", s.ubatch, s.ubatch not in (0, LLAMACPP_UBATCH))
    settings.add("--n-gpu-layers", s.layers - len(s.host.layers) if s.host.layers else "all")
    _keep_on_host(s, settings)
    if s.spread.tp > 1:
        settings.add("--split-mode", "row")
    elif s.spread.pp > 1:
        settings.add("--split-mode", "layer")
    _note_spread(s if s.spread.tp > 1 else replace(s, spread=replace(s.spread, pp=1)), settings)
    stored = str(s.terms["cache"].settings["format"]) if "cache" in s.terms else ""
    if stored in LLAMACPP_CACHES:
        settings.add("--flash-attn", "on")
        settings.add("--cache-type-k", stored)
        settings.add("--cache-type-v", stored)
    _llamacpp_drafts(s, settings)
    caches = ("cache",) if stored in LLAMACPP_CACHES else ()
    _note_technique(s, settings, (*caches, *LLAMACPP_DRAFTS))
    if s.terms.keys() & {"fp8", "kivi"}:
        settings.lack("its own formats q8_0 and q4_0 (--cache-type-k, --cache-type-v) are others")
    if "streamingllm" in s.terms:
        settings.lack("a sliding window: --context-shift drops half of a full context instead")
    if s.host_cache:
        settings.lack("host memory for evicted blocks")
    _note_drives(s, settings)
    if s.weights != "fp16" and not s.released and not typed:
        settings.lack(
            f"weights in {s.weights}: convert the model to the GGUF format that is nearest"
        )
    return settings.command("llama-server")


def _llamacpp_drafts(s: Served, settings: EngineSettings) -> None:
    for name in LLAMACPP_DRAFTS.keys() & s.terms.keys():
        head = "" if name in NO_DRAFT_MODEL else _name_drafter(s, settings, name)
        if not head and name not in NO_DRAFT_MODEL:
            continue
        settings.add("--spec-type", LLAMACPP_DRAFTS[name])
        if name == "ngram":
            settings.add("--spec-ngram-simple-size-n", LOOKUP_TOKENS)
            settings.add("--spec-ngram-simple-size-m", s.drafts)
            continue
        settings.add("--spec-draft-n-max", s.drafts)
        if head:
            settings.add("--spec-draft-model", "DRAFT.gguf")
            settings.lack(f"reading safetensors: convert {head} to a GGUF file, DRAFT.gguf")
        _note_tree(s, settings, name)


def _keep_on_host(s: Served, settings: EngineSettings) -> None:
    """Name the experts, or whole MLPs, that stay in host memory."""
    experts = s.host.experts
    if experts and experts == frozenset(range(len(experts))):
        settings.add("--n-cpu-moe", len(experts))
        experts = frozenset()
    for layers, name in ((experts, "exps"), (s.host.mlps, "")):
        if layers:
            some = "|".join(map(str, sorted(layers)))
            settings.add("--override-tensor", f"blk\\.({some})\\.ffn_.*{name}=CPU")
    if s.host.way == "streamed":
        settings.lack("weights copied to the GPU for every pass: only large ones do so")


WRITERS: dict[str, Callable[[Served, EngineSettings], str]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "lmcache": _lmcache,
    "k8s": _k8s,
    "hf": _hf,
    "llamacpp": _llamacpp,
}
"""What ``--emit`` takes, and who writes it."""


def check_engines(names: Sequence[str] | None) -> None:
    """Check that configurations can be written for engines.

    Parameters
    ----------
    names
        Names of engines; None for none.

    Raises
    ------
    InputError
        For the first unknown name.
    """
    for name in names or ():
        if name not in WRITERS:
            raise unknown("engine in --emit:", name, WRITERS)


def write_settings(names: Sequence[str], served: Served) -> list[dict[str, object]]:
    """Write the configurations of several engines for one replica.

    Parameters
    ----------
    names
        Names of engines.
    served
        What to serve.

    Returns
    -------
    list of dict
        For each engine: version, source, text, command line and missing settings.
    """
    rows: list[dict[str, object]] = []
    for name in names:
        found, manual = emit(name, served), MANUALS[name]
        row: dict[str, object] = {"engine": name, "version": manual.version}
        row["source"] = manual.source
        flags = {flag.name: flag.source for flag in found.flags}
        row |= {"text": annotate(found), "line": found.line, "flags": flags}
        rows.append(row | {"missing": list(found.missing)})
    return rows
