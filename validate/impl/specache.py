"""SpeCache: a packed cache on the GPU, the best pairs fetched from the host one step ahead."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvsim.graph import Tier
from kvsim.techniques.base import Technique
from kvsim.techniques.specache import Specache as Settings
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.packed_layers import Packed, pack_keys, pack_values
from kvsim.validate.impl.sides import check_residual
from kvsim.validate.kernels.attention import PartialAttention
from kvsim.validate.kernels.gather import gather
from kvsim.validate.kernels.quantise import Levels
from kvsim.validate.kernels.topk import softmax_top_k
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.tally import Marks, size
from kvsim.validate.transfer import Mark, Transfers

if TYPE_CHECKING:
    from kvsim.validate.run import Generation


class Specache(Packed):
    """Speculative prefetch: each step decodes the output token and a guess of the next.

    The output token attends to the packed cache with the pairs in place that the guess chose a
    step earlier; the guess attends alongside and chooses those of the next step. Only the output
    token's keys and values stay. They are packed after attention, and stored on the host before
    the pairs of the next step are gathered there.

    References
    ----------
    .. [1] S. Jie et al., "SpeCache", ICML 2025, section 3.3, algorithms 1 to 3; equation 3 for one
       bit.
    """

    differences: ClassVar[dict[str, str]] = {
        "quantise": "keys are packed a residual at a time; the prediction spreads that evenly",
    }

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """A quarter of the pairs is fetched."""
        return [f"group={run.group},residual={run.group},k={max(1, run.prompt // 4)}"]

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        settings = technique.term(Settings)
        self.own = 2 if settings.speculative else 1  # query tokens of a decoding step
        super().__init__(technique, decoder, lengths, generate)
        self.residual = check_residual(technique.name, settings.residual, settings.group)
        where: Levels = "centres" if settings.bits == 1 else "ends"
        slots = self.residual + self.own
        self.sides(slots, int(settings.bits), settings.group, where)
        m, layers, rows = self.model, range(self.model.layers), self.capacity - self.slack
        self.chosen = int(min(int(settings.k), rows))
        self.transfers = Transfers(decoder.device, decoder.tally)
        # one token of the whole batch is contiguous, so that storing it is one copy
        shape = (rows if self.chosen else 0, self.batch, m.kv_heads, m.head_dim)
        host = self.transfers.host
        self.k_home = [host(shape, decoder.dtype).permute(1, 2, 0, 3) for _ in layers]
        self.v_home = [host(shape, decoder.dtype).permute(1, 2, 0, 3) for _ in layers]
        self.fetched = [(self.empty(self.chosen), self.empty(self.chosen)) for _ in layers]
        none = torch.full((self.batch, m.kv_heads, self.chosen), -1, dtype=torch.int32)
        self.index = [none.to(decoder.device) for _ in layers]
        self._arrived: list[Mark] = [self.transfers.mark() for _ in layers]
        self._leaving: list[tuple[Mark, tuple[Tensor, ...]]] = [
            (self.transfers.mark(), ()) for _ in layers
        ]
        self.guess = torch.zeros(self.batch, dtype=torch.long, device=decoder.device)

    @property
    def slack(self) -> int:
        """The guess behind the last token."""
        return self.own - 1

    def packed_keys(self, tokens: int) -> int:
        """Tokens whose keys are packed: whole blocks of the residual. [tokens]"""
        return tokens // self.residual * self.residual

    def packed_values(self, tokens: int) -> int:
        """All but the residual."""
        return max(tokens - self.residual, 0)

    def filled(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Pack the prompt and store it on the host while the next layer reads it."""
        super().filled(layer, keys, values)
        if not self.chosen:
            return
        if layer:
            self._left(layer - 1)  # its copy makes room for this one's
        self._store(layer, slice(0, self.prompt), keys, values)

    def prompt_read(self) -> None:
        """The last layer's prompt has to have left."""
        self._left(self.model.layers - 1)
        super().prompt_read()

    def between(self, run: "Generation") -> None:
        """Pre-decoding: the first output token chooses the first pairs and gives the first guess.

        Its keys and values are dropped; the first step computes them with the pairs in place.
        """
        if self.own == 2:
            self.guess = run.choose(run.forward(run.last[:, None], "between")[:, 0])

    def round(self, run: "Generation") -> None:
        """Output token and guess together; each gives its successor."""
        if self.own == 1:
            super().round(run)
            return
        logits = run.forward(torch.stack([run.last, self.guess], 1), "decode")
        chosen = run.choose(logits)
        self.guess = chosen[:, 1]
        run.emit(chosen[:, 0], logits=logits[:, :1])

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """Attend with the fetched pairs in place, choose and prefetch the next, store, pack."""
        self._arrived[layer].wait()
        with self.tally.op("attn") as marks:
            self.k[layer].append(keys, step.positions)
            self.v[layer].append(values, step.positions)
            marks.writes(keys, values)
            known = self.own == 2 and step.kind != "between"
            part = self._look(marks, layer, queries, step, fetched=known, scored=self.chosen > 0)
        stays = step.kind != "between"
        if self.chosen and self.own == 2:
            if stays:
                self._append_home(layer, keys, values, step)
            self._choose(layer, part, step, eligible=step.positions[:, -1])
        elif self.chosen:
            self._choose(layer, part, step, eligible=step.positions[:, 0])
            self._arrived[layer].wait()
            with self.tally.op("attn_again") as marks:
                part = self._look(marks, layer, queries, step, fetched=True)
            self._append_home(layer, keys, values, step)
        if stays:
            pack_values(self, layer, step.starts, step.positions[:, 0] - self.residual)
            ends = [n + 1 for n in step.starts]
            pack_keys(self, layer, ends, step.positions[:, 0] + 1 - self.residual)
        return part.out.to(queries.dtype)

    def resident(self) -> Resident:
        """The packed cache and the fetched pairs with their indices; everything on the host.

        The ring has slots for a step's own tokens beyond the residual.
        """
        sides = (*self.k, *self.v)
        held: Resident = {"gpu": {"kv": [t for s in sides for t in s.tensors(self.residual)]}}
        held["gpu"]["new tokens"] = [s.ring[:, :, self.residual :] for s in sides]
        held["gpu"]["fetched pairs"] = [t for pair in self.fetched for t in pair]
        held["gpu"]["indices"] = self.index
        held["host"] = {"kv": [*self.k_home, *self.v_home]}
        return held

    def resident_bytes(self) -> dict[Tier, dict[str, int]]:
        """A layer's prompt, and what is on its way to the host."""
        sizes = super().resident_bytes()
        if self.chosen and "prompt kv" in sizes["gpu"]:
            leaving = sum(size(*held) for _, held in self._leaving)
            sizes["gpu"]["kv on the way out"] = sizes["gpu"].pop("prompt kv") + leaving
        return sizes

    def close(self) -> None:
        """End the threads that copy, once nothing is on its way."""
        self.transfers.close()

    def _look(
        self,
        marks: Marks,
        layer: int,
        queries: Tensor,
        step: Pass,
        fetched: bool,
        scored: bool = False,
    ) -> PartialAttention:
        pairs = bool(self.chosen) and fetched
        return self.look(
            marks,
            layer,
            queries,
            step,
            list(step.starts),
            index=self.index[layer] if pairs else None,
            fetched=self.fetched[layer] if pairs else None,
            scored=scored,
        )

    def _choose(self, layer: int, part: PartialAttention, step: Pass, eligible: Tensor) -> None:
        """Choose the next pairs among the first ``eligible`` (batch,) tokens and fetch them."""
        assert part.scores is not None
        scores, heads = part.scores[..., : step.length], self.model.kv_heads
        with self.tally.op("topk") as marks:
            index = softmax_top_k(scores, heads, self.chosen, eligible.int())
            index = torch.nn.functional.pad(index, (0, self.chosen - index.shape[-1]), value=-1)
            marks.writes(scores)
            marks.reads(scores)
        self.index[layer] = index
        k_home, v_home, pairs = self.k_home[layer], self.v_home[layer], self.fetched[layer]

        def fetch() -> None:
            gather(k_home, v_home, index.clamp(min=0), *pairs)

        ready = self.transfers.mark()
        self._arrived[layer] = self.transfers.h2d(fetch, ready, self._leaving[layer][0])
        many = min(self.chosen, int(max(step.starts)) + step.new - 1)
        moved = [p[:, :, :many] for p in pairs]
        self.tally.copy("prefetch", "h2d", moved, rows=2 * self.batch * heads * many)

    def _append_home(self, layer: int, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Store the output token on the host."""
        keys, values = keys[:, :, :1], values[:, :, :1]
        if step.uniform:
            self._store(layer, slice(step.starts[0], step.starts[0] + 1), keys, values)
            return
        homes = (self.k_home[layer], self.v_home[layer])
        rows = list(enumerate(step.starts))

        def store() -> None:
            for home, new in zip(homes, (keys, values), strict=True):
                for i, row in rows:
                    home[i, :, row].copy_(new[i, :, 0], non_blocking=True)

        self._send(layer, store, keys, values)

    def _store(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Copy the same rows of every sequence to the host."""
        homes = (self.k_home[layer], self.v_home[layer])
        laid_out = (t.permute(2, 0, 1, 3) for t in (keys, values))
        made = tuple(t.clone(memory_format=torch.contiguous_format) for t in laid_out)

        def store() -> None:
            for home, new in zip(homes, made, strict=True):
                home.permute(2, 0, 1, 3)[rows].copy_(new, non_blocking=True)

        self._send(layer, store, *made)

    def _left(self, layer: int) -> None:
        """Wait until a layer's prompt is on the host, and free the copy that was sent."""
        mark, _ = self._leaving[layer]
        mark.wait()
        self._leaving[layer] = mark, ()

    def _send(self, layer: int, store: Callable[[], None], *held: Tensor) -> None:
        """Queue a copy to the host; its source is kept until the next one of that layer."""
        mark = self.transfers.d2h(store, self.transfers.mark())
        self._leaving[layer] = mark, held  # what is held here has left: see ``_left``, ``_choose``
        self.tally.copy("store_kv", "d2h", held)
