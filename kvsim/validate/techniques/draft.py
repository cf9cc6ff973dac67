"""A smaller model drafts: its own decoder over a full cache, beside the model that verifies."""

from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Drafting
from kvsim.techniques.papers.draft import Draft as Settings
from kvsim.validate.model.architecture import load_architecture
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.drafting import SpeculativeDrafter
from kvsim.validate.parts.heads import DraftLayers
from kvsim.validate.parts.selection import LayeredRun
from kvsim.validate.parts.store import Resident

SMALL_SETTINGS: tuple[str, ...] = ()  # none that suit every model: both need the same tokens
CAUGHT_UP = "where every draft was accepted, the draft model reads the last of them first"
UNREAD = "no token is chosen by the logits that the draft model has after the prompt"


class Draft(SpeculativeDrafter):
    """Drafter with a separate draft model, of random weights.

    The last draft of a round has not been processed by the draft model. If it is accepted, the next
    round begins with it.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 3.
    """

    differences = MappingProxyType(
        {
            **SpeculativeDrafter.differences,
            **dict.fromkeys(("attn", "qkv", "out", "up", "down", "lm_head"), CAUGHT_UP),
            "sample": UNREAD,
        }
    )

    def __init__(self, run: LayeredRun, part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        if part.weights != "fp16" or part.tp > 1:
            raise InputError("draft: its real implementation has fp16 weights on one GPU")
        self.layers = DraftLayers(run, load_architecture(part.model))

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Run the draft model over the prompts; its logits are not used."""
        self.run.counter.begin("prefill")
        hidden = self._pass(generation.prompt_tokens, [0] * generation.batch)
        self.layers.decoder.head(hidden[:, -1])

    def propose(self, generation: RunningGeneration, tokens: Tensor, ahead: int) -> Tensor:
        """Run the draft model on the newest tokens and return their logits, (batch, 1, vocab)."""
        new, begins = tokens, [n + ahead for n in generation.cached]
        drafted = self.run.drafted[-2] if len(self.run.drafted) > 1 else 0
        if not ahead and drafted and max(generation.yielded[-1]) > drafted:  # one not read yet
            done = torch.tensor(generation.done, device=tokens.device)
            before = generation.tokens.gather(1, (done - 2).clamp(min=0)[:, None])
            new, begins = torch.cat([before, tokens], 1), [n - 1 for n in begins]
        self.run.counter.begin("draft")
        return self.layers.decoder.head(self._pass(new, begins)[:, -1:])

    def resident(self) -> Resident:
        """Return the draft model's weight matrices, embedding and cache."""
        weights, beside = self.layers.weights, self.layers
        tied = weights.head.weight is weights.embedding
        tables = [weights.embedding, *(() if tied else (weights.head.weight,))]
        held = {"draft weights": beside.matrices(), "draft embedding": tables}
        return {"gpu": held | {"draft kv": beside.kv()}}

    def _pass(self, tokens: Tensor, begins: list[int]) -> Tensor:
        """New tokens through the draft model's layers, (batch, new, hidden)."""
        positions = self.layers.positions(begins, tokens.shape[1])
        return self.layers.run(self.layers.decoder.embed(tokens, positions), begins)
