"""Decoding rounds: one token per sequence, or drafts that the model verifies in one pass."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kvsim.frozen import frozen
from kvsim.techniques.axes.base import Drafting
from kvsim.techniques.axes.drafting import Selfdraft
from kvsim.validate.kernels.blockwise import ranges
from kvsim.validate.kernels.packing import pack, unpack
from kvsim.validate.kernels.quantise import round_half_up
from kvsim.validate.model.attention import Pass
from kvsim.validate.model.generation import RunningGeneration
from kvsim.validate.model.weights import LayerWeights, Linear, Matrix
from kvsim.validate.parts.selection import LayeredRun
from kvsim.validate.parts.store import Resident

WEIGHT_GROUP = 128
PACKED_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 22}  # of a matrix that are packed at once
TILE = 64  # rows that the kernels' tiles divide
CUDA_TILES = 8  # tiles of 16 inputs that a thread of CUDA's kernel reads at once


@frozen
class Int4Matrix:
    """A 4-bit weight matrix (outputs, inputs), which can replace a matrix of the decoder.

    Weights are rounded to the nearest code, without calibration data; the last group may be short.

    Parameters
    ----------
    codes
        (outputs, inputs / 2), uint8, where code 8 is 0; or tiled as a kernel reads them.
    scale
        (outputs, groups), in 16 bits.
    tiled
        Whether the codes lie as PyTorch's product with 4-bit weights reads them.
    table
        Scales and zero points (groups, outputs, 2) as CUDA's product reads them, of which
        ``scale`` is then a view.

    References
    ----------
    .. [1] R. Tiwari et al., "QuantSpec", ICML 2025: the draft's weights are INT4; its code reads
       symmetric groups of 128.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None
    tiled: bool = False
    table: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Hidden states (..., inputs) to (..., outputs); CUDA's kernel knows bf16 alone."""
        if not self.tiled:
            return linear(tensor, self.numbers(tensor.dtype), self.bias)
        rows = tensor.reshape(-1, tensor.shape[-1])
        if self.table is None:
            table = scales_and_zeros(self.scale.to(rows.dtype))
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
            product: Tensor = multiply(rows, self.codes, WEIGHT_GROUP, table)
        else:
            half = rows.to(torch.bfloat16)
            multiply = torch.ops.aten._weight_int4pack_mm
            product = multiply(half, self.codes, WEIGHT_GROUP, self.table).to(rows.dtype)
        out = product.view(*tensor.shape[:-1], -1)
        return out if self.bias is None else out + self.bias

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised matrix, (outputs, inputs); only for codes that are not tiled.

        Parameters
        ----------
        dtype
            Number format of the result.

        Returns
        -------
        Tensor
            (outputs, inputs).
        """
        steps = unpack(self.codes, 4).float() - 8.0
        scale = self.scale.float().repeat_interleave(WEIGHT_GROUP, dim=1)[:, : steps.shape[1]]
        return (steps * scale).to(dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the codes, the scales and, if there is one, the bias."""
        own = (self.codes, self.scale)
        return own if self.bias is None else (*own, self.bias)


def int4_matrix(weight: Tensor, bias: Tensor | None) -> Int4Matrix:
    """Pack a weight matrix for the fastest product in four bits.

    Parameters
    ----------
    bias
        Bias, (outputs,), which is not quantised.

    Returns
    -------
    Int4Matrix
        The packed matrix, tiled for PyTorch's kernels where its size allows it.
    """
    outputs, inputs = weight.shape
    if inputs % WEIGHT_GROUP or outputs % 16:
        return int4(weight, bias)
    codes, scale = _by_rows(weight, _tiled_rows)
    if not codes.is_cuda:
        return Int4Matrix(codes, scale, bias, tiled=True)
    table = scales_and_zeros(scale.to(torch.bfloat16))  # once: a product would make it each time
    return Int4Matrix(codes, table[..., 0].T, bias, tiled=True, table=table)


def _tiled_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the order of PyTorch's kernel for their device, and scales."""
    codes, scale = _packed_rows(weight)
    wide = unpack(codes, 4)
    if codes.is_cuda:
        pairs = wide[:, ::2] << 4 | wide[:, 1::2]
        return torch.ops.aten._convert_weight_to_int4pack(pairs, CUDA_TILES), scale
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide.int(), 1), scale


def scales_and_zeros(scale: Tensor) -> Tensor:
    """Arrange scales as PyTorch's products with 4-bit weights read them.

    Parameters
    ----------
    scale
        Scales, (outputs, groups).

    Returns
    -------
    Tensor
        Scales and zero points, (groups, outputs, 2); zero points are 0.
    """
    scale = scale.T
    return torch.stack((scale, torch.zeros_like(scale)), dim=-1)


def int4(weight: Tensor, bias: Tensor | None = None) -> Int4Matrix:
    """Quantise a weight matrix to four bits, with scales per row and group.

    Parameters
    ----------
    weight
        (outputs, inputs).
    bias
        (outputs,); None for no bias.
    """
    codes, scale = _by_rows(weight, _packed_rows)
    return Int4Matrix(codes, scale, bias)


def _packed_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of some rows."""
    inputs = weight.shape[1]
    whole = pad(weight.float(), (0, -inputs % WEIGHT_GROUP)).reshape(len(weight), -1, WEIGHT_GROUP)
    scale = (whole.abs().amax(-1) / 7.5).half()
    step = scale.float().unsqueeze(-1)
    steps = round_half_up(whole / torch.where(step > 0, step, 1.0)).clamp(-8, 7) + 8
    return pack(steps.flatten(1)[:, :inputs], 4), scale


def _by_rows(matrix: Tensor, change: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Apply a function to a matrix some rows at a time, so that packing needs little memory.

    Its results have as many rows, or a fixed share of them, as they get.
    """
    whole: tuple[Tensor, ...] = ()
    most = PACKED_NUMBERS.get(matrix.device.type, PACKED_NUMBERS["cpu"])
    for rows in ranges(len(matrix), matrix.shape[1], most, whole=TILE):
        made = change(matrix[rows])
        whole = whole or tuple(
            t.new_empty((len(t) * len(matrix) // rows.stop, *t.shape[1:])) for t in made
        )
        for target, part in zip(whole, made, strict=True):
            begin = rows.start * len(target) // len(matrix)
            target[begin : begin + len(part)] = part
    return whole


PACKED_EARLY = "drafts are packed before verification; the prediction packs only accepted ones"
NONE: Mapping[str, str] = MappingProxyType({})

Visit = tuple[int, int]
"""A layer, and the first sequence of a part of the batch."""


class Drafter:
    """Base of drafters, which run decoding rounds; without drafts, a round decodes one token.

    ``visit`` is the index of a layer with the index of the first sequence of a part of the batch.

    Parameters
    ----------
    run
        The run whose rounds it decodes.
    part
        Settings of the technique's drafting.
    """

    differences: Mapping[str, str] = NONE
    """Ops and buffers that really differ from what is stated, and why."""

    def __init__(self, run: LayeredRun, part: Drafting) -> None:
        self.run, self.part = run, part

    def ready(self) -> None:
        """Allocate memory for drafts; called when every layer has its cache."""

    # what it sees of the model's passes

    def observe(self, visit: Visit, queries: Tensor, step: Pass) -> None:
        """Use the queries of a chunk of prompts; the base class ignores them.

        Parameters
        ----------
        queries
            Queries of the chunk, (sequences, heads, chunk, dim).
        step
            The pass over the chunk.
        """

    def store_prompt(self, visit: Visit, keys: Tensor, values: Tensor) -> None:
        """Hook that stores a layer's prompts for drafts; does nothing by default.

        Parameters
        ----------
        keys, values
            (batch, KV heads, prompt, dim).
        """

    def store_verified(self, visit: Visit, keys: Tensor, values: Tensor, step: Pass) -> None:
        """Copy what drafts need of the tokens that a pass verifies; nothing in the base class.

        Parameters
        ----------
        keys, values
            Those of the verified tokens, (sequences, KV heads, new, dim).
        step
            The pass that verifies them.
        """

    def on_layer_output(self, layer: int, hidden: Tensor, step: Pass) -> None:
        """Use the output of a layer; the base class ignores it.

        Parameters
        ----------
        hidden
            Hidden states, (sequences, new, hidden).
        step
            The pass of the model, which is none of drafts.
        """

    def after_prompt(self, generation: RunningGeneration) -> None:
        """Hook that runs between the first token and the first round; does nothing by default."""

    # drafts by the model's own layers

    def attend(
        self, visit: Visit, queries: Tensor, keys: Tensor, values: Tensor, step: Pass
    ) -> Tensor | None:
        """Attend in a draft pass, if drafts have a separate cache.

        Parameters
        ----------
        queries
            Queries of the drafted tokens, (sequences, heads, new, dim).
        keys, values
            Keys and values of the drafted tokens, (sequences, KV heads, new, dim).
        step
            The draft pass.

        Returns
        -------
        Tensor or None
            The output, shaped as the queries; None if drafts read the layer's cache.
        """
        return None

    def weights(self, layer: int) -> LayerWeights | None:
        """Return the weights of a layer in draft passes; None for the model's own."""
        return None

    # rounds

    def decode_round(self, generation: RunningGeneration) -> None:
        """Decode one token per sequence."""
        logits = generation.forward(generation.last[:, None], "decode")
        generation.emit(generation.choose(logits), logits=logits)

    def resident(self) -> Resident:
        """Return every tensor that is kept for drafts, by memory tier and buffer."""
        return {}


class SpeculativeDrafter(Drafter):
    """Decodes rounds that draft tokens one by one and verify them together.

    Rejected tokens need no rollback: the next pass starts after the last accepted token and
    overwrites them.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, https://arxiv.org/abs/2211.17192.
    """

    differences = MappingProxyType({"quantise": PACKED_EARLY})

    def decode_round(self, generation: RunningGeneration) -> None:
        """Draft tokens, verify them in one pass, and keep those that the model agrees with."""
        gamma = min(self.run.gamma, self.run.round_room(generation.cached) - 1)
        self.run.drafted.append(gamma)
        tokens, shares = self.draft(generation, gamma)
        logits = generation.forward(torch.stack([generation.last, *tokens], 1), "verify")
        drafts = torch.stack(tokens, 1) if gamma else generation.tokens[:, :0]
        if generation.temperature:
            q = torch.stack(shares, 1) if gamma else logits.new_empty(len(drafts), 0, 0)
            q = pad(q, (0, logits.shape[2] - q.shape[2]))  # drafts may know fewer tokens
            kept, extra = verify_drawn(drafts, q, generation.shares(logits), generation.generator)
        else:
            kept, extra = verify_likeliest(drafts, generation.choose(logits))
        given = torch.cat([drafts, extra[:, None]], 1)
        given.scatter_(1, kept[:, None], extra[:, None])
        generation.emit(given, (kept + 1).tolist(), logits)

    def draft(self, generation: RunningGeneration, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Draft the tokens of a round; by default each by a pass of ``propose``.

        Parameters
        ----------
        count
            Drafts per sequence. [tokens]

        Returns
        -------
        drafts
            In their order, (batch,) each.
        shares
            What each was drawn from, (batch, vocabulary); needed if the run has a temperature.
        """
        tokens, shares = [generation.last], []
        for ahead in range(count):
            logits = self.propose(generation, tokens[-1][:, None], ahead)[:, 0]
            tokens.append(generation.choose(logits))
            if generation.temperature:
                shares.append(generation.shares(logits))
        return tokens[1:], shares

    def propose(self, generation: RunningGeneration, tokens: Tensor, ahead: int) -> Tensor:
        """Run a draft's pass; the default is one of the model itself.

        Parameters
        ----------
        tokens
            The newest token of every sequence, (batch, 1).
        ahead
            Drafts of this round so far. [tokens]

        Returns
        -------
        Tensor
            Logits of the vocabulary's first n tokens, (batch, 1, n).
        """
        return generation.forward(tokens, "draft", ahead=ahead)


class SelfDrafter(SpeculativeDrafter):
    """Drafts with the model's own layers, whose MLPs may be quantised to four bits in drafts."""

    def __init__(self, run: LayeredRun, part: Drafting) -> None:
        super().__init__(run, part)
        assert isinstance(part, Selfdraft)
        self.reads = part.reads
        layers = run.decoder.weights.layers if part.weight_bits == 4 else ()
        self.narrow = [replace(w, up=_int4(w.up), down=_int4(w.down)) for w in layers]

    def weights(self, layer: int) -> LayerWeights | None:
        """Return a layer with its MLP in four bits; None if drafts use the model's weights."""
        return self.narrow[layer] if self.narrow else None

    def resident(self) -> Resident:
        """Return the quantised MLPs; their biases are the model's own."""
        matrices = [m for w in self.narrow for m in (w.up, w.down)]
        if not matrices:
            return {}
        return {"gpu": {"draft weights": [t for m in matrices for t in m.tensors()[:2]]}}


def _int4(matrix: Matrix) -> Matrix:
    assert isinstance(matrix, Linear)
    return int4_matrix(matrix.weight, matrix.bias)


def verify_likeliest(drafts: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts as long as they equal the target's greedy choice.

    Parameters
    ----------
    target
        Tokens that the target chooses at each draft's position and after the last, (batch, gamma +
        1).

    Returns
    -------
    Number of accepted drafts, (batch,), and the target's token after them, (batch,).
    """
    same = (drafts == target[:, :-1]).long()
    kept = same.cumprod(1).sum(1)
    return kept, target.gather(1, kept[:, None])[:, 0]


def verify_drawn(
    drafts: Tensor, queries: Tensor, probabilities: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Accept each draft with probability p / q, so that the result is distributed as p.

    Parameters
    ----------
    drafts
        Tokens (batch, gamma), drawn from q.
    queries
        The draft's probabilities q, (batch, gamma, vocab).
    probabilities
        The target's probabilities p, (batch, gamma + 1, vocab).

    Returns
    -------
    As ``verify_likeliest``. After a rejection, the next token is drawn from the normalised positive
    part of p - q; otherwise from p.

    References
    ----------
    .. [1] Y. Leviathan et al., "Fast inference from transformers via speculative decoding",
       ICML 2023, section 2.3, https://arxiv.org/abs/2211.17192.
    """
    batch, gamma = drafts.shape
    if gamma:
        at = drafts[..., None]
        odds = probabilities[:, :-1].gather(2, at)[..., 0] / queries.gather(2, at)[..., 0]
        luck = torch.rand(batch, gamma, generator=generator, device=probabilities.device)
        kept = (luck < odds).long().cumprod(1).sum(1)
        drawn = torch.cat([queries, torch.zeros_like(probabilities[:, :1])], 1)
    else:
        kept, drawn = drafts.new_zeros(batch), torch.zeros_like(probabilities)
    place = kept[:, None, None].expand(-1, 1, probabilities.shape[2])
    wanted, had = probabilities.gather(1, place)[:, 0], drawn.gather(1, place)[:, 0]
    excess = (wanted - had).clamp(min=0.0)
    # without any excess (equal up to rounding, so hardly ever rejected) the target's own
    excess = torch.where(excess.sum(1, keepdim=True) > 0, excess, wanted)
    return kept, torch.multinomial(excess, 1, generator=generator)[:, 0]
