"""Keys on the GPU, values in host memory, the best N fetched for every query head."""

import torch
from torch import Tensor

from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation, Resident, SmallRun, put
from kvsim.validate.impl.eviction import scores
from kvsim.validate.kernels.gather import gather, rows_at
from kvsim.validate.model.attention import Pass, attend, visible
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.transfer import Mark, Transfers

Copies = list[tuple[Tensor, Tensor]]  # to, from


class Kcache(Implementation):
    """Values live on the host token by token, (tokens, batch, KV heads, dim).

    The N chosen weights are used as they are, without scaling them to a sum of 1. The newest
    token's own value is on the GPU anyway and is taken from there: nothing waits for its copy to
    the host. Where N values for every head of a group are no fewer than all, all are copied once.
    """

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """A quarter of the values is fetched."""
        return [f"n={max(1, run.prompt // 4)}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        m, layers = self.model, self.model.layers
        self.here = min(layers, int(technique.settings["gpu_layers"]))
        self.n = min(int(technique.settings["n"]), self.capacity)
        self.transfers = Transfers(decoder.device, decoder.tally)
        self.keys = [self.empty(self.capacity) for _ in range(layers)]
        self.values = [self.empty(self.capacity) for _ in range(self.here)]
        home = (self.capacity, self.batch, m.kv_heads, m.head_dim)
        self.homes = [self.transfers.host(home, decoder.dtype) for _ in range(layers - self.here)]
        self.buffers: list[Tensor] = []  # for values on their way in or out
        self._sent: dict[int, tuple[Mark, Copies]] = {}  # the last to each home, with its source

    def prefill(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Values of one layer leave while the next one is computed."""
        if layer < self.here:
            cached_values = self.values[layer]
        else:
            if not self.buffers:
                shape = (self.prompt, *self.homes[0].shape[1:])
                self.buffers = [
                    torch.zeros(shape, dtype=values.dtype, device=values.device) for _ in "12"
                ]
            if not step.starts[0]:
                self._wait(layer - 2)
            cached_values = self.buffers[layer % 2].permute(1, 2, 0, 3)
        with self.tally.op("attn") as marks:
            put(self.keys[layer], keys, step)
            put(cached_values, values, step)
            marks.writes(keys, values)
            seen = visible(step, step.length, self.shapes[layer].window)
            cached_keys, cached_values = (
                c[:, :, : step.length] for c in (self.keys[layer], cached_values)
            )
            out = attend(marks, queries, cached_keys, cached_values, seen)
        if layer >= self.here and step.length == self.prompt:
            home, source = self.homes[layer - self.here], self.buffers[layer % 2]
            self._send(layer, [(home[: self.prompt], source)])
        return out

    def prompt_read(self) -> None:
        """From here on, buffers hold fetched values and which they are."""
        for layer in list(self._sent):
            self._wait(layer)
        self.buffers = []
        if self.homes:
            m, device = self.model, self.decoder.device
            halves = (2, self.batch, m.kv_heads, m.queries_per_kv * self.n, m.head_dim // 2)
            index = torch.zeros(
                self.batch, m.kv_heads, m.queries_per_kv * self.n, dtype=torch.int32, device=device
            )
            self.buffers = [torch.zeros(halves, dtype=self.decoder.dtype, device=device), index]

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Scores over all keys, then the values of the best N."""
        here = layer < self.here
        count, length = min(self.n, step.length), step.length
        with self.tally.op("attn" if here else "scores") as marks:
            put(self.keys[layer], keys, step)
            marks.writes(keys)
            cached_keys = self.keys[layer][:, :, :length]
            held = torch.arange(length, device=keys.device)
            seen = visible(step, held, self.shapes[layer].window)
            weights = scores(queries, cached_keys, seen if isinstance(seen, Tensor) else None).to(
                queries.dtype
            )
            marks.reads(queries, cached_keys)
            marks.visible(1, length, seen)
        with self.tally.op("topk") as marks:
            best = weights[:, :, 0].topk(count, dim=-1)
            index = best.indices if here else self._keep(best.indices)
            marks.writes(weights)
            marks.reads(weights)
        if not here:
            self._wait(layer)
            self._send_new(layer, values.permute(2, 0, 1, 3).contiguous(), step)
        with self.tally.op("attn") as marks:
            if here:
                put(self.values[layer], values, step)
                marks.writes(values)
            chosen = self._chosen(layer, index, values, step)
            out = best.values[:, :, None] @ chosen
            rows = min(self.model.queries_per_kv * count, length)  # read once per KV head
            marks.reads(values[:, :, :1].expand(-1, -1, rows, -1), best.values)
            marks.writes(out)
        return out

    def resident(self) -> Resident:
        """Keys, values of both tiers, buffers."""
        gpu = {"kv": [*self.keys, *self.values], "value buffers": self.buffers}
        return {"gpu": {k: v for k, v in gpu.items() if v}, "host": {"kv": self.homes}}

    def close(self) -> None:
        """End the threads that copy, once nothing is on its way."""
        self.transfers.close()

    def _keep(self, index: Tensor) -> Tensor:
        """The chosen tokens in a buffer of their own, as 32-bit numbers."""
        room = self.buffers[1].view(-1)[: index.numel()].view(index.shape)
        return room.copy_(index)

    def _chosen(self, layer: int, index: Tensor, values: Tensor, step: Pass) -> Tensor:
        """The values that ``index`` (batch, heads, N) names, (batch, heads, N, dim)."""
        kv_heads, length = self.model.kv_heads, step.length
        by_group = index.view(self.batch, kv_heads, -1)
        if layer < self.here:
            return self._rows(self.values[layer][:, :, :length], by_group, index)
        home = self.homes[layer - self.here]
        if by_group.shape[2] >= length:
            whole = self.buffers[0].view(-1)[: home[:length].numel()].view_as(home[:length])
            whole.copy_(home[:length], non_blocking=True)
            self.tally.copy("fetch_v", "h2d", [whole], rows=self.batch * kv_heads * length)
            chosen = self._rows(whole.permute(1, 2, 0, 3), by_group, index)
        else:
            every, half = home.permute(1, 2, 0, 3), self.model.head_dim // 2
            shape = (2, *by_group.shape, half)
            room = self.buffers[0].view(-1)[: torch.Size(shape).numel()].view(shape)
            gather(every[..., :half], every[..., half:], by_group, room[0], room[1])
            self.tally.copy("fetch_v", "h2d", [room], rows=by_group.numel())
            chosen = torch.cat((room[0], room[1]), dim=-1).view(*index.shape, -1)
        own = (index == step.positions[:, :, None])[..., None]
        return torch.where(own, values.repeat_interleave(self.model.queries_per_kv, 1), chosen)

    def _rows(self, values: Tensor, by_group: Tensor, index: Tensor) -> Tensor:
        """Rows of values on the GPU, (batch, heads, N, dim)."""
        return rows_at(values, by_group).view(*index.shape, -1)

    def _send_new(self, layer: int, new: Tensor, step: Pass) -> None:
        """One token per sequence (1, batch, KV heads, dim) to its slot."""
        home = self.homes[layer - self.here]
        if step.uniform:
            start = step.starts[0]
            self._send(layer, [(home[start : start + 1], new)])
        else:
            self._send(layer, [(home[s, i], new[0, i]) for i, s in enumerate(step.starts)])

    def _send(self, layer: int, copies: Copies) -> None:
        self.tally.copy("store_v", "d2h", [source for _, source in copies])

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self._sent[layer] = self.transfers.d2h(work, self.transfers.mark()), copies

    def _wait(self, layer: int) -> None:
        """Until a layer's values are at home; only then may their source be used again."""
        if layer in self._sent:
            self._sent.pop(layer)[0].wait()
