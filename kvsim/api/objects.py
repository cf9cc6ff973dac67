"""Models, GPUs, techniques and workloads as objects, and lists of the known ones.

``Model``, ``GPU`` and ``Technique`` are strings, so they can be passed wherever a function takes a
name.
"""

from collections.abc import Iterator, Mapping
from typing import Self

from kvsim.errors import InputError
from kvsim.inputs import format_plain
from kvsim.machines.hardware import Hardware
from kvsim.machines.profiles import load_hardware
from kvsim.models.configs import load_model
from kvsim.models.model import Model as Shape
from kvsim.options import Inputs, takes_options
from kvsim.report import lists
from kvsim.techniques import Technique as Composition
from kvsim.techniques import parse
from kvsim.techniques import register_technique as register
from kvsim.techniques.axes.base import Term
from kvsim.techniques.notation import load_installed


class Model(str):
    """A model, looked up by name or described by the fields of its ``config.json``.

    Attributes of the architecture, such as ``layers``, ``hidden``, ``kv_bytes_per_token`` [B] and
    ``max_context`` [tokens], can be read from it.

    Parameters
    ----------
    name
        Catalogue name, Hugging Face id, Ollama tag, path, or the parsed ``config.json``.

    Raises
    ------
    InputError
        If there is no such model, or its configuration cannot be read.

    Examples
    --------
    >>> model = Model("meta-llama/Llama-3.1-8B-Instruct")
    >>> model.parameters, model.layers, model.max_context
    (8030261248, 32, 131072)
    >>> model
    llama3.1-8b: 8.03 B parameters, 32 layers, KV cache 131,072 B per token, 131,072 tokens
    """

    shape: Shape
    config: dict[str, object] | None

    def __new__(cls, name: str | Mapping[str, object]) -> Self:
        """Find the model and read its configuration."""

        shape = load_model(name)
        self = super().__new__(cls, shape.name if isinstance(name, Mapping) else name)
        self.shape, self.config = shape, dict(name) if isinstance(name, Mapping) else None
        return self

    def __getattr__(self, name: str) -> object:
        if name in ("shape", "config") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.shape, name)

    def __repr__(self) -> str:
        m = self.shape
        size = f"{format_plain(m.parameters / 1e9, 3)} B parameters"
        if m.experts:
            size += f" ({format_plain(m.active_parameters / 1e9, 3)} B active)"
        return (
            f"{m.name}: {size}, {m.layers} layers, KV cache {m.kv_bytes_per_token:,.0f} B per "
            f"token, {m.max_context:,} tokens"
        )


class GPU(str):
    """A GPU with its hardware profile.

    Parameters
    ----------
    name
        Name of a profile, the name that nvidia-smi or a cloud provider uses, or the path of a TOML
        profile.

    Attributes
    ----------
    profile
        The hardware profile: memory, bandwidths, arithmetic rates and host, with their sources.

    Raises
    ------
    InputError
        If no GPU or more than one has this name.

    Examples
    --------
    >>> gpu = GPU("RTX 4090")
    >>> gpu.profile.name, round(gpu.memory / 2**30, 1), gpu.bandwidth
    ('rtx4090', 24.0, 1008000000000.0)
    >>> gpu
    rtx4090: NVIDIA GeForce RTX 4090 24 GB, 24.0 GiB at 1,008 GB/s, 165 TFLOP/s in fp16
    """

    profile: Hardware

    def __new__(cls, name: str) -> Self:
        """Find the GPU and load its profile."""

        self = super().__new__(cls, name)
        self.profile = load_hardware(name)
        return self

    @property
    def memory(self) -> float:
        """Total GPU memory, as the driver reports it. [B]"""
        return float(self.profile.gpu_memory)

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the GPU memory. [B/s]"""
        return float(self.profile.links["hbm"].bandwidth)

    @property
    def price(self) -> float | None:
        """List price of renting the GPU; None if unknown. [USD/h]"""
        return self.profile.price

    def __repr__(self) -> str:
        h = self.profile
        return (
            f"{h.name}: {h.title}, {self.memory / 2**30:.1f} GiB at {self.bandwidth / 1e9:,.0f} "
            f"GB/s, {h.flops['fp16'] / 1e12:.0f} TFLOP/s in fp16"
        )


class Technique(str):
    """A technique, or a composition of several, with its settings.

    Parameters
    ----------
    notation
        Name and settings, such as ``"kivi:bits=4"`` or ``"kivi:bits=4 + offload"``.

    Raises
    ------
    InputError
        If the technique or a setting is unknown, or a value is out of range.

    Examples
    --------
    >>> Technique("kivi:bits=4")
    kivi:bits=4,group=32,residual=128 (changes outputs)
    >>> Technique("full").exact
    True
    """

    term: Composition

    def __new__(cls, notation: str) -> Self:
        """Read a composition and check its settings."""

        self = super().__new__(cls, notation)
        self.term = parse(notation)
        return self

    @property
    def exact(self) -> bool:
        """Whether it generates the same tokens as the full, unquantised cache."""
        return bool(self.term.exact)

    def __repr__(self) -> str:
        kind = "same tokens as the full cache" if self.exact else "changes outputs"
        return f"{self.term} ({kind})"


class Workload(Mapping[str, object]):
    """Request sizes, load and targets, to be passed to functions as ``**workload``.

    Parameters
    ----------
    prompt
        Prompt length of each request. [tokens]
    generate
        Generated length of each request. [tokens]
    **others
        Further keywords of the function, such as ``batch``, ``rate``, ``ttft`` or ``tpot``.

    Raises
    ------
    InputError
        If nothing is given.

    Examples
    --------
    >>> chat = Workload(prompt="3k", generate=500, tpot="50ms")
    >>> chat
    Workload(prompt='3k', generate=500, tpot='50ms')
    >>> dict(chat)["generate"]
    500
    """

    def __init__(
        self,
        prompt: int | str | None = None,
        generate: int | str | None = None,
        **others: object,
    ) -> None:
        given = {"prompt": prompt, "generate": generate, **others}
        self._given = {key: value for key, value in given.items() if value is not None}
        if not self._given:
            raise InputError("Workload: nothing is given; expected at least prompt or generate")

    def __getitem__(self, key: str) -> object:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def __repr__(self) -> str:
        return f"Workload({', '.join(f'{k}={v!r}' for k, v in self._given.items())})"


def register_technique(kind: type[Term]) -> type[Term]:
    """Register a user-defined technique, so that every function and command accepts its name.

    Packages can register techniques when installed, through the entry point ``kvsim.techniques``.

    Parameters
    ----------
    kind
        A ``@frozen`` subclass of :class:`kvsim.techniques.axes.base.Term` with a ``name``;
        ``python3 make.py new-technique NAME`` writes a template.

    Returns
    -------
    type[Term]
        The class itself, so that the function can be used as a decorator.

    Raises
    ------
    InputError
        If the class is not of that form, or its name is taken.

    Examples
    --------
    >>> @register_technique  # doctest: +SKIP
    ... @frozen
    ... class Mine(Term):
    ...     name: ClassVar[str] = "mine"
    """

    return register(kind)


@takes_options("models", "name")
def models(inputs: Inputs) -> object:
    """List the models in the catalogue, or describe one model.

    Returns
    -------
    list of dict, or dict
        A row for each model, or the row of the model ``name``.

    Examples
    --------
    >>> models("meta-llama/Llama-3.1-8B-Instruct")["layers"]
    32
    """
    return _find("models", inputs.name)


@takes_options("gpus", "name")
def gpus(inputs: Inputs) -> object:
    """List the hardware profiles, or describe one with the sources of its numbers.

    Returns
    -------
    list of dict, or dict
        A row for each GPU, or the row of the GPU ``name``.

    Examples
    --------
    >>> gpus("NVIDIA L40S")["title"]
    'NVIDIA L40S 48 GB'
    """
    return _find("gpus", inputs.name)


@takes_options("techniques", "name")
def techniques(inputs: Inputs) -> object:
    """List the techniques, or describe one with its settings and the paper it comes from.

    Returns
    -------
    list of dict, or dict
        A row for each technique, or the row of the technique ``name``.

    Examples
    --------
    >>> techniques("kivi")["lossless"]
    False
    """
    return _find("techniques", inputs.name)


@takes_options("stacks", "name")
def stacks(inputs: Inputs) -> object:
    """List the software stacks (engines), or describe one with its known prediction error.

    Returns
    -------
    list of dict, or dict
        A row for each stack, or the row of the stack ``name``.

    Examples
    --------
    >>> stacks("vllm")["basis"]
    'carried over'
    """
    return _find("stacks", inputs.name)


def _find(kind: str, name: str) -> object:
    if kind == "techniques":
        load_installed()
    return lists.find(kind, name)
