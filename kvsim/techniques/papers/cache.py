"""Caches of few bits as engines ship them: formats whose kernels were measured."""

from functools import cache
from importlib.resources import files

import numpy as np

from kvsim.engine import ops
from kvsim.engine.formats import UNGROUPED, Format
from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen
from kvsim.graph import Buffers, Op
from kvsim.machines.deployment import Deployment
from kvsim.techniques.axes.base import LayerPass, Parts, Storage, pack
from kvsim.techniques.axes.settings import param

LANES = 128  # numbers that a warp unpacks at a time: a shorter head leaves some of it idle


@frozen
class CacheKernel:
    """How an engine stores a cache format, and how fast its kernel reads it.

    Attributes
    ----------
    engine, versions, format : the engine, its versions, and its name for the format.
    key_bits, value_bits : bits per cached key and value.
    vector_bytes : size of the scales and norms per token and KV head, of key and value together.
        [B]
    edge_layers : number of layers at either end of the model that stay in 16 bits.
    layer_s : additional time per layer and pass, for packing new tokens and merging partial
        results. [s]
    walk_s : minimum time per cached token of a sequence, whose parts are read one after another.
        [s]
    unpack_ops : vector operations per cached value and query head; vectors have ``LANES`` elements.
    source : measurements to which the three times were fitted.
    """

    engine: str
    versions: str
    format: str
    key_bits: float
    value_bits: float
    vector_bytes: float
    edge_layers: int
    layer_s: float
    walk_s: float
    unpack_ops: float
    source: str


@cache
def load_kernels() -> tuple[CacheKernel, ...]:
    """Return the kernels of ``caches.csv``."""
    file = files("kvsim.techniques") / "caches.csv"
    return tuple(
        CacheKernel(
            r["engine"], r["versions"], r["format"], float(r["key_bits"]), float(r["value_bits"]),
            float(r["vector_bytes"]), int(r["edge_layers"]), float(r["layer_s"]),
            float(r["walk_s"]), float(r["unpack_ops"]), r["source"],
        )
        for _, r in read_records(str(file), TABLE)
    )  # fmt: skip


FORMATS = tuple(dict.fromkeys(kernel.format for kernel in load_kernels()))


def find_kernel(stack: str, name: str) -> CacheKernel | None:
    """Look up the kernel of a format in an engine.

    Parameters
    ----------
    stack : name of a stack, as vllm@h100.
    name : of the format.
    """
    own = [k for k in load_kernels() if k.format == name and _is_of(stack, k.engine)]
    return own[0] if own else None


def is_engine(stack: str) -> bool:
    """Return whether a stack belongs to an engine whose cache formats are known.

    Parameters
    ----------
    stack : name of a stack, as vllm@h100.
    """
    return any(_is_of(stack, kernel.engine) for kernel in load_kernels())


def _is_of(stack: str, engine: str) -> bool:
    plain = stack.partition("@")[0].replace(".", "")
    return plain == engine or plain.startswith(f"{engine}-")


@frozen
class Cache(Storage):
    """A cache format of an engine, with the time of its kernel if it was measured.

    The format's name can be used alone: ``turboquant_3bit_nc`` is
    ``cache:format=turboquant_3bit_nc``.

    References
    ----------
    .. [1] vLLM's, SGLang's, LMDeploy's, TensorRT-LLM's and llama.cpp's options of the cache's
       format; the rows of each kernel stand in ``caches.csv``.
    """

    name = "cache"
    preset = False

    format: str = param("turboquant_4bit_nc", "the engine's name of the format", choices=FORMATS)

    @property
    def _kernel_of_format(self) -> CacheKernel:
        return next(kernel for kernel in load_kernels() if kernel.format == self.format)

    @property
    def stored(self) -> Format:
        """Format with the bits of keys and values, and a head's scales spread over its values."""
        kernel = self._kernel_of_format
        numbers = 32 / (8 * kernel.vector_bytes) * 256 if kernel.vector_bytes else UNGROUPED
        return Format(kernel.key_bits, numbers, value_bits=kernel.value_bits)

    def refuses(self, deployment: Deployment, parts: Parts) -> str:
        """Return why the stack or GPU has no kernel for the format, or an empty string."""
        card = deployment.hardware
        if self.format == "nvfp4" and "fp4" not in card.flops:
            return f"{card.name} has no FP4 tensor cores, which {self.format} caches need"
        if find_kernel(deployment.stack.name, self.format) is not None:
            return ""
        engines = dict.fromkeys(k.engine for k in load_kernels() if k.format == self.format)
        return (
            f"kernels for {self.format} are in {' and '.join(engines)} alone, and stack "
            f"{deployment.stack.name} has none; give --stack {next(iter(engines))}"
        )

    def boundaries(self, deployment: Deployment) -> tuple[int, ...]:
        """Return the first quantised layer, and the first 16-bit layer after it."""
        edge, caches = self._kernel_of_format.edge_layers, deployment.model.caches
        return (caches[edge], caches[-edge]) if edge and len(caches) > 2 * edge else ()

    def for_layer(self, index: int, deployment: Deployment) -> Storage:  # type: ignore[override]
        """Return the storage of one layer; the first and last layers stay in 16 bits."""
        edge, caches = self._kernel_of_format.edge_layers, deployment.model.caches
        inner = caches[edge : len(caches) - edge] if edge else caches
        return self if not edge or (inner and inner[0] <= index <= inner[-1]) else Storage()

    def prepare(self, at: LayerPass) -> list[Op]:
        """Return the ops that pack new tokens."""
        return pack(at)

    def complete(self, at: LayerPass) -> list[Op]:
        """Return an op with the measured kernel's time beyond the predicted attention."""
        kernel = find_kernel(at.d.stack.name, self.format)
        if at.p.prefill or kernel is None:
            return []
        m, tokens = at.d.shard, at.kept_tokens
        vector = LANES * np.ceil(m.head_dim / LANES)
        numbers = 2.0 * at.p.batch * m.heads * vector * tokens
        unpacked = kernel.unpack_ops * numbers / (at.d.flops("fp32") / 2)
        fixed = kernel.layer_s + np.maximum(kernel.walk_s * tokens, unpacked)
        return [Op("unpack", fixed=fixed, launches=0.0)] if np.any(np.asarray(fixed) > 0) else []

    def shared_buffers(self, at: LayerPass) -> Buffers:
        """Return the memory of one layer's whole prompt in fp16, until it is packed. [B]"""
        return ops.prompt_kv(at.d, at.p)

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Return the measurements to which the kernel's times were fitted."""
        kernel = find_kernel(at.d.stack.name, self.format)
        if kernel is None:
            return ()
        ends = (
            f"; {kernel.edge_layers} layers at either end stay in 16 bits"
            if kernel.edge_layers
            else ""
        )
        engine = f"{kernel.engine} {kernel.versions.replace(' on', ' and later')}"
        said = f"kernel times are those of {engine} (source: {kernel.source})"
        return (f"{said}{ends}",)
