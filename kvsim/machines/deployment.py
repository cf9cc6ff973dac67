"""A model on hardware with a software stack: the input of every formula.

Also the layouts in which its replicas may spread over GPUs, and the basis of what is predicted.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.graph import Number
from kvsim.machines import gguf
from kvsim.machines.hardware import RELEASED, Hardware, Stack
from kvsim.machines.parallel import TP_DEGREES, Parallelism, busiest
from kvsim.models.kinds import Home, split_layout
from kvsim.models.model import LayerShape, Model


class OwnKernel(NamedTuple):
    """A kernel class that an engine may have for a weight format.

    Attributes
    ----------
    kernel
        Kernel class of matrix products.
    dtype
        Number format that the product is computed in.
    needs
        Number format that the card must be able to compute in; empty for any card.
    """

    kernel: str
    dtype: str
    needs: str = ""


@frozen
class WeightFormat:
    """Storage format of the numbers of a weight matrix.

    Attributes
    ----------
    bits
        Width of a stored weight. [bit]
    group
        Inputs that share one scale; 0 for one scale per output.
    scale_bytes
        Size of one scale. [B]
    dtype
        Number format that the product is computed in.
    kernel
        Kernel class of products; the class of experts begins with ``experts`` instead.
    experts_alone
        Whether only the experts are stored so, and all other matrices in fp16.
    dynamic
        Whether scales of a product's input are computed from each input.
    unpack
        Work to widen a number, relative to 4-bit groups.
    own
        Kernel classes of engines for it, the most preferred first.
    """

    bits: float
    group: int
    scale_bytes: float
    dtype: str
    kernel: str = "gemm"
    experts_alone: bool = False
    dynamic: bool = False
    unpack: float = 1.0
    own: tuple["OwnKernel", ...] = ()

    def bytes(self, inputs: float, outputs: float) -> float:
        """Compute the stored size of a matrix with its scales.

        Parameters
        ----------
        inputs
            Inputs of the product.
        outputs
            Outputs of the product.

        Returns
        -------
        float
            Size. [B]
        """
        groups = -(-inputs // self.group) if self.group else 1.0  # the last may be short
        scales = groups * outputs * self.scale_bytes
        return inputs * outputs * self.bits / 8 + scales


def experts_class(kernel: str) -> str:
    """Return the kernel class of routed experts that corresponds to a class of products.

    Parameters
    ----------
    kernel
        Class of products, such as ``gemm-fp8``.

    Returns
    -------
    str
        Class of experts, such as ``experts-fp8``.
    """
    return kernel.replace("gemm", "experts")


MXFP4_KERNELS = (OwnKernel("gemm-mxfp8", "fp8", "fp4"), OwnKernel("gemm-mxfp4", "fp16"))
NVFP4_KERNELS = (OwnKernel("gemm-nvfp4", "fp4", "fp4"),)
WEIGHT_FORMATS = {
    "fp16": WeightFormat(16, 0, 0, "fp16"),
    "fp8": WeightFormat(8, 0, 4, "fp8", "gemm-fp8"),  # fp32 scale per output channel
    # the same with a scale of each token's input: what engines make of a 16-bit checkpoint
    "fp8-dynamic": WeightFormat(8, 0, 4, "fp8", "gemm-fp8", dynamic=True),
    # fp32 scale per block of 128 x 128, as DeepSeek-V3
    "fp8-block": WeightFormat(8, 128, 4 / 128, "fp8", "gemm-fp8-block"),
    # weight-only: widened to fp16 in the kernel
    "int8": WeightFormat(8, 0, 2, "fp16", "gemm-int8"),
    # bf16 scale and zero point, groups of 32
    "int4-g32": WeightFormat(4, 32, 4, "fp16", "gemm-int4"),
    # symmetric groups of 128, as GPTQ for Marlin
    "int4": WeightFormat(4, 128, 2, "fp16", "gemm-int4"),
    # AWQ: a scale and a 4-bit zero point per group; an engine may have kernels of its own for it
    "awq": WeightFormat(4, 128, 2.5, "fp16", "gemm-awq"),
    # OCP Microscaling v1.0: an 8-bit exponent per 32 numbers; widened in the kernel, or with inputs
    # in 8 bits where the card has such products. Published mixtures of experts have it in their
    # experts alone (gpt-oss model card, section 2.1)
    "mxfp4": WeightFormat(4, 32, 1, "fp16", "gemm-int4", experts_alone=True, own=MXFP4_KERNELS),
    # NVIDIA's: an fp8 scale per 16 numbers; 4-bit inputs too where the card has such products,
    # widened in the kernel elsewhere. Its mixtures of experts have it in their MLPs alone (model
    # card of DeepSeek-R1-0528-FP4)
    "nvfp4": WeightFormat(4, 16, 1, "fp16", "gemm-int4", experts_alone=True, own=NVFP4_KERNELS),
}
"""Formats of ``--weights`` but those of GGUF files. Embeddings, LM head and norms stay in fp16."""


def _in_blocks(bits: float, unpack: float) -> WeightFormat:
    """Return the format of a GGUF block type, whose scales are included in ``bits``."""
    return WeightFormat(bits, 0, 0, "fp16", "gemm-gguf" if unpack else "gemm", unpack=unpack)


WEIGHT_FORMATS |= {
    name: _in_blocks(gguf.BLOCKS[base].bits, gguf.BLOCKS[base].unpack)
    for name, base in gguf.BASES.items()
}


@frozen
class HostLayers:
    """Layers that have some of their weights in host memory, counted from 0.

    The CPU computes with these weights, or they are copied to the GPU for passes of many tokens,
    from ``offload.stream`` tokens of the stack on; ``way`` chooses one of the two for all passes.

    Attributes
    ----------
    experts
        Layers whose routed experts are in host memory.
    mlps
        Layers whose whole MLPs are.
    layers
        Layers that are in host memory as a whole, with their caches.
    way
        "cpu" or "streamed" for passes of any width; "auto" to choose by width.
    """

    experts: frozenset[int] = frozenset()
    mlps: frozenset[int] = frozenset()
    layers: frozenset[int] = frozenset()
    way: str = "auto"

    def __bool__(self) -> bool:
        return bool(self.experts or self.mlps or self.layers)

    def homes(self, model: Model) -> Iterator[Home]:
        """Yield the part of each layer that is in host memory.

        Parameters
        ----------
        model
            The model.

        Yields
        ------
        str
            "layer", "mlp", "experts" or, where all of the layer is on the GPU, "".
        """
        for i, shape in enumerate(model.shapes()):
            if i in self.layers:
                yield "layer"
            elif i in self.mlps and shape.mlp:
                yield "mlp"
            else:
                yield "experts" if i in self.experts and shape.routed else ""

    def place(self, model: Model) -> Model:
        """Mark the layers of a model whose weights are in host memory.

        Parameters
        ----------
        model
            The model.

        Returns
        -------
        Model
            The same model with ``home`` set in its layer shapes.
        """
        rest, layout = list(model.layout), []
        for home, some in groupby(self.homes(model)):
            before, rest = split_layout(rest, len(list(some)))
            layout += [(tuple(replace(s, home=_home(home, s)) for s in x), n) for x, n in before]
        return replace(model, layout=tuple(layout))


def _home(home: Home, shape: LayerShape) -> Home:
    return "" if home == "mlp" and not shape.mlp else home


@frozen
class Deployment:
    """One replica of a model on ``tp * dp * pp`` equal GPUs, with its software stack.

    A stack with numbers per card is reduced to those of the deployment's card, and weights
    "released" become the format of the model's published checkpoint.

    Attributes
    ----------
    model
        The model.
    hardware
        One GPU with its host and links.
    stack
        The inference engine with its calibrated numbers.
    weights
        Weight format, as ``--weights`` names it.
    tp
        Tensor-parallel GPUs, which share every matrix.
    pp
        Pipeline stages, which divide the layers.
    dp
        Data-parallel copies of attention, each with its own sequences.
    ep
        Groups of GPUs that hold whole experts.
    host
        Layers with weights in host memory.
    draft_model
        Method and checkpoint of the draft model; empty for none.
    """

    model: Model
    hardware: Hardware
    stack: Stack
    weights: str = "fp16"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    host: HostLayers = field(default=HostLayers(), kw_only=True)
    draft_model: tuple[str, str] = field(default=("", ""), kw_only=True)

    def __post_init__(self) -> None:
        if self.weights == RELEASED:
            object.__setattr__(self, "weights", self.model.released)
        if self.weights.lower() not in WEIGHT_FORMATS:
            raise unknown("format in --weights", self.weights, (RELEASED, *WEIGHT_FORMATS))
        object.__setattr__(self, "weights", self.weights.lower())
        object.__setattr__(self, "stack", self.stack.for_gpu(self.hardware.name))
        if self.stack.weights.gguf:
            object.__setattr__(self, "weights", self._gguf_type())
        if self.tp not in TP_DEGREES:
            *some, last = map(str, TP_DEGREES)
            known = f"{', '.join(some)} or {last}"
            raise InputError(f"--tp: got {self.tp}; expected {known} GPUs per replica")
        self.parallelism.check(self.model)

    @cached_property
    def parallelism(self) -> Parallelism:
        """Degrees of tensor, pipeline, data and expert parallelism of the replica."""
        return Parallelism(self.tp, self.pp, self.dp, self.ep)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.parallelism.gpus

    def with_sums_at(self, rate: float, source: str) -> "Deployment":
        """Return the deployment on GPUs whose all-reduces of long inputs run at a given rate.

        Parameters
        ----------
        rate
            Bus bandwidth as nccl-tests prints it (busbw). [B/s]
        source
            Where the rate comes from, for the report.

        Returns
        -------
        Deployment
            The same with the bandwidth of its GPU links changed.
        """
        sums, links = self.stack.sums, self.hardware.links
        shares = (sums.ring_share, sums.direct_share) if sums.direct_share else ()
        share = max(shares, default=self.stack.kernel("allreduce").memory)
        hardware = replace(
            self.hardware,
            links={**links, "link": replace(links["link"], bandwidth=rate / share)},
            sources={**self.hardware.sources, "link.bandwidth_Bps": source},
        )
        return replace(self, hardware=hardware)

    @property
    def single_pass(self) -> bool:
        """Whether all GPUs work on the same pass, without data-parallel ranks or stages."""
        return self.lanes == 1

    @property
    def lanes(self) -> int:
        """Micro-batches that a pass of the replica is divided into: ranks times pipeline stages."""
        return self.dp * self.pp

    @cached_property
    def shard(self) -> Model:
        """The part of the model that one tensor-parallel GPU holds; experts count whole."""
        whole = self.host.place(self.model) if self.host else self.model
        return whole.shard(self.tp)

    @cached_property
    def local_experts(self) -> float:
        """Number of experts that a GPU holds, whole or in part."""
        return self.model.experts / self.ep

    @cached_property
    def expert_width(self) -> int:
        """Inner width of a routed expert on one GPU."""
        return self.model.expert_ffn // self.parallelism.slices

    @property
    def routed_share(self) -> float:
        """Routed tokens of the busiest GPU, as a share of those of its stage, from 0 to 1."""
        return float(busiest(self.ep, self.stack.sums.skew)) / self.ep

    @cached_property
    def stage_share(self) -> float:
        """Share of all layers that the largest pipeline stage holds, from 0 to 1."""
        return -(-self.model.layers // self.pp) / self.model.layers

    @property
    def domain(self) -> int:
        """Number of GPUs in one NVLink domain."""
        return self.hardware.linked

    def _gguf_type(self) -> str:
        """Return the GGUF file type that an engine runs for a format."""
        found = gguf.NEAREST.get(self.weights, self.weights)
        if found not in gguf.BASES:
            raise InputError(
                f"--weights: {self.weights} is not a GGUF type, but {self.stack.name} "
                f"reads GGUF files; choose one as q8_0, q6_k, q4_k_m or iq4_xs"
            )
        return found

    @cached_property
    def weight_format(self) -> WeightFormat:
        """Storage format of most decoder weights, with the engine's kernel class for it."""
        stored = WEIGHT_FORMATS[self.weights]
        for own in stored.own:
            measured = {own.kernel, experts_class(own.kernel)} & self.stack.kernels.keys()
            if measured and (not own.needs or own.needs in self.hardware.flops):
                return replace(stored, kernel=own.kernel, dtype=own.dtype)
        return stored

    @cached_property
    def _by_matrix(self) -> dict[str, WeightFormat]:
        """The format of each matrix, if a GGUF file states it."""
        if self.weights not in gguf.BASES:
            return {}
        found = gguf.stored_matrices(self.model, self.weights)
        blocks = {name: _in_blocks(each.bits, each.unpack) for name, each in found.items()}
        if self._on_metal:
            return {name: replace(each, kernel="gemm") for name, each in blocks.items()}
        return blocks

    @property
    def _multiplies_int8(self) -> bool:
        """Whether packed weights are multiplied as integers; False on Apple's GPUs."""
        return self.stack.weights.int8_products and "int8" in self.hardware.flops

    @property
    def _on_metal(self) -> bool:
        return self.stack.weights.int8_products and not self._multiplies_int8

    def weight_passes(self, stored: WeightFormat, rows: Number) -> Number:
        """Return how often a product reads its weights: once, but for few rows on Apple's GPUs.

        Parameters
        ----------
        stored
            Storage format of the weights.
        rows
            Rows of the product. [tokens]
        """
        packed = stored.bits < 16 and self.weights in gguf.BASES
        return gguf.weight_passes_on_metal(self.weights, rows) if packed and self._on_metal else 1.0

    def stored(self, matrix: str) -> WeightFormat:
        """Return how a weight matrix is stored.

        Parameters
        ----------
        matrix
            Name of the op that multiplies with it; those of experts begin with "experts_".

        Returns
        -------
        WeightFormat
            Format of this matrix; that of most weights if it has no separate format.
        """
        return self._by_matrix.get(matrix, self.weight_format)

    def mixer_stored(self, matrix: str) -> WeightFormat:
        """Return how a matrix of attention or of a recurrent layer is stored.

        Parameters
        ----------
        matrix
            Name of the op that multiplies with it.

        Returns
        -------
        WeightFormat
            fp16 for formats that apply to experts alone, else as :meth:`stored`.
        """
        alone = self.weight_format.experts_alone and self.model.experts > 0
        return WEIGHT_FORMATS["fp16"] if alone else self.stored(matrix)

    def vocabulary_stored(self, table: str) -> WeightFormat:
        """Return how the embedding or the LM head is stored.

        Parameters
        ----------
        table
            "embedding" or "lm_head"; a tied head is stored as the embedding.

        Returns
        -------
        WeightFormat
            Its format; fp16 unless a file says otherwise.
        """
        if table == "lm_head" and self.model.tied:
            table = "embedding"
        return self._by_matrix.get(table, WEIGHT_FORMATS["fp16"])

    def product_dtype(self, stored: WeightFormat) -> str:
        """Return the number format that the engine computes a product in.

        Parameters
        ----------
        stored
            Storage format of the weights.

        Returns
        -------
        str
            Key of ``hardware.flops``, such as "fp16", "int8" or "fp16acc" (fp16 accumulation).
        """
        ways = self.stack.weights
        if stored.dtype != "fp16":
            return stored.dtype
        if self._multiplies_int8 and stored.bits < 16:
            return "int8"
        return "fp16acc" if ways.half_accumulation else "fp16"

    @cached_property
    def bandwidth(self) -> dict[str, float]:
        """Rate of each memory and link for one GPU, by name; GPUs share those of the host. [B/s]"""
        rates = {name: link.bandwidth for name, link in self.hardware.links.items()}
        sockets = self.hardware.sockets
        reached = (1 + (sockets - 1) * self.stack.offload.second_socket) / sockets
        sharing = self.gpus if not self.host else self.gpus / self.pp  # stages take turns
        drive = {way: rates[way] / self.gpus for way in ("disk_read", "disk_write") if way in rates}
        return rates | drive | {"dram": rates["dram"] * reached / sharing}

    @cached_property
    def issued_at_once(self) -> "Deployment":
        """The same deployment without time on the host for launches and synchronisation."""
        stack = self.stack
        time = replace(stack.time, launch=0.0, sync=0.0)
        stack = replace(stack, time=time, offload=replace(stack.offload, tile_sync=False))
        return replace(self, stack=stack)

    @cached_property
    def replayed(self) -> "Deployment":
        """The same deployment with passes replayed as CUDA graphs: one launch from the host."""
        stack, once = self.stack, self.stack.time.launch
        time = replace(stack.time, launch=0.0, step=once)
        kernels = {
            name: replace(kernel, host=0.0, launch=0.0) for name, kernel in stack.kernels.items()
        }
        if "attention-masked" in kernels:  # shapes stay, so that a mask says which tokens are there
            kernels["attention"] = kernels["attention-masked"]
        return replace(self, stack=replace(stack, time=time, kernels=kernels))

    def flops(self, dtype: str) -> float:
        """Return the dense rate for a number format.

        Parameters
        ----------
        dtype
            Name of the format, as "fp16".

        Returns
        -------
        float
            Rate of fp16 where the GPU lacks the format. [FLOP/s]
        """
        return self.hardware.flops.get(dtype, self.hardware.flops["fp16"])


DEGREES = (1, 2, 4, 8, 16, 32, 64)
"""Degrees that are tried: engines cut attention and experts by powers of two."""


def on_nodes(deployment: Deployment, gpus: int, nodes: int) -> Deployment:
    """Spread a deployment's GPUs evenly over several machines.

    Parameters
    ----------
    deployment
        The deployment on one machine.
    gpus
        Number of GPUs in all.
    nodes
        Number of machines; 0 for as few as hold that many GPUs.

    Returns
    -------
    Deployment
        The same with NVLink among the GPUs of each machine only.

    Raises
    ------
    InputError
        If the GPUs do not divide evenly over the machines.
    """
    if not nodes:
        return deployment
    if gpus % nodes:
        raise InputError(f"--nodes: {gpus} GPUs do not divide over {nodes} machines")
    linked = min(deployment.hardware.linked, gpus // nodes)
    return replace(deployment, hardware=replace(deployment.hardware, linked=linked))


def list_layouts(deployment: Deployment, gpus: int) -> Iterator[Deployment]:
    """Yield all ways to divide GPUs evenly into replicas, those with the fewest GPUs each first.

    Tensor parallelism stays within an NVLink domain. Data-parallel attention and expert
    parallelism are tried only for models with experts.

    Parameters
    ----------
    deployment
        Model, card, stack and weights.
    gpus
        GPUs in all, each of which is part of a replica.

    Yields
    ------
    Deployment
        One replica of the layout.
    """
    experts = deployment.model.experts > 0
    found = []
    for tp, pp, dp in product(DEGREES, DEGREES, DEGREES if experts else (1,)):
        each = tp * pp * dp
        if gpus % each or tp > deployment.hardware.linked:
            continue
        for ep in sorted({1, tp * dp}) if experts else (1,):
            try:
                spread = replace(deployment, tp=tp, pp=pp, dp=dp, ep=ep)
                assert spread.shard.heads  # refuses heads that do not divide
                found.append(spread)
            except InputError:
                continue
    yield from sorted(found, key=lambda d: (d.gpus, d.pp, d.dp))


def move_fewest(
    deployment: Deployment, part: str, fits: Callable[[Deployment], bool]
) -> Deployment | None:
    """Move as few layers, or the experts of as few layers, as possible to host memory.

    Parameters
    ----------
    deployment
        The deployment; which of these parts it keeps on the host already is ignored.
    part
        ``"layers"`` or ``"experts"``.
    fits
        Whether a deployment fits. One that fits also does with more on the host.

    Returns
    -------
    Deployment or None
        The deployment that fits; None if it does not with all of them on the host.
    """
    layers = deployment.model.layers

    def moved(count: int) -> Deployment:
        host = replace(deployment.host, **{part: frozenset(range(count))})  # type: ignore[arg-type]
        return replace(deployment, host=host)

    count = bisect_left(range(layers + 1), True, key=lambda count: fits(moved(count)))
    return moved(count) if count <= layers else None


def basis(deployment: Deployment) -> dict[str, str]:
    """Describe the weakest basis of a prediction, and the error known for it.

    "calibrated": the hardware was measured and the stack was fitted to runs on it. "carried over":
    the stack's numbers were measured on other cards or read from its code. "datasheet": peak rates.

    Parameters
    ----------
    deployment
        Model, machine and software stack.

    Returns
    -------
    dict of str to str
        The ``kind``, one of these, and texts on the error and the sources.
    """
    stack, hardware = deployment.stack, deployment.hardware
    fitted = stack.basis == "calibrated" and hardware.basis == "measured"
    fitted &= stack.device in ("", hardware.device)  # not one machine's software on another
    kind = "carried over" if stack.basis == "calibrated" and not fitted else stack.basis
    where = f"on {hardware.device} at {hardware.date}" if fitted and hardware.device else ""
    return {
        "kind": kind,
        "calibrated": where,
        "hardware": f"{deployment.hardware.name} ({deployment.hardware.basis})",
        "stack": f"{deployment.stack.name} ({deployment.stack.basis})",
        "chosen": chosen(deployment),
        "error": deployment.stack.error,
    }


def chosen(deployment: Deployment) -> str:
    """Explain which of an engine's measured numbers a deployment uses.

    Parameters
    ----------
    deployment
        Model, machine and software stack.

    Returns
    -------
    str
        A clause for the report; empty if the engine has one set of numbers for all cards.
    """
    stack, gpu = deployment.stack, deployment.hardware.name
    card = stack.name.partition("@")[2]
    if card == gpu:
        return f"fitted to kernels measured on {gpu}"
    if gpu in stack.near:
        return (
            f"no kernel was measured on {gpu}; numbers are those of {card}, the closest "
            "measured card"
        )
    if card:
        return f"fitted to kernels measured on {card}, not on {gpu}"
    if stack.cards:
        return (
            f"no kernel was measured on {gpu} or a similar card; numbers are typical of the "
            "measured cards"
        )
    return ""
