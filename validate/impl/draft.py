"""A smaller model drafts: its own decoder over a full cache, beside the model that verifies."""

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.techniques.axes import Drafting
from kvsim.techniques.draft import Draft as Settings
from kvsim.validate.impl.base import Resident, SmallRun
from kvsim.validate.impl.drafter import Drafter
from kvsim.validate.impl.full import Full
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import random_weights

if TYPE_CHECKING:
    from kvsim.validate.impl.composed import Composed
    from kvsim.validate.run import Generation

CAUGHT_UP = "where every draft was accepted, the draft model reads the last of them first"

UNREAD = "no token is chosen by the logits that the draft model has after the prompt"


class Draft(Drafter):
    """A model of the catalogue with random weights: what it costs is real, what it proposes is not.

    The last draft of a round never passed through the draft model. If it was accepted, the next
    round begins with it.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 3.
    """

    differences = MappingProxyType(
        {
            **Drafter.differences,
            **dict.fromkeys(("attn", "qkv", "out", "up", "down", "lm_head"), CAUGHT_UP),
            "sample": UNREAD,
        }
    )

    @classmethod
    def small_settings(cls, run: SmallRun) -> list[str]:
        """None that suit every model: both need the same tokens."""
        return []

    def __init__(self, run: "Composed", part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        if part.weights != "fp16" or part.tp > 1:
            raise InputError("draft: its real implementation has fp16 weights on one GPU")
        arch, target = load_architecture(part.model), run.decoder
        weights = random_weights(arch, target.device, target.dtype)
        self.decoder = Decoder(arch, weights, target.length, target.tally)
        self.cache = Full(parse("full"), self.decoder, run.lengths, run.capacity - run.prompt)

    def begin(self, generation: "Generation") -> None:
        """The draft model reads the prompt too, whose logits are not needed."""
        lengths = torch.tensor([len(p) for p in generation.prompts])
        padded = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(padded, generation.prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt)
        self.decoder.tally.begin("prefill")
        device, positions = self.decoder.device, torch.arange(padded.shape[1])[None]
        starts = (0,) * len(lengths)
        hidden = self._pass(padded.to(device), positions.to(device), starts)
        self.decoder.head(hidden[torch.arange(len(lengths)), lengths.to(device) - 1])

    def propose(self, generation: "Generation", tokens: Tensor, ahead: int) -> Tensor | None:
        """Logits (batch, 1, vocab) after the newest token of every sequence."""
        new, begins = tokens, [n + ahead for n in generation.cached]
        if not ahead and self._behind(generation):
            done = torch.tensor(generation.done, device=tokens.device)
            before = generation.tokens.gather(1, (done - 2).clamp(min=0)[:, None])
            new, begins = torch.cat([before, tokens], 1), [n - 1 for n in begins]
        self.decoder.tally.begin("draft")
        first = torch.tensor(begins, device=tokens.device)[:, None]
        positions = first + torch.arange(new.shape[1], device=tokens.device)
        return self.decoder.head(self._pass(new, positions, tuple(begins))[:, -1:])

    def resident(self) -> Resident:
        """The draft model's matrices, embedding and cache."""
        weights = self.decoder.weights
        layers = [m for w in weights.layers for m in (w.qkv, w.out, w.up, w.down)]
        tables = [weights.embedding, *(() if self._tied else (weights.head.weight,))]
        return {
            "gpu": {
                "draft weights": [next(iter(m.tensors())) for m in layers],
                "draft embedding": tables,
                "draft kv": self.cache.resident()["gpu"]["kv"],
            }
        }

    @property
    def _tied(self) -> bool:
        return self.decoder.weights.head.weight is self.decoder.weights.embedding

    def _behind(self, generation: "Generation") -> bool:
        """Whether some sequence has accepted every draft of the round before."""
        drafted = self.run.drafted[-2] if len(self.run.drafted) > 1 else 0
        return bool(drafted) and max(generation.yielded[-1]) > drafted

    def _pass(self, tokens: Tensor, positions: Tensor, starts: tuple[int, ...]) -> Tensor:
        """New tokens through the draft model's layers, (batch, new, hidden)."""
        hidden = self.decoder.embed(tokens, positions)
        rows = slice(0, len(starts))
        step = self.decoder.step(rows, starts, positions.expand(len(starts), -1), "draft")
        for layer in range(self.decoder.arch.model.layers):
            weights = self.decoder.weights.layers[layer]
            self.decoder.layer(layer, weights, hidden, step, self.cache.attend)
        return hidden
