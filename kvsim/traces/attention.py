"""What a real run measured of attention, quality and acceptance, for one model and text.

Lossy techniques take their quality from it, speculative ones their accepted tokens;
`attentionfile` loads and writes it.
"""

from datetime import date

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.traces.requests import Floats, Integers

GAMMAS = range(1, 7)


@frozen
class Quality:
    """How far a technique's next-token distribution is from full-precision KV.

    Attributes
    ----------
    technique
        NAME:KEY=VALUE,... as on the command line.
    perplexity
        Of the text.
    kl
        Mean KL divergence from the run with full-precision KV, per token. [nat]
    found
        Share of the planted facts that it answered, 0 to 1; None if none were asked for.
    """

    technique: str
    perplexity: float
    kl: float
    found: float | None = None


@frozen
class Retrieval:
    """Facts that were planted in the text and asked for behind it.

    Attributes
    ----------
    facts
        How many, in all windows.
    found
        Share of them that full-precision KV answered, 0 to 1.
    """

    facts: int
    found: float


@frozen
class TopK:
    """Attention that the k largest scores keep.

    Attributes
    ----------
    k
        Pairs kept, ascending.
    mass
        Mean attention mass of a query head's k largest, per layer and k, 0 to 1. (layers, len(k))
    """

    k: tuple[int, ...]
    mass: tuple[tuple[float, ...], ...]


@frozen
class Prefetch:
    """How much of what a step attends to most SpeCache had fetched ahead.

    An oracle would fetch the k pairs with most attention mass of the output token, averaged over
    the query heads that share a KV head.

    Attributes
    ----------
    k
        Pairs fetched per KV head.
    bits
        Width of the low-precision keys that it chose them by.
    pairs
        Share of the oracle's pairs that were fetched, per layer, 0 to 1. (layers,)
    mass
        Mass of the fetched pairs over that of the oracle's, per layer, 0 to 1. (layers,)
    """

    k: int
    bits: int
    pairs: tuple[float, ...]
    mass: tuple[float, ...]


@frozen
class Saliency:
    """How well ZipCache's probes find the salient tokens.

    Attributes
    ----------
    salient
        Share of tokens counted as salient, 0 to 1.
    probe
        Share of queries used as probes, 0 to 1.
    overlap
        Share of the truly salient tokens that the probes find, per layer, 0 to 1. (layers,)
    """

    salient: float
    probe: float
    overlap: tuple[float, ...]


@frozen
class Acceptance:
    """How many drafted tokens are accepted.

    Attributes
    ----------
    technique
        The drafting technique, NAME:KEY=VALUE,... without its gamma.
    temperature
        0: greedy; otherwise tokens were drawn at this temperature.
    rounds
        Rounds measured per gamma, at least.
    reached
        For each gamma from 1 on: the share of rounds that accept at least 1, 2, ..., gamma tokens.
        (gammas, gamma)
    """

    technique: str
    temperature: float
    rounds: int
    reached: tuple[tuple[float, ...], ...]

    def tokens(self, gamma: int) -> float:
        """Mean tokens per round: the accepted ones and the one that verification adds.

        Raises
        ------
        InputError
            If the trace has no such gamma.
        """
        return 1.0 + sum(self._row(gamma))

    def draw(self, random: "np.random.Generator", gamma: int, rounds: int) -> Integers:
        """Tokens of each of `rounds` rounds, drawn independently. (rounds,)"""
        falling: Floats = np.array(self._row(gamma))
        accepted: Integers = (random.random(rounds)[:, None] < falling).sum(axis=1, dtype=np.int64)
        return accepted + 1

    def _row(self, gamma: int) -> tuple[float, ...]:
        if not 1 <= gamma <= len(self.reached):
            known = f"1 to {len(self.reached)}"
            raise InputError(f"{self.technique}: gamma {gamma} was not measured; expected {known}")
        return self.reached[gamma - 1]


@frozen
class AttentionTrace:
    """All that one run measured.

    Attributes
    ----------
    model
        Name in the catalogue, or path of its configuration.
    weights
        Where the weights are from, with a checksum.
    text
        The text that was read, with a checksum.
    tokens
        Tokens of it that were read. [tokens]
    settings
        On what device, in which number format, how it was read.
    layers
        Layers of the model.
    date
        Day of the run.
    perplexity
        With full-precision KV.
    quality, retrieval, top_k, prefetch, saliency, acceptance
        What was measured; empty or None if it was not.
    """

    model: str
    weights: str
    text: str
    tokens: int
    settings: str
    layers: int
    date: date
    perplexity: float
    quality: tuple[Quality, ...] = ()
    retrieval: Retrieval | None = None
    top_k: TopK | None = None
    prefetch: tuple[Prefetch, ...] = ()
    saliency: tuple[Saliency, ...] = ()
    acceptance: tuple[Acceptance, ...] = ()
