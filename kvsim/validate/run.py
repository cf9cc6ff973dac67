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
from kvsim.validate.parts.composed import Composed
from kvsim.validate.techniques import implement
from kvsim.validate.transfer import to_device

PROMPT_CHUNK = 8192  # prompt tokens that pass through a layer at once


class Generation:
    """Generation of text for one batch of prompts, by a decoder under a technique.

    Between rounds, all tokens of a sequence except the last one are in its cache.

    Parameters
    ----------
    prompts : tokens of every sequence; lengths may differ.
    generate : tokens to generate per sequence.
    chunk : prompt tokens that pass through a layer at once.
    temperature : sampling temperature; 0 for the most likely token.
    keep : collect the logits by which each token was chosen, in ``logits``.
    kind : class that runs the technique.

    Raises
    ------
    InputError
        If prompts and generated tokens are more than the decoder was made for.
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
        self.decoder, self.generate = decoder, generate
        self.chunk, self.temperature, self.keep = chunk, temperature, keep
        self.prompts = prompts
        self.cached = [len(p) for p in prompts]  # tokens in the cache of each sequence
        self.batch, self.longest = len(prompts), max(self.cached)
        self.impl = implement(technique, decoder, self.cached, generate, kind)
        if self.impl.capacity > decoder.length:
            raise InputError(
                f"{self.impl.capacity} tokens are needed (prompt {self.longest}, generate "
                f"{generate}), but the decoder was made for {decoder.length}; ask for fewer"
            )
        device = decoder.device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.done = [0] * self.batch  # generated tokens of each sequence
        self.last = torch.zeros(self.batch, dtype=torch.long, device=device)  # not in the cache yet
        self.tokens = torch.zeros(self.batch, generate, dtype=torch.long, device=device)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]
        self.rounds: list[list[int]] = []  # tokens in the cache when each round began
        self.yielded: list[list[int]] = []  # tokens each round gave, sequence by sequence
        self.resident: dict[str, dict[Tier, dict[str, int]]] = {}  # bytes by phase and buffer [B]
        self._on_device = torch.tensor(self.cached, device=device)
        self.padded = self._pad_prompts()
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

    def choose(self, logits: Tensor) -> Tensor:
        """Choose one token for each row of logits. (..., vocab) to (...,)"""
        with self.decoder.counter.op("sample") as record:
            record.reads(logits)
            if not self.temperature:
                return logits.argmax(dim=-1)
            shares = self.shares(logits)
            drawn = torch.multinomial(shares.flatten(0, -2), 1, generator=self.generator)
            return drawn.view(shares.shape[:-1])

    def shares(self, logits: Tensor) -> Tensor:
        """Compute the probability of every token at this temperature. (..., vocab), in fp32"""
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def emit(
        self, tokens: Tensor, counts: Sequence[int] | None = None, logits: Tensor | None = None
    ) -> None:
        """Append the tokens that a round has generated to the sequences.

        Afterwards the cache holds all tokens of a sequence except the newest. Complete sequences
        are not extended.
        """
        tokens = tokens.view(self.batch, -1)
        given = [tokens.shape[1]] * self.batch if counts is None else counts
        taken = [min(n, self.generate - d) for n, d in zip(given, self.done, strict=True)]
        first = not self.done[0]  # the token that the prompt yields: nothing was appended for it
        if min(taken) == max(taken) and min(self.done) == max(self.done):
            many, done = taken[0], self.done[0]
            if many:
                self.tokens[:, done : done + many] = tokens[:, :many]
                self.last = tokens[:, many - 1]
        else:
            for i, many in enumerate(taken):
                if many:
                    self.tokens[i, self.done[i] : self.done[i] + many] = tokens[i, :many]
                    self.last[i] = tokens[i, many - 1]
        if self.keep and logits is not None:
            for i, many in enumerate(taken):
                self.logits[i] += logits.view(self.batch, -1, logits.shape[-1])[i, :many]
        if not first:
            self.yielded.append(list(given))
        self.done = [d + n for d, n in zip(self.done, taken, strict=True)]
        if not first:
            self.cached = [c + n for c, n in zip(self.cached, taken, strict=True)]
            alike = min(taken) == max(taken)
            device = self._on_device.device
            self._on_device += taken[0] if alike else to_device(taken, device)

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

    def _pad_prompts(self) -> Tensor:
        """Return all prompts (batch, longest), padded with zeros.

        Made once and before any clock runs: a list of 8,192 tokens takes Python 2 ms to convert.
        """
        padded = torch.zeros(self.batch, self.longest, dtype=torch.long)
        for row, prompt in zip(padded, self.prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt)
        return padded.to(self.decoder.device)

    def _prefill(self) -> Tensor:
        """Run prefill layer by layer; return the logits of the last tokens, (batch, vocab)."""
        self.decoder.counter.begin("prefill")
        device = self.decoder.device
        positions = torch.arange(self.longest, device=device)[None]
        x = self.decoder.embed(self.padded, positions)
        for layer in range(self.impl.model.layers):
            weights = self.impl.weights(layer, "prefill")
            for rows in self.impl.prompt_tiles(layer, self.chunk):
                size = max(1, self.chunk // _count(rows))
                for start in range(0, self.longest, size):
                    part = positions[:, start : start + size]
                    step = self.decoder.step(rows, (start,) * _count(rows), part, "prefill")
                    chunk = x[rows, start : start + size]
                    self.decoder.layer(layer, weights, chunk, step, self.impl.prefill)
                    self.impl.on_layer_output(layer, chunk, step)
        self.resident["prefill"] = self.impl.resident_bytes()
        self.impl.prompt_done()
        last = x[torch.arange(self.batch, device=device), self._on_device - 1]
        return self.decoder.head(last)

    def _step(self, rows: slice, positions: Tensor, kind: Kind, ahead: int) -> Pass:
        starts = tuple(c + ahead for c in self.cached[rows])
        return self.decoder.step(rows, starts, positions[rows], kind)


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)
