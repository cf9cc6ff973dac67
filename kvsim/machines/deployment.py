"""A model on a machine with a software stack: what every formula is evaluated for."""

from dataclasses import replace
from functools import cached_property

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.machines.hardware import RELEASED, Hardware, Stack
from kvsim.machines.parallel import BUSIEST, Parallelism
from kvsim.models.model import Model


@frozen
class WeightFormat:
    """How the numbers of a weight matrix are stored."""

    bits: float  # per weight
    group: int  # inputs that share one scale; 0: one scale per output
    scale_bytes: float  # [B]
    dtype: str  # number format the product is computed in
    kernel: str = "gemm"  # kernel class of products; that of experts begins with ``experts``
    experts_alone: bool = False  # a mixture of experts keeps its other matrices in fp16
    dynamic: bool = False  # scales of a product's input are found as it comes

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
    # OCP Microscaling v1.0: an 8-bit exponent per 32 numbers; widened in the kernel. Published
    # mixtures of experts have it in their experts alone (gpt-oss model card, section 2.1)
    "mxfp4": WeightFormat(4, 32, 1, "fp16", "gemm-int4", experts_alone=True),
    # NVIDIA's: an fp8 scale per 16 numbers; widened in the kernel. Its mixtures of experts have
    # it in their MLPs alone (model card of DeepSeek-R1-0528-FP4)
    "nvfp4": WeightFormat(4, 16, 1, "fp16", "gemm-int4", experts_alone=True),
}
"""Formats of ``--weights``. Embeddings, LM head and norms stay in fp16."""


@frozen
class Deployment:
    """One replica: ``tp`` times ``dp`` times ``pp`` equal GPUs, each holding a part of the model.

    Tensor parallelism cuts every matrix, ``dp`` copies attention for other sequences, ``ep`` puts
    whole experts on GPUs, and ``pp`` divides the layers into stages. A stack that was measured card
    by card becomes that of the deployment's card; weights that are "released" those of the model's
    published checkpoint.
    """

    model: Model
    hardware: Hardware
    stack: Stack
    weights: str = "fp16"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.weights == RELEASED:
            object.__setattr__(self, "weights", self.model.released)
        if self.weights not in WEIGHT_FORMATS:
            expected = ", ".join([RELEASED, *WEIGHT_FORMATS])
            raise InputError(
                f"--weights: unknown format {self.weights!r}; expected one of {expected}"
            )
        object.__setattr__(self, "stack", self.stack.for_gpu(self.hardware.name))
        if self.tp not in (1, 2, 4, 8):
            raise InputError(f"--tp: got {self.tp}; expected 1, 2, 4 or 8 GPUs per replica")
        self.parallelism.check(self.model)

    @cached_property
    def parallelism(self) -> Parallelism:
        """How the replica is spread over its GPUs."""
        return Parallelism(self.tp, self.pp, self.dp, self.ep)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.parallelism.gpus

    @property
    def single_pass(self) -> bool:
        """Whether all GPUs work on the same pass: no other ranks, no other stages."""
        return self.lanes == 1

    @property
    def lanes(self) -> int:
        """Ranks times micro-batches of each: a pass of the replica is divided over them."""
        return self.dp * self.pp

    @cached_property
    def shard(self) -> Model:
        """What one GPU of a stage holds of the model's attention, dense MLPs and shared experts."""
        return self.model.shard(self.tp)

    @cached_property
    def local_experts(self) -> float:
        """Experts that a GPU has, whole or a part of each."""
        return self.model.experts / self.ep

    @cached_property
    def expert_width(self) -> int:
        """Inner width of a routed expert on one GPU."""
        return self.model.expert_ffn // self.parallelism.slices

    @property
    def routed_share(self) -> float:
        """Routed tokens of the busiest GPU over those of its stage."""
        return BUSIEST / self.ep if self.ep > 1 else 1.0

    @cached_property
    def stage_share(self) -> float:
        """Layers of the largest stage over all."""
        return -(-self.model.layers // self.pp) / self.model.layers

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins."""
        return self.hardware.linked

    @property
    def weight_format(self) -> WeightFormat:
        """How decoder weights are stored."""
        return WEIGHT_FORMATS[self.weights]

    @property
    def mixer_format(self) -> WeightFormat:
        """How the weights of attention and of other mixers are stored."""
        alone = self.weight_format.experts_alone and self.model.experts > 0
        return WEIGHT_FORMATS["fp16"] if alone else self.weight_format

    @cached_property
    def bandwidth(self) -> dict[str, float]:
        """Rate of each channel as one GPU sees it; GPUs of a replica share host memory. [B/s]"""
        rates = {name: link.bandwidth for name, link in self.hardware.links.items()}
        return rates | {"dram": rates["dram"] / self.gpus}

    @cached_property
    def issued_at_once(self) -> "Deployment":
        """The same where launches take the host no time and nothing waits for it."""
        stack = self.stack
        time = replace(stack.time, launch=0.0, sync=0.0)
        stack = replace(stack, time=time, offload=replace(stack.offload, tile_sync=False))
        return replace(self, stack=stack)

    @cached_property
    def replayed(self) -> "Deployment":
        """The same where a pass is replayed as a CUDA graph: the host issues one launch."""
        stack, once = self.stack, self.stack.time.launch
        time = replace(stack.time, launch=0.0, step=once)
        kernels = {name: replace(kernel, host=0.0) for name, kernel in stack.kernels.items()}
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
