"""What is known: a model, a GPU, a technique and a workload as objects, and lists of all.

The first three are texts, so that every function takes them where it takes a name.
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
    """A model, by any name that ``--model`` takes or by the fields of its ``config.json``.

    Parameters
    ----------
    name
        Catalogue name, Hugging Face id, Ollama tag, path, or the parsed configuration.

    Raises
    ------
    InputError
        If there is no such model.

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
    """A GPU, by any name that ``--gpu`` takes.

    Parameters
    ----------
    name
        Profile, name as nvidia-smi or a cloud writes it, or path of a TOML profile.

    Raises
    ------
    InputError
        If there is no such GPU, or several have the name.

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
        """Memory that the driver reports. [B]"""
        return float(self.profile.gpu_memory)

    @property
    def bandwidth(self) -> float:
        """Bandwidth of the GPU's memory. [B/s]"""
        return float(self.profile.links["hbm"].bandwidth)

    @property
    def price(self) -> float | None:
        """List price; None if none is known. [USD/h]"""
        return self.profile.price

    def __repr__(self) -> str:
        h = self.profile
        return (
            f"{h.name}: {h.title}, {self.memory / 2**30:.1f} GiB at {self.bandwidth / 1e9:,.0f} "
            f"GB/s, {h.flops['fp16'] / 1e12:.0f} TFLOP/s in fp16"
        )


class Technique(str):
    """A technique with its settings, in the notation of ``--technique``.

    Parameters
    ----------
    notation
        As ``kivi:bits=4``.

    Raises
    ------
    InputError
        If it cannot be parsed.

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
        """Whether it gives the same tokens as the full cache."""
        return bool(self.term.exact)

    def __repr__(self) -> str:
        kind = "same tokens as the full cache" if self.exact else "changes outputs"
        return f"{self.term} ({kind})"


class Workload(Mapping[str, object]):
    """What is asked of a server; give it to a function as ``**workload``.

    Parameters
    ----------
    prompt
        Prompt of every request. [tokens]
    generate
        Tokens generated for every request. [tokens]
    **others
        Further options of the function, as ``batch``, ``rate``, ``ttft`` or ``tpot``.

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
    """Add a technique of your own, which every command then knows by its name.

    An installed package can name its classes under the entry point ``kvsim.techniques`` instead.

    Parameters
    ----------
    kind
        A ``@frozen`` class that extends :class:`kvsim.techniques.axes.base.Term`;
        ``python3 make.py new-technique NAME`` writes one to start from.

    Returns
    -------
    type[Term]
        The same, so that it can decorate the class.

    Raises
    ------
    InputError
        If it is no such class, or its name is taken.

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
    """List the models of the catalogue, or look one up.

    Returns
    -------
    list of dict, or dict
        All models, or the one that ``name`` gives.

    Examples
    --------
    >>> models("meta-llama/Llama-3.1-8B-Instruct")["layers"]
    32
    """
    return _find("models", inputs.name)


@takes_options("gpus", "name")
def gpus(inputs: Inputs) -> object:
    """List the hardware profiles, or look one up with its sources.

    Returns
    -------
    list of dict, or dict
        All profiles, or the one that ``name`` gives.

    Examples
    --------
    >>> gpus("NVIDIA L40S")["title"]
    'NVIDIA L40S 48 GB'
    """
    return _find("gpus", inputs.name)


@takes_options("techniques", "name")
def techniques(inputs: Inputs) -> object:
    """List the techniques, or look one up with its settings and paper.

    Returns
    -------
    list of dict, or dict
        All techniques, or the one that ``name`` gives.

    Examples
    --------
    >>> techniques("kivi")["lossless"]
    False
    """
    return _find("techniques", inputs.name)


@takes_options("stacks", "name")
def stacks(inputs: Inputs) -> object:
    """List the software stacks, or look one up with its known error.

    Returns
    -------
    list of dict, or dict
        All stacks, or the one that ``name`` gives.

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
