"""InfiniGen: the next layer's tokens are guessed from this layer's input, and fetched.

W. Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV
Cache Management", OSDI 2024, sections 4.2 and 4.3, https://arxiv.org/abs/2406.19707.

- Prompt (section 4.2): the channels of keys and queries that weigh most in all prompts are chosen
  per KV head; partial keys and partial query weights stay on the GPU, the cache leaves for the host
  (``Guessed.store_prompt``).
- Decode (section 4.3): the input of layer i - 1 times the partial weights of layer i gives guessed
  queries, whose products with layer i's partial keys rank its tokens; the best are fetched beside
  the rest of layer i - 1 (``Guessed.before_input``). Layer i attends to them and to the newest
  token.

Where this departs: weights are not skewed beforehand by a singular value decomposition, which turns
keys and queries alike and changes no product; the number of tokens is the budget, not those within
a margin of the best. Channels come in the pairs that rotary positions turn. Heads of a group choose
together, by the greatest of their products.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.papers.infinigen import Guessed as Settings
from kvsim.techniques.papers.infinigen import guessing_channels
from kvsim.validate.counter import OpRecord
from kvsim.validate.model.architecture import rotate
from kvsim.validate.model.attention import Pass, attend
from kvsim.validate.parts.host_rows import HostCopies
from kvsim.validate.parts.rows import Fp16
from kvsim.validate.parts.selection import LayerCache, LayerContext
from kvsim.validate.parts.store import CacheRoom, KvStore, Resident

SMALL_SETTINGS = ("budget={quarter}",)


class Guessed(LayerCache):
    """Cache of one layer on the host, with partial keys and query weights on the GPU."""

    direct = False  # the prompt leaves for the host

    def __init__(self, place: LayerContext) -> None:
        settings = place.settings(Settings)
        super().__init__(place)
        self.refuse_windows()
        if self.run.technique.name != "infinigen":
            raise InputError(
                "guessed: no real implementation combines it with other parts; run infinigen alone"
            )
        m, channels = self.model, guessing_channels(settings.part, self.model.head_dim)
        self.host = HostCopies(self, self.capacity)
        self.budget = min(int(settings.budget), self.capacity - 1)
        shape = (self.batch, m.kv_heads, self.capacity, channels)
        self.partial = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.weights = self.run.decoder.weights.layers[self.layer].qkv.rows(0, m.heads * channels)
        self.weights = type(self.weights)(*(torch.empty_like(t) for t in self.weights.tensors()))
        self.asked = torch.zeros(m.kv_heads, m.head_dim, device=self.device)
        self.channels = torch.zeros(m.kv_heads, channels, dtype=torch.long, device=self.device)
        room = (2, 2, self.batch, m.kv_heads, self.budget, m.head_dim)
        self.buffers_of = self.run.shared(
            "guessed", lambda: torch.zeros(room, dtype=self.dtype, device=self.device)
        )
        self.arrived, self.fetched = self.host.stored, self.buffers_of[0]

    def make(self, slots: int) -> KvStore:
        """Create a store without slots, as the whole cache is in host memory."""
        m = self.model
        sizes = self.batch, m.kv_heads, m.head_dim, self.dtype, self.device
        return Fp16(CacheRoom(self.parts.storage, 0, self.counter, *sizes))

    def attend_prompt(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend in full, and sum the queries' magnitudes, by which channels are chosen."""
        with self.counter.op("partial_keys") as record:
            weighs = queries.abs().sum((0, 2), dtype=torch.float32)
            self.asked += weighs.view(keys.shape[1], -1, keys.shape[3]).sum(1)
            record.reads(queries)
        return super().attend_prompt(queries, keys, values, step)

    def store_prompt(self, keys: Tensor, values: Tensor) -> None:
        """Choose channels, keep partial keys and query weights, and copy the cache to the host."""
        m = self.model
        with self.counter.op("partial_keys") as record:
            weighs = self.asked + keys.abs().sum((0, 2), dtype=torch.float32)
            pairs = weighs.view(len(weighs), 2, -1).sum(1)
            best = pairs.topk(self.channels.shape[1] // 2).indices.sort(-1).values
            self.channels.copy_(torch.cat([best, best + pairs.shape[1]], 1))
            record.reads(keys)
            self._keep_partial(record, keys, 0)
            heads = torch.arange(m.heads, device=keys.device)[:, None]
            rows = heads * m.head_dim + self.channels.repeat_interleave(m.queries_per_kv, 0)
            whole = self.run.decoder.weights.layers[self.layer].qkv
            for mine, every in zip(self.weights.tensors(), whole.tensors(), strict=True):
                mine.copy_(every[rows.flatten()])
                record.reads(mine).writes(mine)
        self.host.store_prompt(keys, values)

    def prompt_done(self) -> None:
        """Wait until the last layer's prompt is in host memory."""
        self.host.has_left()

    def in_flight(self) -> list[Tensor]:
        """Return the keys and values of the prompt that are being copied to the host."""
        return list(self.host.leaving)

    def before_input(self, tensor: Tensor, step: Pass) -> None:
        """Rank the cached tokens by the previous layer's input, and fetch the best."""
        m, before = self.model, step.starts[0]
        norm = self.run.decoder.weights.layers[self.layer].q_norm
        with self.counter.op("guess_query") as record:
            asked = self.weights(tensor).view(self.batch, m.kv_heads, m.queries_per_kv, -1)
            record.reads(tensor, *self.weights.tensors()).writes(asked)
        with self.counter.op("guess") as record:
            turned = asked
            if norm:
                scaled = F.rms_norm(asked, asked.shape[-1:], eps=norm.eps)
                turned = scaled * norm.weight[self.channels][None, :, None]
            if step.turns:
                cos, sin = (t[:, 0, 0][:, self.channels][:, :, None] for t in step.turns)
                turned = rotate(turned, cos, sin)
            keys = self.partial[:, :, :before]
            products = turned @ keys.mT
            record.reads(asked, keys, products).writes(products)
        with self.counter.op("topk") as record:
            best = products.amax(2)
            record.writes(best).reads(best)
            index = best.topk(min(self.budget, before), dim=-1).indices
        self._fetch(index)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Attend to the fetched tokens and the new one, and copy the new one to host memory."""
        with self.counter.op("partial_keys") as record:
            record.reads(keys)
            self._keep_partial(record, keys, step.starts[0])
        self.arrived.wait()
        with self.counter.op("attn") as record:
            pairs = zip(self.fetched, (keys, values), strict=True)
            k, v = (torch.cat([rows, new], 2) for rows, new in pairs)
            record.writes(keys, values)
            out = attend(record, queries, k, v, "all")
        self.host.append(keys, values, step)
        return out

    def buffers(self) -> Resident:
        """Return partial keys and weights, the cache in host memory, and buffers that layers share.

        The first layer alone lists the shared buffers, so that they count once.
        """
        own = {"partial keys": [self.partial], "partial weights": [*self.weights.tensors()]}
        if self is next(x for x in self.run.layers if isinstance(x, Guessed)):
            own["fetched pages"] = [self.buffers_of]
        return {"gpu": own, "host": {"kv": self.host.homes}}

    def _fetch(self, index: Tensor) -> None:
        """Copy rows ``index``, (sequences, KV heads, n), to the buffer that is not in use."""
        room = self.buffers_of[self.layer % 2].flatten(1)
        count = index.numel() * self.model.head_dim
        self.fetched = room[:, :count].view(2, *index.shape, -1)
        self.arrived = self.host.fetch(index, self.fetched.unbind())
        self.counter.copy("fetch", "h2d", [self.fetched], rows=2 * index.numel())

    def _keep_partial(self, record: OpRecord, keys: Tensor, first: int) -> None:
        """Keep the chosen channels of keys (sequences, KV heads, new, dim) from a slot on."""
        made = keys.gather(3, self.channels[None, :, None].expand(*keys.shape[:3], -1))
        self.partial[:, :, first : first + keys.shape[2]] = made
        record.writes(made)
