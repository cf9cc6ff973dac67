"""Implementations that note, while they run, what their selection keeps of true attention."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.techniques.axes.base import Storage
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import NullCounter
from kvsim.validate.model.attention import Pass, Seen
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.parts.base import Implementation
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.scores import by_kv_head, scores
from kvsim.validate.parts.selection import LayerContext
from kvsim.validate.parts.store import CacheRoom
from kvsim.validate.techniques import IMPLEMENTATIONS
from kvsim.validate.techniques.full import Full
from kvsim.validate.techniques.specache import Pairs
from kvsim.validate.techniques.zipcache import Zipcache


class AttentionShares:
    """Means per layer of what is noted step by step."""

    def __init__(self, layers: int) -> None:
        self._sums = [torch.zeros(())] * layers
        self._counts = [0] * layers

    def note(self, layer: int, shares: Tensor) -> None:
        """Add shares (samples, ...), whose mean over samples is kept."""
        self._sums[layer] = self._sums[layer] + shares.double().sum(0).cpu()
        self._counts[layer] += len(shares)

    def means(self) -> Tensor:
        """The mean of each layer. (layers, ...)"""
        pairs = zip(self._sums, self._counts, strict=True)
        return torch.stack([total / max(count, 1) for total, count in pairs])


class WatchedFull(Full):
    """Notes the attention mass of the k largest shares of every query head, for all k to half."""

    def __init__(
        self, technique: Technique, decoder: Decoder, lengths: list[int], generate: int
    ) -> None:
        super().__init__(technique, decoder, lengths, generate)
        self.counts = powers(self.prompt)
        self.mass = AttentionShares(self.model.layers)

    def attend(
        self, layer: int, tensor: Tensor, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor:
        """As full KV; then the shares once more, in the open."""
        out = super().attend(layer, tensor, queries, keys, values, step)
        if step.kind == "decode":
            shares = scores(queries, self.k[layer][:, :, : step.length])
            largest = shares.topk(self.counts[-1], dim=-1).values.double().cumsum(-1)
            places = torch.tensor(self.counts, device=queries.device) - 1
            self.mass.note(layer, largest[..., places].clamp(max=1.0).flatten(0, 2))
        return out


class NotingPairs(Pairs):
    """Notes how the fetched pairs compare with the k that hold most of a step's attention.

    What they hold is the attention of the output token's query over full-precision keys, averaged
    over the query heads that share a KV head, as the selection itself averages.
    """

    def __init__(self, place: LayerContext) -> None:
        super().__init__(place)
        self.noted: list[Tensor] = []  # (samples, 2): pairs, mass

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """Compare what was fetched for this step, then go on."""
        if self.guesses and self.chosen and step.kind == "decode":
            self.stored.wait()
            before = step.starts[0]
            home = self.homes[0][:, :, :before].to(queries.device)
            cached_keys = torch.cat([home, keys[:, :, :1]], 2)
            shares = by_kv_head(scores(queries[:, :, :1], cached_keys), keys.shape[1])[
                :, :, 0, :before
            ]
            best = shares.topk(min(self.chosen, before), dim=-1)
            index = self.index.long()
            spare = torch.nn.functional.pad(torch.zeros_like(shares, dtype=torch.bool), (0, 1))
            places = torch.where(index < 0, before, index)  # nothing was fetched: the spare place
            fetched = spare.scatter(2, places, value=True)[..., :before]
            pairs = fetched.gather(2, best.indices).double().mean(-1)
            mass = (shares * fetched).double().sum(-1) / best.values.double().sum(-1)
            self.noted.append(torch.stack([pairs, mass.clamp(max=1.0)], -1).flatten(0, 1))
        return super().attend(queries, keys, values, step)


class NotingZipcache(Zipcache):
    """Notes how many of a prompt's salient tokens the probes find.

    Truly salient are those that equation 8 finds with every query as a probe.
    """

    def __init__(self, part: Storage, room: CacheRoom, slots: int, counter: NullCounter) -> None:
        super().__init__(part, room, slots, counter)
        self.noted: list[Tensor] = []
        self._queries: list[Tensor] = []  # of the prompt, chunk by chunk

    def attend_prompt(
        self, queries: Tensor, keys: Tensor, values: Tensor, step: Pass, seen: Seen
    ) -> Tensor:
        """Keep every query until the prompt is whole."""
        self._queries.append(queries)
        return super().attend_prompt(queries, keys, values, step, seen)

    def pack(self, keys: Tensor, values: Tensor, saliency: Tensor, time: int) -> None:
        """Compare the choice with the best one."""
        if time == 0:
            every, self._queries = torch.cat(self._queries, 2), []
            for i, salient in enumerate(self.salient):
                if salient:
                    truth = exact_saliency(every[i : i + 1], keys[i : i + 1])
                    best = truth.topk(salient, dim=-1).indices
                    chosen = torch.zeros_like(truth, dtype=torch.bool)
                    chosen.scatter_(1, saliency[i].topk(salient, dim=-1).indices, value=True)
                    self.noted.append(chosen.gather(1, best).double().mean(-1))
        super().pack(keys, values, saliency, time)


class Watched(Composed):
    """A composition whose layers note what they find."""

    instead = MappingProxyType({Zipcache: NotingZipcache, Pairs: NotingPairs})

    @property
    def noted(self) -> AttentionShares:
        """What every layer has noted."""
        shares = AttentionShares(self.model.layers)
        for i, layer in enumerate(self.layers):
            noting = layer if isinstance(layer, NotingPairs) else layer.kv
            assert isinstance(noting, (NotingPairs, NotingZipcache))
            for noted in noting.noted:
                shares.note(i, noted)
        return shares


WATCHED: Mapping[str, type[Implementation]] = {
    **IMPLEMENTATIONS,
    "full": WatchedFull,
    "specache": Watched,
    "zipcache": Watched,
}


def powers(prompt: int) -> list[int]:
    """Powers of two up to half a prompt, and at least 1."""
    return [2**i for i in range(max(prompt // 2, 1).bit_length())]


def exact_saliency(queries: Tensor, keys: Tensor) -> Tensor:
    """Normalised attention of all queries (1, heads, tokens, dim), (KV heads, tokens)."""
    tokens = torch.arange(queries.shape[2], device=queries.device)
    seen = tokens <= tokens[:, None]
    shares = by_kv_head(scores(queries, keys, seen), keys.shape[1]).sum(2)[0]
    return shares / torch.arange(len(tokens), 0, -1, device=queries.device)
