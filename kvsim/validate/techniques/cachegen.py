"""CacheGen: differences to anchor tokens, quantised, and coded with a table per channel.

Y. Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving",
SIGCOMM 2024, sections 5.1 and 5.2, https://arxiv.org/abs/2310.07240.

- Every tenth token is an anchor; symbols of all others are differences to it (``quantised``).
- A coder (rANS, with states of 32 bits and words of 16) turns a channel's symbols into words, by
  how often the channel has each symbol (``Coder``). Every channel of a sequence is a lane.
- The stream, with its lanes' states and the tokens' scales, goes to the host (``prompt_done``);
  with ``load`` the prompt is decoded from it, as a later request would have it.

Where this departs: tables are those of the prompts themselves, as LMCache makes them, and not of
texts seen before; a stream is padded to the room that ``bits`` says, and refused if it needs more.
"""

import torch
from torch import Tensor

from kvsim.errors import InputError
from kvsim.techniques.axes.base import Placement
from kvsim.techniques.papers.cachegen import ANCHORS
from kvsim.techniques.papers.cachegen import Cachegen as Settings
from kvsim.validate.parts.place import CachePlacement
from kvsim.validate.parts.selection import LayerCache, LayeredRun
from kvsim.validate.parts.store import Resident
from kvsim.validate.transfer import copy_all

SMALL_SETTINGS = ("bits=16,load=true",)  # room for what a lane has besides its words
GROUP = 10  # tokens, of which the first is the anchor
TOTAL, LEAST = 12, 16  # bits of the sum of a table, and of the smallest state


def quantised(numbers: Tensor, symbols: int) -> tuple[Tensor, Tensor]:
    """Quantise the prompts' keys or values to integer symbols around zero, relative to anchors.

    Parameters
    ----------
    numbers : keys or values of a layer, (sequences, tokens, channels), fp32.
    symbols : number of levels of a difference to the anchor; anchors have ``ANCHORS`` levels.

    Returns
    -------
    tuple of Tensor
        Symbols, (sequences, tokens, channels), int64; and each token's step size, (sequences,
        tokens).
    """
    made, steps = torch.zeros_like(numbers), torch.zeros_like(numbers[..., 0])
    anchors = numbers[:, ::GROUP]
    made[:, ::GROUP], steps[:, ::GROUP] = _rounded(anchors, ANCHORS)
    known = (made[:, ::GROUP] * steps[:, ::GROUP, None]).repeat_interleave(GROUP, 1)
    other = torch.arange(numbers.shape[1], device=numbers.device) % GROUP > 0
    made[:, other], steps[:, other] = _rounded(
        (numbers - known[:, : len(other)])[:, other], symbols
    )
    return made.long(), steps


def restored(made: Tensor, steps: Tensor) -> Tensor:
    """Dequantise symbols and add every token's difference to its anchor.

    Parameters
    ----------
    made : symbols as of ``quantised``, (sequences, tokens, channels).
    steps : step size of each token, (sequences, tokens).

    Returns
    -------
    Tensor
        Keys or values, (sequences, tokens, channels).
    """
    found = made * steps[..., None]
    anchors = found[:, ::GROUP].repeat_interleave(GROUP, 1)[:, : found.shape[1]]
    other = torch.arange(found.shape[1], device=found.device) % GROUP > 0
    return found + anchors * other[:, None]


def _rounded(numbers: Tensor, symbols: int) -> tuple[Tensor, Tensor]:
    most = symbols // 2
    steps = numbers.abs().amax(-1) / most
    return (numbers / steps.clamp(min=1e-30)[..., None]).round(), steps


class Coder:
    """Entropy coder (rANS) of one layer's keys or values, with a frequency table per channel.

    A table holds the frequency of each symbol (quantised value) in its channel. Anchor tokens and
    the differences of other tokens from them have separate tables.

    Parameters
    ----------
    channels : elements per token: KV heads times head dimension.
    symbols : number of different symbols of a difference; anchors have ``ANCHORS``.
    device : device of the tables.
    """

    def __init__(self, channels: int, symbols: int, device: torch.device) -> None:
        shapes = [(channels, ANCHORS), (channels, symbols)]
        self.tables = [torch.zeros(s, dtype=torch.int16, device=device) for s in shapes]

    def count(self, made: Tensor) -> None:
        """Count how often each channel takes each symbol, and store that as frequency tables.

        A channel's frequencies are scaled so that they add up to 2 ** TOTAL, and none is 0.

        Parameters
        ----------
        made : symbols around zero, (sequences, tokens, channels).
        """
        anchor = torch.arange(made.shape[1], device=made.device) % GROUP == 0
        for held, own in zip(self.tables, (anchor, ~anchor), strict=True):
            size = held.shape[1]
            index = (made[:, own] + size // 2).flatten(0, 1).T
            many = held.new_zeros(held.shape, dtype=torch.long)
            many.scatter_add_(1, index, torch.ones_like(index))
            table = many * (2**TOTAL - size) // many.sum(1, keepdim=True).clamp(min=1) + 1
            rest = 2**TOTAL - table.sum(1, keepdim=True)
            held.copy_(table.scatter_add_(1, table.argmax(1, keepdim=True), rest))

    def encode(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode symbols as a stream of 16-bit words; each channel of each sequence is a lane.

        Parameters
        ----------
        made : symbols around zero, (sequences, tokens, channels).

        Returns
        -------
        words : Tensor
            Words of all lanes one after another, int16.
        count : Tensor
            Words of each lane, (sequences * channels,), int32.
        state : Tensor
            Final state of each lane, with which decoding starts, (sequences * channels,), int32.
        """
        lanes = made.shape[0] * made.shape[2]
        state = torch.full((lanes,), 1 << LEAST, device=made.device)
        words, count = state.new_zeros(lanes, made.shape[1]), torch.zeros_like(state)
        for token in range(made.shape[1] - 1, -1, -1):
            table, before = self._lanes(token, len(made))
            symbol = made[:, token].flatten()[:, None] + table.shape[1] // 2
            often, first = table.gather(1, symbol)[:, 0], before.gather(1, symbol)[:, 0]
            full = state >= often << (2 * LEAST - TOTAL)
            place = count[:, None].clamp(max=made.shape[1] - 1)
            word = torch.where(full, state & 0xFFFF, words.gather(1, place)[:, 0])
            words.scatter_(1, place, word[:, None])
            count, state = count + full.long(), torch.where(full, state >> 16, state)
            state = (state // often << TOTAL) + state % often + first
        used = torch.arange(made.shape[1], device=made.device) < count[:, None]
        return words[used].short(), count.int(), state.int()

    def decode(self, words: Tensor, count: Tensor, state: Tensor, sizes: tuple[int, int]) -> Tensor:
        """Decode a stream that ``encode`` made with the same tables.

        Parameters
        ----------
        words, count, state : as ``encode`` returned them.
        sizes : number of sequences, and of tokens of each.

        Returns
        -------
        Tensor
            Symbols around zero, (sequences, tokens, channels).
        """
        (sequences, tokens), found = sizes, []
        starts = count.long().cumsum(0) - count
        state, left = state.long() & 0xFFFFFFFF, count.long()
        for token in range(tokens):
            table, before = self._lanes(token, sequences)
            slot = state & (2**TOTAL - 1)
            symbol = torch.searchsorted(before, slot[:, None], right=True) - 1
            often, first = table.gather(1, symbol)[:, 0], before.gather(1, symbol)[:, 0]
            pulled = often * (state >> TOTAL) + slot - first
            empty = pulled < 1 << LEAST
            left = left - empty.long()
            word = words[(starts + left).clamp(0, len(words) - 1)].long() & 0xFFFF
            state = torch.where(empty, pulled << 16 | word, pulled)
            found.append(symbol[:, 0] - table.shape[1] // 2)
        return torch.stack(found, 1).view(sequences, -1, tokens).transpose(1, 2)

    def _lanes(self, token: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Of the token's kind of symbol, how often each comes, and those before it, by lane."""
        table = self.tables[token % GROUP > 0].long().repeat(sequences, 1)
        return table, table.cumsum(1) - table


class Cachegen(CachePlacement):
    """Placement of the layers of one third, whose prompts are encoded as streams after prefill."""

    replays = True

    def __init__(self, run: LayeredRun, part: Placement) -> None:
        super().__init__(run, part)
        assert isinstance(part, Settings)
        self.settings = part
        self.homes: list[Tensor] = []  # by layer
        self.coders: list[tuple[Coder, Coder]] = []  # of keys and of values
        self.taken: list[int] = []  # by streams before they are padded [B]

    def ready(self) -> None:
        """Allocate host memory for the stream of every layer, and the coders' tables."""
        width, symbols = self.run.model.k_width, self.settings.symbols
        for layer in self._layers():
            self.homes.append(self.lanes().host((self._room(layer),), torch.uint8))
            keys, values = (Coder(width, symbols, layer.device) for _ in "kv")
            self.coders.append((keys, values))

    def prompt_done(self) -> None:
        """Encode each layer's prompt and copy it to the host; with ``load``, read it back."""
        for layer, room, coders in zip(self._layers(), self.homes, self.coders, strict=True):
            self._pass_through(layer, room, coders)

    def resident(self) -> Resident:
        """Return the streams in host memory, and the coders' tables on the GPU."""
        tables = [t for pair in self.coders for coder in pair for t in coder.tables]
        return {"gpu": {"symbol tables": tables}, "host": {"kv": self.homes}}

    def _pass_through(self, layer: LayerCache, room: Tensor, coders: tuple[Coder, Coder]) -> None:
        sides = layer.kv.prompt(*layer.stored_tokens([self.run.prompt]))
        record_of, parts = self.run.counter.op, list[Tensor]()
        with record_of("encode") as record:
            for numbers, coder in zip(sides, coders, strict=True):
                flat = numbers.transpose(1, 2).flatten(2).float()
                made, steps = quantised(flat, self.settings.symbols)
                coder.count(made)
                parts += [steps, *coder.encode(made)]
                record.reads(numbers)
            sizes = [part.numel() for part in parts]
            kinds = [(part.dtype, part.shape) for part in parts]
            data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
            if len(data) > len(room):
                many = 2 * sides[0].numel()
                raise InputError(
                    f"cachegen: the prompt's stream takes {8 * len(data) / many:.1f} bits per "
                    f"number in layer {layer.layer}; set cachegen:bits to as many"
                )
            stream = torch.zeros(len(room), dtype=torch.uint8, device=layer.device)
            stream[: len(data)] = data
            record.writes(stream)
        self.taken.append(len(data))
        lanes, counter = self.lanes(), self.run.counter
        counter.copy("store_kv", "d2h", [stream])
        sent = lanes.d2h(lambda: copy_all([(room, stream)]), lanes.mark())
        if not self.settings.load:
            sent.wait()
            return
        counter.copy("load_stream", "h2d", [stream])
        lanes.h2d(lambda: copy_all([(stream, room)]), lanes.mark(), sent).wait()
        with record_of("decode_stream") as record:
            record.reads(stream)
            begin, found = 0, []
            for (kind, shape), size in zip(kinds, sizes, strict=True):
                stop = begin + size * kind.itemsize
                found.append(stream[begin:stop].clone().view(kind).view(shape))
                begin = stop
            for i, numbers in enumerate(sides):
                steps, words, count, state = found[4 * i : 4 * i + 4]
                made = coders[i].decode(words, count, state, (layer.batch, numbers.shape[2]))
                wide = restored(made, steps)
                numbers.copy_(wide.view(*wide.shape[:2], numbers.shape[1], -1).transpose(1, 2))
                record.writes(numbers)

    def _layers(self) -> list[LayerCache]:
        """Those that are placed like this."""
        return [x for x in self.run.layers if x.parts.placement == self.part]

    def _room(self, layer: LayerCache) -> int:
        """What ``bits`` says. [B]"""
        kept = layer.stored_tokens([self.run.prompt])[0] * layer.batch
        return -int(-self.settings.bits / 8 * kept * 2 * layer.model.k_width // 1)
