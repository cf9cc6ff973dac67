"""The four axes of a technique, each with defaults that change nothing.

*Selection* says which cached tokens stay and which of them a query reads, *storage* how keys and
values are stored, *placement* where they live and how they come to where attention runs, and
*drafting* who proposes tokens. Selection, storage and placement may differ by layer; drafting is
the whole model's. Each is asked about a :class:`~kvsim.techniques.layers.LayerPass`: one pass
through one layer of one model on one machine.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from kvsim.engine.formats import FP16, Format
from kvsim.graph import Buffers, Number, Op, Point, Step
from kvsim.machines.deployment import Deployment
from kvsim.techniques.layers import LayerPass, Parts, attend
from kvsim.techniques.terms import Axis, Part

Evicts = Literal["never", "after the prompt", "always"]


@dataclass(frozen=True)
class Selection(Part):
    """Which cached tokens stay, and which of them a query reads."""

    name = "all"
    axis: ClassVar[Axis] = "selection"
    evicts: ClassVar[Evicts] = "never"
    per_head: ClassVar[bool] = False  # heads keep different tokens
    chooses: ClassVar[bool] = False  # what is read is known only when the query is

    @property
    def queries(self) -> int:
        """Query tokens of a decoding pass that yields one token."""
        return 1

    @property
    def exact(self) -> bool:
        """Whether a query reads every token."""
        return type(self) is Selection

    def refuses(self, d: Deployment, beside: Parts) -> str:
        """Tokens that leave one by one have to be stored one by one."""
        if self.evicts == "always" and not beside.storage.by_token:
            return f"{self.name} drops single tokens, and {beside.storage.name} packs them together"
        return ""

    def kept(self, at: LayerPass) -> Number:
        """Cached tokens per sequence that stay after the pass. [tokens]"""
        return at.cached

    def prompt_kept(self, at: LayerPass) -> Number:
        """Tokens of the prompt that stay once it is read. [tokens]"""
        return at.p.length

    def limit(self, at: LayerPass) -> Number | None:
        """Tokens that a query of a decoding pass sees at most; None for all. [tokens]"""
        return None

    @property
    def scored(self) -> bool:
        """Whether the prompt's attention scores are needed, and so leave the chip."""
        return False

    def extra_bytes(self, at: LayerPass) -> Number:
        """What attention reads beyond the tokens that a query sees. [B]"""
        return 0.0

    def before(self, at: LayerPass) -> list[Op]:
        """Ops before attention in decoding."""
        return []

    def after(self, at: LayerPass) -> list[Op]:
        """Ops after attention: upkeep in decoding, the choice of what stays in prefill."""
        return []

    def attend(self, at: LayerPass) -> list[Op]:
        """Ops between the projections of one layer."""
        storage, place, drafting = at.storage, at.placement, at.drafting
        if not at.p.prefill:
            return [
                *place.runtime(at), *place.fetch(at), *storage.arrive(at), *place.store(at),
                *self.before(at), *place.attend(at), *storage.after(at), *self.after(at),
            ]  # fmt: skip
        if self.evicts == "never":
            return [
                *place.runtime(at), *storage.arrive(at), *place.store(at),
                *attend(at, place.waits(at)), *place.finish(at),
                *storage.after(at), *self.after(at), *drafting.after_prompt(at),
            ]  # fmt: skip
        return [  # only what stays is packed and sent away
            *place.runtime(at), *attend(at), *self.after(at),
            *storage.arrive(at), *place.store(at), *place.finish(at),
            *storage.after(at), *drafting.after_prompt(at),
        ]  # fmt: skip

    def resident(self, at: LayerPass) -> Buffers:
        """What one layer keeps besides the cache: scores, bounds of pages, copies. [B]"""
        return {}

    def between(self, parts: Parts) -> Parts | None:
        """An extra pass between the prompt and the first decoding round, if there is one."""
        return None


@dataclass(frozen=True)
class Storage(Part):
    """How keys and values are stored: format, packing, and what attention does about it."""

    name = "fp16"
    axis: ClassVar[Axis] = "storage"

    @property
    def stored(self) -> Format:
        """Format of cached numbers where they live."""
        return FP16

    @property
    def read(self) -> Format:
        """Format that the GPU's attention reads; fp16 if numbers are widened on their way to it."""
        return self.stored

    @property
    def upper(self) -> "Storage | None":
        """The same cache read at half its bits, where it is stored in halves."""
        return None

    def notes(self, at: LayerPass) -> tuple[str, ...]:
        """Which kernels a low-bit answer stands for."""
        if self.read.kernel != "lowbit":
            return ()
        stack = at.d.stack
        each = f"{stack.unpack_arithmetic:g} vector operations" if stack.unpack_arithmetic else ""
        work = f"{each} per number unpacked" if each else "unpacking that memory traffic hides"
        return (
            f"{self.name}: stack {stack.name} stands for low-bit attention kernels with {work}; "
            f"kernels that are not tuned so lose on cards with much bandwidth",
        )

    @property
    def by_token(self) -> bool:
        """Whether one token's numbers can be dropped, moved or fetched alone."""
        return True

    @property
    def scored(self) -> bool:
        """Whether the prompt's attention scores are needed, and so leave the chip."""
        return False

    @property
    def exact(self) -> bool:
        """Whether nothing is packed."""
        return not self.stored.packs

    def arrive(self, at: LayerPass) -> list[Op]:
        """Ops before attention: packing of the tokens that the pass adds."""
        return []

    def after(self, at: LayerPass) -> list[Op]:
        """Ops after attention."""
        return []

    def restore(self, at: LayerPass, tokens: Number) -> list[Op]:
        """What makes keys of so many chosen tokens per KV head readable."""
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """What attention reads besides, or instead of, numbers in the format it reads. [B]"""
        return 0.0

    def number(self, at: LayerPass) -> tuple[Number, Number]:
        """Average size of a stored number of a key, and of a value. [B]"""
        return self.stored.k_number, self.stored.v_number

    def moved(self, at: LayerPass, tokens: Number) -> tuple[Number, Number]:
        """Bytes of keys and of values of so many cached tokens per sequence, as stored. [B]"""
        m, stored = at.d.shard, self.stored
        k, v = stored.packed_sides(m.k_width, m.v_width, tokens)
        return at.p.batch * k * stored.k_number, at.p.batch * v * stored.v_number

    def sides(self, at: LayerPass) -> tuple[Number, Number]:
        """Keys and values that one layer keeps if all of it is on the GPU, tails left out. [B]"""
        return _sides(at, self.read)

    def tail(self, at: LayerPass) -> Number:
        """What stays on the GPU in full precision wherever the rest is. [B]"""
        m, size = at.d.shard, at.d.stack.cache_overhead * at.p.batch
        return size * self.read.tail_bytes(m.k_width, m.v_width)

    def home(self, at: LayerPass) -> tuple[Number, Number]:
        """Keys and values in host memory if all that can move is there. [B]"""
        return self.sides(at) if self.read == self.stored else _sides(at, self.stored)

    def resident(self, at: LayerPass) -> dict[str, Number]:
        """What one layer keeps on the GPU if all of it is there; ``kv`` is the cache. [B]"""
        return {"kv": sum(self.sides(at), self.tail(at))}


def _sides(at: LayerPass, stored: Format) -> tuple[Number, Number]:
    m, size = at.d.shard, at.d.stack.cache_overhead * at.p.batch
    k, v = stored.resident_sides(m.k_width, m.v_width, at.kept)
    return size * k, size * v


@dataclass(frozen=True)
class Placement(Part):
    """Where cached tokens, weights and hidden states live; the defaults keep all on the GPU."""

    name = "gpu"
    axis: ClassVar[Axis] = "placement"

    @property
    def exact(self) -> bool:
        """Moving numbers does not change them."""
        return True

    @property
    def k_host(self) -> Number:
        """Share of the cached keys that lives in host memory and is copied to the GPU."""
        return 0.0

    @property
    def v_host(self) -> Number:
        """Share of the cached values that lives in host memory and is copied to the GPU."""
        return 0.0

    @property
    def on_cpu(self) -> float:
        """Share of the cached tokens that the CPU attends to."""
        return 0.0

    @property
    def recomputes(self) -> bool:
        """Whether some keys and values are recomputed from layer inputs."""
        return False

    @property
    def streams(self) -> bool:
        """Whether copies run ahead of layers, or the CPU attends."""
        return False

    def weights_alone(self) -> "Placement":
        """The same for weights and hidden states, with caches on the GPU."""
        return self

    @property
    def tiles(self) -> int:
        """Parts of the batch that pass through a layer one after another."""
        return 1

    def runtime(self, at: LayerPass) -> list[Op]:
        """Fixed time of the software that moves caches."""
        return []

    def fetch(self, at: LayerPass) -> list[Op]:
        """What brings the cache to the GPU in decoding."""
        return []

    def store(self, at: LayerPass) -> list[Op]:
        """What sends new tokens home."""
        return []

    def waits(self, at: LayerPass) -> tuple[str, ...]:
        """Ops that attention waits for."""
        return ()

    def attend(self, at: LayerPass) -> list[Op]:
        """Attention of a decoding pass."""
        return attend(at)

    def finish(self, at: LayerPass) -> list[Op]:
        """What else is sent home once the prompt has been attended to."""
        return []

    def ahead(self, at: LayerPass) -> list[Op]:
        """Copies of weights and hidden states, which start before the layer does."""
        return []

    def weights_wait(self) -> tuple[str, ...]:
        """Ops that the layer's first product waits for."""
        return ()

    def output_wait(self, at: LayerPass) -> tuple[str, ...]:
        """Ops that the output projection waits for."""
        return ()

    def cache(self, at: LayerPass) -> Buffers:
        """What one layer's storage keeps, by tier. [B]"""
        return {"gpu": at.storage.resident(at)}

    def weights(self, size: float) -> Buffers:
        """Weights of one layer of that size, by tier. [B]"""
        return {"gpu": {"weights": size}}


@dataclass(frozen=True)
class Drafting(Part):
    """Who proposes tokens that one pass of the model then verifies; by default nothing does."""

    name = "none"
    axis: ClassVar[Axis] = "drafting"

    @property
    def exact(self) -> bool:
        """Verified tokens are the model's own."""
        return True

    @property
    def drafts(self) -> int:
        """Tokens proposed per round."""
        return 0

    @property
    def accepted(self) -> float:
        """Drafts accepted per round, on average."""
        return 0.0

    @property
    def assumes(self) -> str:
        """What its speed rests on that the user has not said, if anything."""
        return ""

    def with_rounds(self, drafts: int | None = None, acceptance: float | None = None) -> Self:
        """The same with other drafts per round, or another acceptance (accepted over drafted)."""
        return self

    def own_pass(self, p: Point, parts: Parts) -> Parts | None:
        """How the model's own layers make a draft at that point; None if others make it."""
        return None

    def steps(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """The draft passes of a round that are not the model's own."""
        return ()

    def prompt_steps(self, d: Deployment, p: Point) -> tuple[Step, ...]:
        """What else reads the prompt."""
        return ()

    def after_prompt(self, at: LayerPass) -> list[Op]:
        """What a layer does for the drafts once it has read the prompt."""
        return []

    def extra_bytes(self, at: LayerPass) -> Number:
        """What verification moves for the drafts within the attention kernel. [B]"""
        return 0.0

    def resident(self, at: LayerPass) -> Buffers:
        """What a layer keeps for the drafts. [B]"""
        return {}

    def beside_weights(self, at: LayerPass) -> Buffers:
        """Weights that a layer has for the drafts beside its own. [B]"""
        return {}

    def beside(self, d: Deployment, p: Point) -> Buffers:
        """What is kept for the drafts outside the model's layers: another model. [B]"""
        return {}
