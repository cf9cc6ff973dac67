"""Losses layer by layer: keys or values of each packed alone, behind one pass of the prompt."""

from collections.abc import Iterator, Sequence
from datetime import date

import numpy as np
import torch
from torch import Tensor

from kvsim.graph import Array
from kvsim.quality.layers import LayerLosses
from kvsim.quality.unfinished import Unfinished
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.progress import Progress
from kvsim.validate.quality.runs import Forced
from kvsim.validate.quality.settings import Reading
from kvsim.validate.run import Generation

LAYER_BITS = (2, 3, 4)
UNPACKED_BITS = 16  # bits of a number that is not packed


class KeptPrompt(Generation):
    """A prompt read once: keys and values of every layer in full precision, and its last logits.

    Packed cells take them when the layer has read the prompt, so they are seen here before.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(decoder, parse("grouped:bits=8,group=8"), prompts, 1)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        filled = self.impl.store_prompt

        def keep(layer: int, keys: Tensor, values: Tensor) -> None:
            self.keys.append(keys.clone())
            self.values.append(values.clone())
            filled(layer, keys, values)

        self.impl.store_prompt = keep  # type: ignore[method-assign]
        with torch.inference_mode():
            self.last_logits = self._prefill()


class Resumed(Forced):
    """A text behind a kept prompt, for storages that take the prompt as it is."""

    def __init__(
        self,
        kept: KeptPrompt,
        technique: Technique,
        texts: Sequence[Sequence[int]],
        truth: list[Tensor] | None = None,
    ) -> None:
        super().__init__(kept.decoder, technique, texts, kept.longest, truth)
        self._kept = kept

    def _prefill(self) -> Tensor:
        for layer, pair in enumerate(zip(self._kept.keys, self._kept.values, strict=True)):
            self.impl.store_prompt(layer, *(x.clone() for x in pair))
        self.impl.prompt_done()
        return self._kept.last_logits

    @property
    def by_window(self) -> Array:
        """Mean KL divergence of each window. (windows,) [nat per token]"""
        found: Array = torch.stack(self._divergences).double().mean(0).clamp(min=0).cpu().numpy()
        return found


def packed(bits: int, value_bits: int, group: int, layers: range, count: int) -> Technique:
    """Some layers packed, the others in full precision."""
    some = f"grouped:bits={bits},value_bits={value_bits},group={group}"
    first, last = layers.start, layers.stop - 1
    parts = [f"0-{first - 1}: full"] if first else []
    parts += [f"{first}-{last}: {some}" if last > first else f"{first}: {some}"]
    parts += [f"{last + 1}-{count - 1}: full"] if last + 1 < count else []
    return parse("; ".join(parts) if first or last + 1 < count else some)


@torch.inference_mode()
def measure_layers(
    decoder: Decoder,
    reading: Reading,
    texts: list[list[int]],
    group: int,
    about: dict[str, str],
    widths: Sequence[int] = LAYER_BITS,
    so_far: Unfinished | None = None,
) -> Iterator[LayerLosses | str]:
    """Yields what it is about to do as text, and the losses at the end.

    Parameters
    ----------
    texts : windows of a text. (windows, reading.length)
    about : ``model``, ``weights``, ``text`` and ``settings`` as the file has them.
    so_far : runs that are done already; those that follow are added.
    """
    count, done = decoder.arch.model.layers, so_far or Unfinished()
    yield "reading the prompts"
    kept = KeptPrompt(decoder, [text[: reading.prompt] for text in texts])
    truth = _run(kept, parse("full"), texts).kept
    alone = np.zeros((2, len(widths), count, len(texts)))
    uniform = np.zeros((len(widths), len(texts)))
    runs = [(b, layer) for b in range(len(widths)) for layer in (None, *range(count))]
    progress = Progress(len(runs))

    def losses(pair: tuple[int, int], layers: range) -> Array:
        name = f"{pair[0]},{pair[1]} bits in {layers.start}-{layers.stop - 1}"
        found = done.run_losses(name, len(texts))
        if found is None:
            found = _run(kept, packed(*pair, group, layers, count), texts, truth).by_window
            done.record_run(name, found)
        return found

    for b, layer in runs:
        bits = widths[b]
        if layer is None:
            yield progress.line(f"{bits} bits in all layers")
            uniform[b] = losses((bits, bits), range(count))
            continue
        yield progress.line(f"{bits} bits in layer {layer} alone, keys and then values")
        for side, pair in enumerate(((bits, UNPACKED_BITS), (UNPACKED_BITS, bits))):
            alone[side, b, layer] = losses(pair, range(layer, layer + 1))
    yield LayerLosses(
        date=date.today().isoformat(),
        bits=tuple(widths),
        group=group,
        alone=alone,
        uniform=uniform,
        **about,
    )


def executed(
    decoder: Decoder, reading: Reading, texts: list[list[int]], techniques: Sequence[Technique]
) -> list[Array]:
    """What plans really lose, window by window. (windows,) each [nat per token]"""
    kept = KeptPrompt(decoder, [text[: reading.prompt] for text in texts])
    truth = _run(kept, parse("full"), texts).kept
    return [_run(kept, t, texts, truth).by_window for t in techniques]


def _run(
    kept: KeptPrompt,
    technique: Technique,
    texts: list[list[int]],
    truth: list[Tensor] | None = None,
) -> Resumed:
    run = Resumed(kept, technique, texts, truth)
    run.complete()
    return run
