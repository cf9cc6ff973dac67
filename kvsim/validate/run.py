"""A generation: the prompt in chunks, then decoding rounds until every sequence is complete."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.graph import Tier
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import Kind
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.parts.composed import Composed
from kvsim.validate.techniques import implement

PROMPT_CHUNK = 8192  # prompt tokens that pass through a layer at once


class Generation(RunningGeneration):
    """One batch of prompts on its way through a decoder under a technique.

    Parameters
    ----------
    technique : what stores and attends.
    chunk : prompt tokens that pass through a layer at once.
    kind : what runs the technique.

    The others are those of ``RunningGeneration``.

    Raises
    ------
    InputError
        If prompts differ in length, or with the generated tokens are more than the decoder was made
        for.
    """

    def __init__(
        self,
        decoder: Decoder,
        technique: Technique,
        prompts: Sequence[Sequence[int]],
        generate: int,
        *,
        chunk: int = PROMPT_CHUNK,
        temperature: float = 0.0,
        seed: int = 0,
        keep: bool = False,
        kind: type[Composed] = Composed,
    ) -> None:
        super().__init__(decoder, prompts, generate, temperature, seed, keep)
        self.chunk = chunk
        self.impl = implement(technique, decoder, (self.batch, self.prompt), generate, kind)
        if self.impl.capacity > decoder.length:
            raise InputError(
                f"{self.impl.capacity} tokens are needed (prompt {self.prompt}, generate "
                f"{generate}), but the decoder was made for {decoder.length}; ask for fewer"
            )
        self.rounds: list[list[int]] = []  # tokens in the cache when each round began
        self.resident: dict[str, dict[Tier, dict[str, int]]] = {}  # bytes by phase and buffer [B]
        self._place: Tensor | None = None  # column of the next token, where rounds are replayed

    @torch.inference_mode()
    def complete(self) -> Tensor:
        """Generate until every sequence is complete, and return the tokens. (batch, generate)"""
        try:
            self.start()
            while min(self.done) < self.generate:
                self.rounds.append(self.cached)
                self.impl.decode_round(self)
            self.resident["decode"] = self.impl.resident_bytes()
        finally:
            self.impl.shutdown()
        return self.tokens

    @torch.inference_mode()
    def start(self) -> None:
        """Run prefill, choose the first tokens, and prepare the technique's first round."""
        logits = self._prefill()
        self.emit(self.choose(logits), logits=logits)
        self.impl.after_prompt(self)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, kind: Kind, ahead: int = 0, fixed: bool = False) -> Tensor:
        """Run one pass over new tokens and return the logits. (batch, new, vocab)"""
        self.decoder.counter.begin(kind)
        new = tokens.shape[1]
        first = self._on_device[:, None] + ahead
        positions = first + torch.arange(new, device=first.device)
        x = self.decoder.embed(tokens, positions)
        steps: dict[tuple[int, int], Pass] = {}  # by parts and first sequence
        waiting: Callable[[], None] | None = None  # the part before, for its attention
        for layer in range(self.impl.model.layers):
            weights = self.impl.weights(layer, kind)
            if waiting and not self.impl.attends_async(layer):
                waiting = waiting()
            parts = self.impl.tiles(layer)
            for rows in parts:
                key = len(parts), rows.start
                if key not in steps:
                    steps[key] = replace(self._step(rows, positions, kind, ahead), fixed=fixed)
                step = steps[key]
                rest = self.decoder.layer(layer, weights, x[rows], step, self.impl.attend)
                if waiting:
                    waiting()
                waiting = partial(self._finish_layer, rest, layer, x[rows], step) if rest else None
                if not rest:
                    self.impl.on_layer_output(layer, x[rows], step)
        if waiting:
            waiting()
        return self.decoder.head(x)

    def _finish_layer(
        self, rest: Callable[[], None], layer: int, hidden: Tensor, step: Pass
    ) -> None:
        """End a layer whose asynchronous attention is complete."""
        rest()
        self.impl.on_layer_output(layer, hidden, step)

    def decode_in_place(self) -> None:
        """Decode one token per sequence on the device alone, as a CUDA graph can replay it.

        All tensors that it changes keep their addresses.
        """
        if self._place is None:
            self._place = torch.full_like(self.last, self.done[0])[:, None]
        chosen = self.choose(self.forward(self.last[:, None], "decode", fixed=True))
        self.tokens.scatter_(1, self._place, chosen)
        self.last.copy_(chosen[:, 0])
        self._place += 1
        self._on_device += 1

    def decoded_in_place(self) -> None:
        """Update the host's state after a round of ``decode_in_place``."""
        self.yielded.append([1] * self.batch)
        self.done = [n + 1 for n in self.done]
        self.cached = [n + 1 for n in self.cached]

    def _prefill(self) -> Tensor:
        """Run prefill layer by layer; return the logits of the last tokens, (batch, vocab)."""
        self.decoder.counter.begin("prefill")
        positions = torch.arange(self.prompt, device=self.decoder.device)[None]
        x = self.decoder.embed(self.prompt_tokens, positions)
        for layer in range(self.impl.model.layers):
            weights = self.impl.weights(layer, "prefill")
            for rows in self.impl.prompt_tiles(layer, self.chunk):
                size = max(1, self.chunk // _count(rows))
                for start in range(0, self.prompt, size):
                    part = positions[:, start : start + size]
                    step = self.decoder.step(rows, (start,) * _count(rows), part, "prefill")
                    chunk = x[rows, start : start + size]
                    self.decoder.layer(layer, weights, chunk, step, self.impl.prefill)
                    self.impl.on_layer_output(layer, chunk, step)
        self.resident["prefill"] = self.impl.resident_bytes()
        self.impl.prompt_done()
        return self.decoder.head(x[:, -1])

    def _step(self, rows: slice, positions: Tensor, kind: Kind, ahead: int) -> Pass:
        starts = tuple(c + ahead for c in self.cached[rows])
        return self.decoder.step(rows, starts, positions[rows], kind)


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)
