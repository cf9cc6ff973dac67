"""Draft heads: layers with random weights and their own cache, beside the verifying model."""

from types import MappingProxyType

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques import parse
from kvsim.techniques.axes.base import Drafting
from kvsim.techniques.papers.eagle import Head
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.model.weights import random_weights
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.drafting import SpeculativeDrafter
from kvsim.validate.parts.selection import LayeredRun
from kvsim.validate.parts.store import Resident


class DraftLayers:
    """Decoder layers with random weights and a cache, for draft heads.

    They take as much time and memory as trained ones, but their drafts mean nothing.

    Parameters
    ----------
    arch
        Sizes of the layers; the embedding and head need not be used.
    """

    def __init__(self, run: LayeredRun, arch: Architecture) -> None:
        target = run.decoder
        self.weights = random_weights(arch, target.device, target.dtype)
        self.decoder = Decoder(arch, self.weights, target.length, target.counter)
        self.cache = Composed(
            parse("full"), self.decoder, (run.batch, run.prompt), run.capacity - run.prompt
        )

    def positions(self, begins: list[int], new: int) -> Tensor:
        """Compute the positions of new tokens.

        Parameters
        ----------
        begins
            Position of the first new token of each sequence.
        new
            New tokens per sequence. [tokens]

        Returns
        -------
        Tensor
            Positions, (sequences, new).
        """
        device = self.decoder.device
        return torch.tensor(begins, device=device)[:, None] + torch.arange(new, device=device)

    def run(self, hidden: Tensor, begins: list[int]) -> Tensor:
        """Run all layers over hidden states, (sequences, new, hidden), which change in place.

        Parameters
        ----------
        begins
            Position of the first new token of each sequence.
        """
        positions = self.positions(begins, hidden.shape[1])
        rows = slice(0, len(begins))
        step = self.decoder.step(rows, tuple(begins), positions, "draft")
        for index, weights in enumerate(self.weights.layers):
            self.decoder.layer(index, weights, hidden, step, self.cache.attend)
        return hidden

    def matrices(self) -> list[Tensor]:
        """Return the weight matrices of all layers, without biases."""
        every = [m for w in self.weights.layers for m in (w.qkv, w.out, w.up, w.down)]
        return [next(iter(m.tensors())) for m in every]

    def kv(self) -> list[Tensor]:
        """Return the tensors of the layers' own cache."""
        return self.cache.resident()["gpu"]["kv"]


OTHERS_FEWER = "a pass has as many tokens of every sequence as one of them has accepted"


class DraftHeads(SpeculativeDrafter):
    """Base of drafters with a head of one decoder layer and a cache of its own (EAGLE, MTP).

    The weights are random: work and memory are as in a trained head, but not the drafts. Entry n
    of the head's cache comes from the model's hidden state of token n and the embedding of token
    n + 1. Entries of drafts are overwritten once it is known which of them stay.

    Parameters
    ----------
    run
        The run of the model that verifies the drafts.
    part
        The technique's settings of the head.

    Raises
    ------
    InputError
        If the model has sliding windows.
    """

    differences = MappingProxyType({**SpeculativeDrafter.differences, "attn": OTHERS_FEWER})

    def __init__(self, run: LayeredRun, part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Head)
        if any(shape.window for shape in run.model.shapes()):
            raise InputError(
                f"{part.name}: {run.model.name} has sliding windows, which a head's layer here has "
                f"not; choose a model that attends to every token"
            )
        self.layers, hidden = DraftLayers(run, run.decoder.arch.cut(1)), run.model.hidden
        self.vocab = self.vocabulary(run.model.vocab)
        self.fuse = self._product(hidden, part.fused * hidden) if part.fused else None
        self.join = self._product(hidden, 2 * hidden)
        self.logits = self._product(self.vocab, hidden) if self.own_head else None
        self.states: dict[int, Tensor] = {}  # of the latest pass, by layer
        self.hidden = self.join[:0]  # the head's own, of the newest token
        self.before = [run.prompt] * run.batch  # cached tokens when the latest pass began

    # what a head says

    own_head = False  # whether its logits have a product of their own

    def vocabulary(self, vocab: int) -> int:
        """Return the size of the vocabulary that drafts choose among. [tokens]"""
        return vocab

    def sources(self, layers: int) -> list[int]:
        """List the layers after which the model's hidden states are taken."""
        return [layers - 1]

    # hooks

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """Store the hidden states that a layer of the model puts out, (sequences, new, hidden)."""
        if layer not in self.sources(self.run.model.layers):
            return
        reading = step.kind == "prefill"
        first, slots = (step.starts[0], self.run.prompt) if reading else (0, step.new)
        if not first and not step.rows.start:
            self.states[layer] = hidden.new_zeros(self.run.batch, slots, hidden.shape[2])
        self.states[layer][step.rows, first : first + step.new] = hidden

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Run the head over the prompt except its last token, which the first draft adds."""
        self.run.counter.begin("prefill")
        if self.run.prompt > 1:
            known = {layer: states[:, :-1] for layer, states in self.states.items()}
            self._pass(generation.prompt_tokens[:, 1:], self._fused(known), [0] * self.run.batch)
        self.states = {layer: states[:, -1:] for layer, states in self.states.items()}
        self.before = [self.run.prompt - 1] * self.run.batch

    def propose(self, generation: RunningGeneration, tokens: Tensor, ahead: int) -> Tensor:
        """Compute the logits of the next draft of every sequence, (batch, 1, vocabulary)."""
        self.run.counter.begin("draft")
        if ahead:
            begins = [n + ahead - 1 for n in generation.cached]
            self.hidden = self._pass(tokens, self.hidden, begins)
        else:
            self.hidden = self._read_accepted(generation)
        return self._head(self.hidden)

    def resident(self) -> Resident:
        """Return the head's weight matrices and its cache."""
        more = [m for m in (self.fuse, self.join, self.logits) if m is not None]
        matrices = [*self.layers.matrices(), *more]
        return {"gpu": {"draft weights": matrices, "draft kv": self.layers.kv()}}

    # how it is done

    def _read_accepted(self, generation: RunningGeneration) -> Tensor:
        """Run the head over the accepted tokens; return its hidden state of the newest one."""
        given = [n - b for n, b in zip(generation.cached, self.before, strict=True)]
        most, device = max(1, *given), generation.last.device
        begins = torch.tensor(self.before, device=device)[:, None]
        places = begins + 1 + torch.arange(most, device=device) - self.run.prompt
        tokens = generation.tokens.gather(1, places.clamp(0, generation.generate - 1))
        known = {layer: states[:, :most] for layer, states in self.states.items()}
        hidden = self._pass(tokens, self._fused(known), self.before)
        self.before = list(generation.cached)
        newest = torch.tensor([max(n, 1) - 1 for n in given], device=device)
        return hidden[torch.arange(len(hidden), device=device), newest][:, None]

    def _fused(self, states: dict[int, Tensor]) -> Tensor:
        """Combine the model's hidden states into one."""
        several = [states[layer] for layer in self.sources(self.run.model.layers)]
        if self.fuse is None:
            return several[0]
        return self._multiply("fuse_states", self.fuse, torch.cat(several, -1))

    def _pass(self, tokens: Tensor, states: Tensor, begins: list[int]) -> Tensor:
        """Run new entries through the layer, (batch, new, hidden)."""
        with self.run.counter.op("sample") as record:
            embedded = torch.nn.functional.embedding(tokens, self.run.decoder.weights.embedding)
            record.reads(embedded).writes(embedded)
        joined = torch.cat([embedded, states], -1)
        return self.layers.run(self._multiply("join_inputs", self.join, joined), begins)

    def _head(self, hidden: Tensor) -> Tensor:
        """Compute the logits over the tokens that drafts choose among."""
        weights = self.run.decoder.weights
        with self.run.counter.op("sample") as record:
            normed = self.layers.weights.norm(hidden)
            record.reads(hidden).writes(normed)
        matrix = weights.head.weight if self.logits is None else self.logits
        return self._multiply("draft_head", matrix, normed)

    def _multiply(self, name: str, matrix: Tensor, numbers: Tensor) -> Tensor:
        with self.run.counter.op(name) as record:
            out = numbers @ matrix.T
            record.reads(numbers, matrix).writes(out)
        return out

    def _product(self, rows: int, columns: int) -> Tensor:
        """Create a random matrix that preserves the scale of its inputs."""
        own = self.layers.decoder
        made = torch.empty(rows, columns, device=own.device, dtype=own.dtype)
        if made.is_meta:  # a rehearsal: shapes alone
            return made
        generator = torch.Generator(made.device).manual_seed(rows + columns)
        return made.normal_(0.0, columns**-0.5, generator=generator)
