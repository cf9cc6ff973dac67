"""Settings of quality measurements, and checks before anything runs."""

import torch

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.models.model import Model
from kvsim.techniques import parse
from kvsim.techniques.axes.drafting import WINDOW
from kvsim.techniques.technique import Technique
from kvsim.traces.attention import GAMMAS
from kvsim.validate.counts.check import CACHE_COPIES
from kvsim.validate.counts.expected import RandomPrompts
from kvsim.validate.machine import check_memory
from kvsim.validate.model.architecture import Architecture
from kvsim.validate.model.weights import cached_bytes, weight_bytes
from kvsim.validate.techniques import check_known

DRAFTED = 4  # tokens written for acceptance per token scored: a round takes several
MIN_SCORED = 16  # scored tokens, or too few are written for a round of every gamma


@frozen
class Reading:
    """How a text is read: windows of ``prompt`` tokens, each followed by ``scored`` tokens."""

    windows: int
    prompt: int
    scored: int

    @property
    def length(self) -> int:
        """Tokens of a window; the first one after the prompt is not scored. [tokens]"""
        return self.prompt + 1 + self.scored

    @property
    def written(self) -> int:
        """Tokens that a drafting technique generates after every prompt. [tokens]"""
        return DRAFTED * self.scored

    @property
    def description(self) -> str:
        """Number of windows and tokens, as stored in files of measurements."""
        return (
            f"{self.windows} windows of {self.prompt} tokens, {self.scored} scored behind each; "
            f"acceptance over {self.written} written behind each"
        )


@frozen
class Settings:
    """The techniques to measure, by kind of measurement."""

    lossy: tuple[Technique, ...]  # quality, and what they select
    drafts: tuple[Technique, ...]  # acceptance


def list_default_techniques(model: Model, prompt: int) -> list[Technique]:
    """List the settings that plans consider, with the largest and the smallest budgets.

    Parameters
    ----------
    prompt
        Tokens of a prompt. [tokens]
    """
    small, large = (
        max(g for g in groups if model.head_dim % g == 0 or g == 8)
        for groups in ((8, 16, 32), (8, 16, 32, 64, 128))
    )
    parts = [max(prompt * share // 8, 2) for share in (1, 2, 4)]
    draft = max(parts[1], 2 * WINDOW)
    return [
        parse(text)
        for text in [
            *(f"kivi:bits={bits},group={small}" for bits in (1, 2, 4, 8)),
            *(f"specache:bits={b},group={small},k={k}" for b in (1, 2) for k in (16, 64, 256)),
            *(f"zipcache:salient={share}" for share in (0.2, 0.4, 0.6, 0.8)),
            "zipcache:salient=1,high=4,low=4",
            f"quantspec:group={large}",
            "offload:bits=4",
            *(f"kcache:n={n}" for n in (32, 64, 128, 256)),
            *(f"h2o:heavy={n // 2},recent={n - n // 2}" for n in parts),
            *(f"streamingllm:sink=4,recent={n}" for n in parts),
            *(f"snapkv:budget={n}" for n in parts),
            *(f"magicdec:draft={d},budget={draft}" for d in ("streamingllm", "snapkv")),
        ]
    ]


def sort_out(techniques: list[Technique]) -> Settings:
    """Sort techniques into those that lose quality and those that draft.

    Raises
    ------
    InputError
        If a technique has nothing to measure, or no real implementation.
    """
    check_known(techniques)
    drafts = tuple(t for t in techniques if "gamma" in t.settings)
    once = [t.with_rounds(0) if t in drafts else t for t in techniques]
    for t in techniques:
        if t.exact and t not in drafts:
            raise InputError(
                f"--techniques: {t} gives the tokens of full-precision KV, so there is no loss of "
                f"quality to measure; omit it"
            )
    return Settings(tuple(t for t in once if not t.exact), drafts)


def check_reading(arch: Architecture, reading: Reading, drafts: bool, device: torch.device) -> int:
    """Check that a text can be read as requested, and return the positions that the decoder needs.

    Returns
    -------
    int
        Positions. [tokens]

    Raises
    ------
    InputError
        If the model has too few, memory is short, or drafts would have too few rounds.
    """
    m, behind = arch.model, reading.written if drafts else reading.scored + 1
    if drafts and reading.scored < MIN_SCORED:
        raise InputError(
            f"--generate: {reading.scored} tokens give too few rounds of drafts; give {MIN_SCORED} "
            f"or more, or --techniques that do not draft"
        )
    length = reading.prompt + behind + max(GAMMAS) + 1
    if length > m.max_context:
        raise InputError(
            f"--prompt: {reading.prompt} tokens and {behind} behind them are more than the "
            f"{m.max_context} positions of {m.name}; ask for less --prompt or --generate"
        )
    tokens = reading.windows * length
    logits = 4 * reading.windows * reading.scored * m.vocab
    hidden = 4 * tokens * (4 * m.hidden + 3 * m.ffn + 3 * m.heads * m.head_dim)
    scores = 4 * 4 * m.heads * reading.prompt**2  # exact saliency of one window
    cache = CACHE_COPIES * cached_bytes(m, tokens, torch.float32)
    weights = 1.5 * weight_bytes(arch, torch.float32)  # a draft's are beside them
    check_memory(device, weights + cache + logits + hidden + scores)
    return length


def widest_run(technique: Technique, reading: Reading) -> tuple[Technique, RandomPrompts]:
    """Return the largest run by which a technique is measured: the technique and the workload.

    Parameters
    ----------
    reading
        How the text is read.
    """
    if "gamma" not in technique.settings:
        return technique, RandomPrompts(reading.windows, reading.prompt, reading.scored + 1)
    most = technique.with_rounds(max(GAMMAS))
    return most, RandomPrompts(reading.windows, reading.prompt, reading.written)
