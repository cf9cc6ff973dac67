"""Joint lengths of prompts and answers: a Gaussian copula over two marginals.

Lognormal marginals are given by median and sigma; empirical ones are a trace's percentiles, in
between straight lines of log length. Of the trace nothing else is kept, so no pair of its lengths
returns other than by chance.
"""

import numpy as np

from kvsim.frozen import frozen
from kvsim.traces.requests import Floats, Integers, Requests
from kvsim.traces.rules import LONGEST_REQUEST
from kvsim.traces.statistics import rank_correlation

# Quantiles that a fit keeps: percentiles, and more of the longest, which carry much of the tokens.
MARKS = np.sort(np.append(np.linspace(0.0, 1.0, 101), [0.9925, 0.995, 0.9975, 0.999]))


@frozen
class Lognormal:
    """Tokens with a lognormal length.

    Attributes
    ----------
    median
        Half of the lengths are below. [tokens]
    sigma
        Standard deviation of the logarithm; 0: all are the median.
    """

    median: float
    sigma: float

    def at(self, share: Floats, normal: Floats) -> Floats:
        """Lengths at quantiles, given as shares and as normal deviates. [tokens]"""
        return self.median * np.exp(self.sigma * normal)


@frozen
class Empirical:
    """Values with a trace's percentiles.

    Attributes
    ----------
    marks
        Logarithm of 1 + the value at each quantile of `MARKS`.
    """

    marks: tuple[float, ...]

    def at(self, share: Floats, normal: Floats) -> Floats:
        """The values at quantiles ``share`` of the distribution."""
        return np.expm1(np.interp(share, MARKS, self.marks))


def empirical(values: Integers | Floats) -> Empirical:
    """The percentiles of values of at least 0."""
    return Empirical(tuple(np.log1p(np.quantile(values, MARKS)).tolist()))


@frozen
class Lengths:
    """Prompt and generated lengths.

    Attributes
    ----------
    prompt, generate
        Marginals.
    correlation
        Of the normal deviates that both are drawn from.
    """

    prompt: Lognormal | Empirical
    generate: Lognormal | Empirical
    correlation: float = 0.0

    def draw(self, random: "np.random.Generator", count: int) -> tuple[Integers, Integers]:
        """Prompt and generated tokens of `count` requests; at least 1 each. [tokens]"""
        from scipy.special import ndtr

        first, second = random.standard_normal((2, count))
        second = self.correlation * first + (1 - self.correlation**2) ** 0.5 * second
        prompt, generate = (
            np.clip(np.rint(margin.at(ndtr(normal), normal)), 1, LONGEST_REQUEST).astype(np.int64)
            for margin, normal in ((self.prompt, first), (self.generate, second))
        )
        return prompt, generate


def fit(requests: Requests) -> Lengths:
    """The joint lengths of a trace: percentiles, and Spearman's correlation as a normal one."""
    spearman = rank_correlation(requests.prompt, requests.generate) or 0.0
    return Lengths(
        empirical(requests.prompt),
        empirical(requests.generate),
        2 * np.sin(np.pi * spearman / 6),  # of a bivariate normal; Kruskal (1958), section 5
    )
