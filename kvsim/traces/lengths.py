"""Request lengths described by ``--prompt`` and ``--generate`` instead of a trace.

One number is a mean; its spread is that of the sample ``chat``, because equal lengths flatter: at
one load 87 % of requests kept their targets with equal lengths, and 70 % with drawn ones. A range
is uniform, a median with a 95th percentile lognormal, and a sample has its own percentiles.
"""

from math import exp, log
from statistics import NormalDist

import numpy as np

from kvsim.errors import InputError, unknown
from kvsim.frozen import frozen
from kvsim.inputs import TokenLengths
from kvsim.traces.requests import LONGEST_REQUEST, Floats, Integers
from kvsim.traces.synthetic import Lengths, Lognormal, Margin, fit_percentiles

CHAT_SPREAD = {"prompt": 1.1, "generate": 0.8}
"""Standard deviations of the logarithms of the sample ``chat``, as traces/samples/README.md."""

PERCENTILE_95 = 1.6449  # standard deviations from the median to the 95th percentile
MEAN_QUANTILES = 256  # of a distribution, over which its mean is taken
STRETCH_ROUNDS = 8  # times that cut lengths are stretched again


@frozen
class Uniform:
    """A uniform distribution of lengths.

    Attributes
    ----------
    least, most
        Smallest and largest length. [tokens]
    """

    least: float
    most: float

    def quantiles(self, share: Floats, normal: Floats) -> Floats:
        """Compute the lengths at quantiles.

        Parameters
        ----------
        share
            Probabilities from 0 to 1. (n,)
        normal
            The same quantiles as standard normal deviates, not used here. (n,)

        Returns
        -------
        array
            Lengths. (n,) [tokens]
        """
        return self.least + (self.most - self.least) * share


def choose_lengths(prompt: TokenLengths, generate: TokenLengths, equal: bool = False) -> Lengths:
    """Build the distributions of lengths that the options ``--prompt`` and ``--generate`` describe.

    Parameters
    ----------
    prompt, generate
        Values of the options.
    equal
        Whether a single number is the length of every request, instead of the mean of a
        distribution.

    Returns
    -------
    Lengths
        Distributions of prompt and generated lengths.

    Raises
    ------
    InputError
        For an unknown sample, or if ``equal`` is set and an option is not a single number.
    """
    if equal and {prompt.kind, generate.kind} != {"mean"}:
        raise InputError("--lengths equal: expected one number for --prompt and --generate")
    spread = dict.fromkeys(CHAT_SPREAD, 0.0) if equal else CHAT_SPREAD
    one, other = (
        _distribution(name, asked, spread[name])
        for name, asked in (("prompt", prompt), ("generate", generate))
    )
    return Lengths(one, other)


def _distribution(name: str, asked: TokenLengths, sigma: float) -> Margin:
    if asked.kind == "sample":
        from kvsim.traces.read import load
        from kvsim.traces.source import samples

        if asked.sample not in samples():
            raise unknown(f"sample in --{name}", asked.sample, samples())
        return fit_percentiles(getattr(load(f"sample:{asked.sample}").requests, name))
    if asked.kind == "range":
        return Uniform(asked.first, asked.second)
    if asked.kind == "percentiles":
        return Lognormal(asked.first, log(asked.second / asked.first) / PERCENTILE_95)
    if asked.first == 1:
        return Lognormal(1.0, 0.0)
    return Lognormal(asked.first * exp(-(sigma**2) / 2), sigma)


def choose_longest(lengths: Lengths, context: int) -> int:
    """Choose the length at which drawn requests are cut.

    Parameters
    ----------
    lengths
        Distributions of prompt and generated lengths.
    context
        Longest request that the engine accepts. [tokens]

    Returns
    -------
    int
        The context. If requests exceed it on average, they are not cut, because the engine is meant
        to refuse them, and the result is the largest length of any request. [tokens]
    """
    prompt, generate = draw_lengths(lengths, MEAN_QUANTILES)
    return context if prompt.mean() + generate.mean() <= context else LONGEST_REQUEST


def draw_lengths(
    lengths: Lengths, count: int, longest: float = np.inf, seed: int = 0
) -> tuple[Integers, Integers]:
    """Draw prompt and generated lengths of requests that fit in a model's context.

    Quantiles are spread evenly and put in random order, so that even few requests have the mean and
    the tail of the distribution. If the context cuts the longest requests, the others are stretched
    to keep the mean.

    Parameters
    ----------
    lengths
        Distributions of prompt and generated lengths, which are drawn independently.
    count
        Number of requests.
    longest
        Most prompt and generated tokens of a request. [tokens]
    seed
        Seed of the random numbers.

    Returns
    -------
    tuple of two arrays
        Prompt and generated tokens of each request. (count,) [tokens]
    """
    random = np.random.default_rng(seed)
    share = (np.arange(count) + 0.5) / count
    # SciPy's takes a fifth of a second to import
    normal = np.fromiter(map(NormalDist().inv_cdf, share.tolist()), float, count)
    found: list[Integers] = []
    most = min(longest, LONGEST_REQUEST)
    for margin in (lengths.generate, lengths.prompt):
        drawn = random.permutation(margin.quantiles(share, normal))
        mean, room = drawn.mean(), np.maximum(most - (found[0] if found else 1), 1)
        for _ in range(STRETCH_ROUNDS):
            cut = np.clip(drawn, 1, room)
            drawn = cut * min(mean / cut.mean(), STRETCH_ROUNDS)
        found.append(np.rint(np.clip(drawn, 1, room)).astype(np.int64))
    generate, prompt = found
    return prompt, generate
