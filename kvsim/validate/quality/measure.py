"""Quality, attention and acceptance of techniques on a text, as one trace; losses layer by layer.

Facts are planted in the text and asked for at its end: whether a cache still holds what is needed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from kvsim.console import print_note
from kvsim.frozen import frozen
from kvsim.graph import Array
from kvsim.journal import Journal
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.quality.layers import LayerLosses
from kvsim.quality.measured import family
from kvsim.techniques import parse
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import AttentionTrace, Prefetch, Quality, Retrieval, Saliency, TopK
from kvsim.validate.machine import find_device
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.checkpoint import Tokeniser, checksum, open_weights, read_tokeniser
from kvsim.validate.model.decoder import Decoder
from kvsim.validate.model.weights import TensorSource, load_weights
from kvsim.validate.parts.composed import Composed
from kvsim.validate.quality.runs import (
    SHARE_DIGITS,
    WATCHED,
    Forced,
    NotingPairs,
    Watched,
    WatchedFull,
    measure_acceptance,
    named,
    powers,
)
from kvsim.validate.quality.settings import Reading, Settings
from kvsim.validate.quality.text import Text, windows
from kvsim.validate.run import Generation
from kvsim.validate.runner import Progress

PLACES = """
    Amsterdam Athens Berlin Cairo Chicago Delhi Dublin Geneva Houston Lima Lisbon London Madrid
    Mexico Milan Moscow Oslo Paris Prague Rome Seattle Sydney Tokyo Vienna
"""
QUESTION = "\nThe secret number of {} is"
STATEMENT = QUESTION + " {}."
SECRET_DIGITS = 5
DRAWS = 8  # numbers tried per place until the tokens are as many as the others'


@frozen
class PlantedFacts:
    """Windows of a text with facts planted in them, followed by questions about the facts.

    Attributes
    ----------
    prompts
        Tokens of the prompts, which end with the first question. (windows, prompt)
    behind
        The first answer, and further questions with their answers. (windows, tokens)
    answers
        Positions in ``behind`` of each answer's tokens, except the first token after the prompt,
        which is computed in full precision.
    """

    prompts: list[list[int]]
    behind: list[list[int]]
    answers: list[range]

    @property
    def count(self) -> int:
        """Number of facts that are asked for, in all windows."""
        return len(self.answers) * len(self.prompts)


def plant(
    split: Callable[[str], list[int]],
    tokens: Sequence[int],
    sizes: tuple[int, int, int],
    start: tuple[int, ...],
) -> PlantedFacts | None:
    """Plant facts in windows of a text, at evenly spread depths; return None if none fit.

    Parameters
    ----------
    split : splits a text into tokens, without start tokens.
    tokens : tokens of the text.
    sizes : number of windows, tokens per prompt, and most tokens after a prompt.
    """
    count, prompt, most = sizes
    facts = _of_one_length(split)
    told, asked = len(facts[0].told), len(facts[0].asked)
    answer = told - asked
    each = min(len(facts), 1 + (most - answer) // told) if most >= answer > 1 else 0
    own = prompt - len(start) - each * told - asked
    if each < 1 or own < each or len(tokens) < count * own:
        return None
    random, apart = Random(0), len(tokens) // count
    prompts, behind = [], []
    for window in range(count):
        mine = random.sample(facts, each)
        text = tokens[window * apart : window * apart + own]
        depths = [round((i + (window + 0.5) / count) * own / each) for i in range(each)]
        planted = [*start]
        for (begin, end), fact in zip(pairwise([0, *depths, own]), [*mine, None], strict=True):
            planted += [*text[begin:end], *(fact.told if fact else ())]
        asks = random.sample(mine, each)
        prompts.append([*planted, *asks[0].asked])
        behind.append([token for fact in asks for token in fact.told][asked:])
    answers = [range(max(1, i * told), i * told + answer - 1) for i in range(each)]
    return PlantedFacts(prompts, behind, answers)


@frozen
class _Fact:
    """A sentence with a fact as tokens, and the part of it that is the question."""

    told: list[int]
    asked: list[int]


def _of_one_length(split: Callable[[str], list[int]]) -> list[_Fact]:
    """Select facts whose sentences and questions have the most common numbers of tokens."""
    found: dict[str, list[_Fact]] = {}
    for place, fact in _drawn(split):
        found.setdefault(place, []).append(fact)
    lengths = Counter(_lengths(fact) for facts in found.values() for fact in facts)
    ((usual, _),) = lengths.most_common(1)
    alike = ([f for f in facts if _lengths(f) == usual] for facts in found.values())
    return [facts[0] for facts in alike if facts]


def _lengths(fact: _Fact) -> tuple[int, int]:
    return len(fact.told), len(fact.asked)


def _drawn(split: Callable[[str], list[int]]) -> Iterator[tuple[str, _Fact]]:
    random = Random(0)
    for place in PLACES.split():
        asked = split(QUESTION.format(place))
        for _ in range(DRAWS):
            number = random.randrange(10 ** (SECRET_DIGITS - 1), 10**SECRET_DIGITS)
            told = split(STATEMENT.format(place, number))
            if told[: len(asked)] == asked:
                yield place, _Fact(told, asked)


class Asked(Forced):
    """A run over the questions, which counts the answers whose tokens are all the most likely."""

    def __init__(self, decoder: Decoder, technique: Technique, facts: PlantedFacts) -> None:
        texts = [[*a, *b] for a, b in zip(facts.prompts, facts.behind, strict=True)]
        super().__init__(decoder, technique, texts, len(facts.prompts[0]))
        self._answers = facts.answers
        self._right: dict[int, Tensor] = {}

    @property
    def recall(self) -> float:
        """Share of the facts that were found, from 0 to 1."""
        right = [
            all(bool(self._right[place][window]) for place in answer)
            for answer in self._answers
            for window in range(self.batch)
        ]
        return sum(right) / len(right)

    def _score(self, logits: Tensor, place: int) -> None:
        self._right[place] = logits.argmax(-1) == self.text[:, place]


@frozen
class OpenedCheckpoint:
    """A checkpoint whose weights have not been loaded yet.

    Attributes
    ----------
    model
        Name or path of the model.
    arch
        Architecture of the model.
    source
        Tensors of the checkpoint.
    device
        Device to load the weights to.
    machine
        Deployment for which settings are chosen.
    """

    model: str
    arch: Architecture
    source: TensorSource
    device: torch.device
    machine: Deployment

    @classmethod
    def open(cls, model: str, device: str, gpu: str) -> "OpenedCheckpoint":
        """Open a checkpoint for a device, and load the machine for which settings are chosen."""
        where = find_device(device)
        arch, source = open_weights(model)
        machine = Deployment(arch.model, load_hardware(gpu), load_stack("kvsim"))
        return cls(model, arch, source, where, machine)

    def read(
        self, text: Text, reading: Reading, length: int
    ) -> tuple[Decoder, list[list[int]], dict[str, str]]:
        """Load the decoder and read windows of the text; return both, with their description for
        files.

        Parameters
        ----------
        length : number of positions that the decoder needs. [tokens]
        """
        tokeniser, tokens = self._split(text)
        texts = windows(tokens, reading.windows, reading.length, tokeniser.start)
        print_note(f"loading {self.source.where}")
        weights = load_weights(self.arch, self.source, self.device, torch.float32)
        decoder = Decoder(self.arch, weights, length, deployment=self.machine)
        gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if gpu else "cpu"
        about = {
            "model": self.model,
            "weights": checksum(self.source),
            "text": text.source,
            "settings": f"{name}, fp32, PyTorch {torch.__version__}; {reading.description}",
        }
        return decoder, texts, about

    def facts(self, text: Text, reading: Reading) -> PlantedFacts | None:
        """Plant facts in windows of the text, or return None if there are no questions to ask."""
        tokeniser, tokens = self._split(text)
        sizes = reading.windows, reading.prompt, reading.scored + 1
        return plant(tokeniser, tokens, sizes, tokeniser.start)

    def _split(self, text: Text) -> tuple[Tokeniser, list[int]]:
        tokeniser = read_tokeniser(self.source)
        tokens = tokeniser(text.content)
        tokeniser.check(tokens, self.arch.model.vocab)
        return tokeniser, tokens


TEMPERATURES = (0.0, 1.0)


@torch.inference_mode()
def measure(
    decoder: Decoder,
    settings: Settings,
    reading: Reading,
    texts: list[list[int]],
    about: dict[str, str],
    facts: PlantedFacts | None = None,
) -> Iterator[AttentionTrace | str]:
    """Measure quality loss, attention and draft acceptance on a text.

    Parameters
    ----------
    decoder : the model with its weights.
    settings : techniques to measure, by kind of measurement.
    reading : number and length of the windows.
    texts : windows of a text. (windows, reading.length)
    about : ``model``, ``weights``, ``text`` and ``settings``, as stored in the trace.
    facts : planted facts that evicting techniques are asked for, if any.

    Yields
    ------
    str or AttentionTrace
        A progress line before each run, and the trace at the end.
    """
    evicting = [t for t in settings.lossy if facts and family(t) == "eviction"]
    runs = 1 + len(settings.lossy) + len(TEMPERATURES) * len(settings.drafts)
    progress = Progress(runs + len(evicting) + bool(evicting))
    yield progress.line("full")
    full = _run(decoder, parse("full"), texts, reading)
    assert isinstance(full.impl, WatchedFull)
    mass = full.impl.noted_means()
    retrieval: Retrieval | None = None
    if facts and evicting:
        yield progress.line("full, planted facts")
        retrieval = Retrieval(
            facts.count, _round_significant(_measure_recall(decoder, parse("full"), facts))
        )
    quality, prefetch, saliency, acceptance = [], [], [], []
    for t in settings.lossy:
        yield progress.line(str(t))
        run = _run(decoder, t, texts, reading, full.kept)
        found: float | None = None
        if facts and t in evicting:
            yield progress.line(f"{t}, planted facts")
            found = _round_significant(_measure_recall(decoder, t, facts))
        quality.append(
            Quality(
                named(t),
                _round_significant(run.perplexity),
                _round_significant(run.divergence),
                found,
            )
        )
        if not isinstance(run.impl, Watched):
            continue
        first = run.impl.layers[0]
        if isinstance(first, NotingPairs) and first.chosen and first.guesses:
            pairs, held = run.impl.noted_means().unbind(-1)
            prefetch.append(
                Prefetch(first.chosen, int(t.settings["bits"]), _row(pairs), _row(held))
            )
        if t.name == "zipcache" and 0 < t.settings["salient"] < 1:
            share, probe = t.settings["salient"], t.settings["probe"]
            overlap = _row(run.impl.noted_means())
            saliency.append(Saliency(float(share), float(probe), overlap))
    prompts = [text[: reading.prompt] for text in texts]
    for t in settings.drafts:
        for heat in TEMPERATURES:
            yield progress.line(f"{named(t)}, acceptance at temperature {heat:g}")
            accepted = measure_acceptance(decoder, t, prompts, reading.written, heat)
            if accepted:
                acceptance.append(accepted)
            else:
                yield f"left out: some gamma had no round in {reading.written} tokens"
    m = decoder.arch.model
    yield AttentionTrace(
        tokens=len(texts) * reading.length,
        layers=m.layers,
        date=date.today(),
        perplexity=_round_significant(full.perplexity),
        quality=tuple(quality),
        retrieval=retrieval,
        top_k=TopK(tuple(powers(reading.prompt)), tuple(map(_row, mass))),
        prefetch=tuple(prefetch),
        saliency=tuple(saliency),
        acceptance=tuple(acceptance),
        **about,
    )


def _run(
    decoder: Decoder,
    technique: Technique,
    texts: list[list[int]],
    reading: Reading,
    truth: list[Tensor] | None = None,
) -> Forced:
    kind = WATCHED.get(technique.name, Composed)
    run = Forced(decoder, technique, texts, reading.prompt, truth, kind)
    run.complete()
    return run


def _measure_recall(decoder: Decoder, technique: Technique, facts: PlantedFacts) -> float:
    asked = Asked(decoder, technique, facts)
    asked.complete()
    return asked.recall


def _row(shares: Tensor) -> tuple[float, ...]:
    return tuple(round(share, SHARE_DIGITS) for share in shares.tolist())


def _round_significant(number: float) -> float:
    return float(f"{number:.{SHARE_DIGITS}g}")


LAYER_BITS = (2, 3, 4)
UNPACKED_BITS = 16  # bits of a number that is not packed


class KeptPrompt(Generation):
    """The cache of a prompt that is read once: all keys and values, and the last logits.

    Packed storages receive copies of these keys and values.
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
    """Reading of a text after a kept prompt, for storages that store the prompt as it is."""

    def __init__(
        self,
        kept: KeptPrompt,
        technique: Technique,
        texts: Sequence[Sequence[int]],
        truth: list[Tensor] | None = None,
    ) -> None:
        super().__init__(kept.decoder, technique, texts, kept.prompt, truth)
        self._kept = kept

    def _prefill(self) -> Tensor:
        for layer, pair in enumerate(zip(self._kept.keys, self._kept.values, strict=True)):
            keys, values = (x.clone() for x in pair)
            self.impl.layers[layer].kv.fill(keys, values)
        self.impl.prompt_done()
        return self._kept.last_logits

    @property
    def by_window(self) -> Array:
        """Mean KL divergence in each window. (windows,) [nat per token]"""
        found: Array = torch.stack(self._divergences).double().mean(0).clamp(min=0).cpu().numpy()
        return found


def packed(bits: int, value_bits: int, group: int, layers: range, count: int) -> Technique:
    """Return a technique that packs some layers and keeps the others in full precision."""
    some = f"grouped:bits={bits},value_bits={value_bits},group={group}"
    first, last = layers.start, layers.stop - 1
    parts = [f"0-{first - 1}: full"] if first else []
    parts += [f"{first}-{last}: {some}" if last > first else f"{first}: {some}"]
    parts += [f"{last + 1}-{count - 1}: full"] if last + 1 < count else []
    return parse("; ".join(parts) if first or last + 1 < count else some)


def keep_losses(out: Path, about: Mapping[str, object]) -> Journal[Array]:
    """Return the journal that keeps the losses of finished runs until an output is complete.

    Parameters
    ----------
    out
        Path of the output.
    about
        Description of the measurement; a journal of another measurement is discarded.
    """
    return Journal[Array](
        out.with_name(f"{out.name}.unfinished"),
        {"losses": 1, **about},
        lambda losses: {"nat_per_token": losses.tolist()},
        lambda row: np.array(row["nat_per_token"], dtype=float),
        replaces=True,
    )


@torch.inference_mode()
def measure_layers(
    decoder: Decoder,
    reading: Reading,
    texts: list[list[int]],
    group: int,
    about: dict[str, str],
    widths: Sequence[int] = LAYER_BITS,
    so_far: Journal[Array] | None = None,
) -> Iterator[LayerLosses | str]:
    """Measure the loss of packing single layers; yield progress lines, and the losses at the end.

    Parameters
    ----------
    texts : windows of a text. (windows, reading.length)
    about : ``model``, ``weights``, ``text`` and ``settings`` as stored in the file.
    so_far : results of finished runs; those of further runs are added.
    """
    count = decoder.arch.model.layers
    yield "reading the prompts"
    kept = KeptPrompt(decoder, [text[: reading.prompt] for text in texts])
    truth = _resume(kept, parse("full"), texts).kept
    alone = np.zeros((2, len(widths), count, len(texts)))
    uniform = np.zeros((len(widths), len(texts)))
    runs = [(b, layer) for b in range(len(widths)) for layer in (None, *range(count))]
    progress = Progress(len(runs))

    def losses(pair: tuple[int, int], layers: range) -> Array:
        name = f"{pair[0]},{pair[1]} bits in {layers.start}-{layers.stop - 1}"
        if so_far and (known := so_far.done.get(name)) and known[0].shape == (len(texts),):
            return known[0]
        found = _resume(kept, packed(*pair, group, layers, count), texts, truth).by_window
        if so_far:
            so_far.append(name, [found])
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
    """Measure the losses of techniques in each window. (windows,) each [nat per token]"""
    kept = KeptPrompt(decoder, [text[: reading.prompt] for text in texts])
    truth = _resume(kept, parse("full"), texts).kept
    return [_resume(kept, t, texts, truth).by_window for t in techniques]


def _resume(
    kept: KeptPrompt,
    technique: Technique,
    texts: list[list[int]],
    truth: list[Tensor] | None = None,
) -> Resumed:
    run = Resumed(kept, technique, texts, truth)
    run.complete()
    return run
