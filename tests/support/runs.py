"""Comparisons of real runs that hold on any processor.

Two runs of the same model differ by rounding. So logits are compared up to a tolerance, and tokens
are equal as far as no two candidates are within that rounding of each other: behind such a tie the
sequences go different ways, and nothing more can be compared.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsim.techniques import parse
from kvsim.validate.run import Generation
from tests.support.decoders import decoder

TOLERANCE = 1e-4
"""Of logits around 1; rounding in fp32 makes about a hundredth of it."""


def complete(
    text: str, given: Sequence[Sequence[int]], generate: int, model: str = "llama"
) -> Generation:
    """A technique's run on a toy model, with what its tokens were chosen by."""
    run = Generation(decoder(model), parse(text), given, generate, keep=True)
    run.complete()
    return run


def logits_of(run: Generation, sequence: int) -> Tensor:
    """What each token of a sequence was chosen by, (generated, vocab)."""
    return torch.stack(run.logits[sequence])


def assert_same_run(run: Generation, expected: Generation, tolerance: float = TOLERANCE) -> None:
    """Same logits and tokens in every sequence; one sequence may end early in a tie.

    Both runs are complete and have kept their logits.
    """
    parted = 0
    for i in range(expected.batch):
        parted += not assert_same_sequence(
            logits_of(run, i), run.tokens[i], logits_of(expected, i), expected.tokens[i], tolerance
        )
    assert parted <= 1, f"{parted} of {expected.batch} sequences end in a tie"


def assert_same(
    text: str,
    other: str,
    given: Sequence[Sequence[int]],
    generate: int,
    model: str = "llama",
) -> None:
    """Two techniques give the same logits and tokens."""
    run, expected = (complete(one, given, generate, model) for one in (text, other))
    assert_same_run(run, expected)


def assert_likeliest(
    logits: Tensor, tokens: Tensor, exact: Tensor, tolerance: float = TOLERANCE
) -> int:
    """Each token is the likeliest one, or ties with it; how many do the latter.

    Parameters
    ----------
    logits : what the tokens were chosen by, (generated, vocab).
    exact : what they should have been chosen by, along the same tokens.
    """
    off = (logits - exact).abs().nan_to_num(torch.inf).max()
    assert off <= tolerance, f"logits differ by {off:.1e}"
    short = exact.amax(-1) - exact.gather(1, tokens[:, None])[:, 0]
    assert (short <= 2 * off).all(), f"a token is {short.max():.1e} less likely than another"
    return int((short > 0).sum())


def assert_same_sequence(
    logits: Tensor, tokens: Tensor, exact: Tensor, expected: Tensor, tolerance: float = TOLERANCE
) -> bool:
    """Whether all tokens are equal; if not, the first that differs was a tie."""
    differs = (tokens != expected).nonzero()
    until = int(differs[0]) if len(differs) else len(tokens) - 1
    off = (logits[: until + 1] - exact[: until + 1]).abs().nan_to_num(torch.inf).max()
    assert off < tolerance, f"logits differ by {off:.1e}"
    if not len(differs):
        return True
    gap = exact[until, expected[until]] - exact[until, tokens[until]]
    assert 0 <= gap <= 2 * off, f"token {until} is another one, which is {gap:.1e} less likely"
    return False
