"""Parallelism of a replica besides tensor parallelism, and its limits."""

from collections.abc import Iterator

import numpy as np

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Number
from kvsim.machines.hardware import Link
from kvsim.models.model import Model

MAX_DEGREE = 64  # data-parallel ranks or stages
TP_DEGREES = (1, 2, 4, 8, 16, 32)
"""GPUs that may share every matrix: beyond those of one machine, sums cross the network."""
NETWORK = Link(50e9, 5e-6)
"""Between nodes, per GPU: 400 Gb/s in each direction (DGX H100 and B200 datasheets: one ConnectX-7
per GPU); the latency is that of one message over InfiniBand, recalled, not measured here."""

BUSIEST = 1.2
"""Tokens of the GPU with the most routed tokens over the average, where experts are whole on GPUs:
an assumption. DeepSeek-V3 copies busy experts to stay near 1 (its report, section 3.4)."""


def busiest(ep: Number, skew: float) -> Number:
    """Compute the tokens of the GPU with the most routed tokens over the average.

    Parameters
    ----------
    ep
        Number of groups that experts are spread over.
    skew
        What each doubling of ``ep`` adds to the ratio; 0 for the fixed assumption ``BUSIEST``.

    Returns
    -------
    Number
        Ratio of the busiest GPU's tokens to the average; 1 where experts are on one GPU.
    """
    if not skew:
        return np.where(np.greater(ep, 1), BUSIEST, 1.0)
    return 1.0 + skew * np.log2(ep)


_NODES, _SHARES = np.polynomial.legendre.leggauss(4)
PLACES, SHARES = (_NODES + 1) / 2, _SHARES / 2
"""Places of experts between the least and the most popular one, and the share that each stands for:
Gauss and Legendre's, within 1 % of the exact integral where popularities differ up to 100 times."""
STEPS = 4  # of Newton's method, of which three are enough


def left_idle(share: Number, tokens: Number, popularity: float) -> Number:
    """Compute the probability that no token of a pass is routed to an expert.

    Rates at which experts are chosen are distributed log-uniformly between those of the least and
    the most popular expert.

    Parameters
    ----------
    share
        Experts per token, divided by all experts.
    tokens
        Number of tokens that are routed.
    popularity
        Rate of the most popular expert divided by that of the least popular one; 1 for uniform
        routing.

    Returns
    -------
    Number
        Probability for an expert taken at random, from 0 to 1.
    """
    if popularity <= 1.0:
        return (1.0 - share) ** tokens
    sizes = popularity**PLACES
    rate = np.asarray(share / (SHARES @ sizes))[..., None]
    for _ in range(STEPS):  # one token calls for `share` of the experts
        gone = np.exp(-rate * sizes)
        missing = share - (1.0 - gone @ SHARES)
        rate = rate + (missing / (gone @ (SHARES * sizes)))[..., None]
    idle: Array = np.exp(-rate * sizes * np.asarray(tokens)[..., None]) @ SHARES
    return idle


@frozen
class Parallelism:
    """Degrees of parallelism of one replica.

    Attributes
    ----------
    tp
        GPUs that share every matrix of attention, of dense MLPs and of shared experts.
    pp
        Stages that layers are divided into, one after another.
    dp
        Copies of attention, each with its own sequences; all share the routed experts.
    ep
        Groups of GPUs of a stage, each with whole experts of its own; with 1 every expert is
        divided over all GPUs of the stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the whole replica."""
        return self.tp * self.dp * self.pp

    @property
    def stage(self) -> int:
        """GPUs of one stage."""
        return self.tp * self.dp

    @property
    def slices(self) -> int:
        """Number of GPUs that share one expert."""
        return self.stage // self.ep

    def check(self, model: Model) -> None:
        """Check that the degrees of parallelism suit a model.

        Parameters
        ----------
        model
            The model.

        Raises
        ------
        InputError
            If the model cannot be divided in this way; the message names the option and values that
            work.
        """
        for name, value in (("--pp", self.pp), ("--dp", self.dp), ("--ep", self.ep)):
            if not 1 <= value <= MAX_DEGREE:
                raise InputError(
                    f"{name}: got {value}; expected a whole number from 1 to {MAX_DEGREE}"
                )
        if self == Parallelism(self.tp):
            return  # what tensor parallelism needs is checked where the model is cut
        if self.pp > model.layers:
            raise InputError(
                f"--pp: got {self.pp} stages for the {model.layers} layers of {model.name}; "
                f"choose at most {model.layers}"
            )
        if self.dp > 1 and not model.experts:
            raise InputError(
                f"--dp: {model.name} has no experts that copies of attention could share; run "
                f"whole replicas instead (`kvsim capacity`, or --replicas of `kvsim simulate`)"
            )
        if self.ep > 1 and not model.experts:
            raise InputError(f"--ep: {model.name} has no experts; leave --ep out")
        if self.ep > 1 and (self.stage % self.ep or model.experts % self.ep):
            raise InputError(
                f"--ep: got {self.ep}; expected a number that divides the {self.stage} GPUs of a "
                f"stage (--tp times --dp) and the {model.experts} experts of {model.name}"
            )
        if model.experts and model.expert_ffn % self.slices:
            raise InputError(
                f"{model.name}: {model.expert_ffn} numbers of an expert's width do not divide over "
                f"{self.slices} GPUs; choose a larger --ep (up to {self.stage})"
            )

    def words(self) -> str:
        """Describe the degrees above 1.

        Returns
        -------
        str
            For example "tp 4, pp 2"; empty on one GPU.
        """
        given = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        return ", ".join(f"{name} {value}" for name, value in given if value > 1)

    def brackets(self) -> str:
        """Describe the degrees in brackets.

        Returns
        -------
        str
            For example " (tp 4, pp 2)"; empty if there is only tensor parallelism.
        """
        return "" if self == Parallelism(self.tp) else f" ({self.words()})"

    def notes(self, domain: int, skew: float = 0.0) -> Iterator[str]:
        """Yield remarks on the assumptions for a replica with this layout.

        Parameters
        ----------
        domain
            Number of GPUs that NVLink joins.
        skew
            What each doubling of the GPUs that share the experts adds to the load of the busiest
            one, as a multiple of the average load; 0 for a fixed assumption.

        Yields
        ------
        str
            One remark, for people.
        """
        if self.ep > 1:
            why = "as kernels were measured, with skewed routing" if skew else "an assumption"
            yield (
                f"the GPU with the most routed tokens is assumed to process "
                f"{float(busiest(self.ep, skew)):g} times the average: {why}"
            )
        if self.dp > 1:
            yield (
                f"the batch is divided evenly over {self.dp} data-parallel ranks; decoding passes "
                f"are padded to the rank with most sequences, and a rank without a prompt waits "
                f"for those that read one"
            )
        if self.stage > domain or (self.pp > 1 and self.stage >= domain):
            yield (
                f"beyond {domain} GPUs the network is assumed to carry "
                f"{NETWORK.bandwidth / 1e9:g} GB/s per GPU: one port of 400 Gb/s each"
            )
        if self != Parallelism(self.tp):
            yield f"no measurement covers this layout ({self.words()})"
