"""How many drafts a round accepts, by method, model and kind of text: a library of summaries.

A summary holds two numbers. ``first`` is the chance that a round's first draft is accepted;
``kept`` times it is the chance of the second one where the first was, and so on. Rounds end at the
first draft that fails, so that the share of rounds in which a draft is accepted falls with its
position. ``python -m benchmarks.drafts --write`` makes the file from measured rows; each line says
how many, at how many drafts, and how far they lie from the curve.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from kvsim.files import TABLE, read_records
from kvsim.frozen import frozen

TASKS = ("mixed", "chat", "code", "knowledge", "math", "summary")
"""Kinds of text; ``mixed`` is the mean of all."""


ONE_MODEL = 0.25
"""Spread taken between models where one alone was measured."""


@frozen
class AcceptanceSummary:
    """What rows of one method, model and kind of text have in common.

    Attributes
    ----------
    method, model, task, temperature : what was run; ``model`` as kvsim or its page names it.
    shape : chain, tree, block or heads.
    first, kept : see above.
    spread : standard deviation of measured tokens per round about the curve, relative.
    rows, drafts : how many rows, and drafts per round of the fewest and of the most.
    source : where the rows stand.
    """

    method: str
    model: str
    task: str
    temperature: str
    shape: str
    first: float
    kept: float
    spread: float
    rows: int
    drafts: str
    source: str


@frozen
class AcceptedDrafts:
    """Shares of rounds in which drafts 1, 2, ... are accepted, and what is known of them.

    Attributes
    ----------
    shares : by position; they never rise.
    spread : relative standard deviation of tokens per round between models and texts.
    source : in words.
    """

    shares: tuple[float, ...]
    spread: float
    source: str


def find_accepted(
    method: str,
    drafts: int,
    task: str = "mixed",
    model: str = "",
    shape: str = "",
    without: str = "",
) -> AcceptedDrafts | None:
    """Look up the acceptance of a method by position.

    A model's own summaries count where there are any of that kind of text; otherwise every model
    has the same weight, whatever the number of its texts.

    Parameters
    ----------
    method : as the notation writes it.
    drafts : tokens drafted in a row per round. [tokens]
    task : one of ``TASKS``.
    model : kvsim's name; empty for any.
    shape : chain, tree, block or heads; empty for the first that the method has.
    without : a model to leave out, to judge the others by it.

    Returns
    -------
    AcceptedDrafts or None
        None where nothing is measured.
    """
    rows = [s for s in load_summaries() if s.method == method and s.model != without]
    rows = [s for s in rows if s.shape == (shape or rows[0].shape)]
    here = [s for s in rows if task in ("mixed", s.task)]
    some = here or rows
    own = [s for s in some if s.model == model]
    if not some or not drafts:
        return None
    curves = _by_model(own or some, drafts)
    tokens = 1.0 + curves.sum(axis=1)
    within = float(np.mean([s.spread for s in own or some]))
    between = ONE_MODEL * (not own)
    if len(tokens) > 1:  # few models tell little of the next one: close to Student's t
        n = len(tokens)
        between = float(np.std(np.log(tokens), ddof=1)) * (n + 1) / (n - 1)
    kinds = "" if task == "mixed" else f", {task}"
    if task != "mixed" and not here:
        kinds = f"; as {task} was not measured"
    said = own[0].model if own else f"average of {len(tokens)} model{'s' * (len(tokens) > 1)}"
    shares = tuple(float(x) for x in curves.mean(axis=0))
    return AcceptedDrafts(shares, float(np.hypot(within, between)), f"{method}, {said}{kinds}")


def _by_model(some: Sequence[AcceptanceSummary], drafts: int) -> np.ndarray:
    """Shares by position, one line per model."""
    models = dict.fromkeys(s.model for s in some)
    return np.array([
        np.mean([position_shares(s.first, s.kept, drafts) for s in some if s.model == m], axis=0)
        for m in models
    ])  # fmt: skip


def position_shares(first: float, kept: float, drafts: int) -> np.ndarray:
    """Return the shares of rounds in which draft 1, 2, ... is accepted.

    Parameters
    ----------
    first : chance that the first draft is accepted.
    kept : factor from the chance of one draft, where all before it were accepted, to the next.
    drafts : per round. [tokens]
    """
    return np.cumprod(np.minimum(first * kept ** np.arange(drafts), 1.0))


def methods() -> Iterable[str]:
    """Return the methods of which anything is measured."""
    return dict.fromkeys(s.method for s in load_summaries())


@cache
def load_summaries() -> tuple[AcceptanceSummary, ...]:
    """Return the shipped library."""
    file = files("kvsim.techniques") / "acceptance.csv"
    return tuple(
        AcceptanceSummary(
            r["method"],
            r["model"],
            r["task"],
            r["temperature"],
            r["shape"],
            float(r["first"]),
            float(r["kept"]),
            float(r["spread"]),
            int(r["rows"]),
            r["drafts"],
            r["source"],
        )
        for _, r in read_records(str(file), TABLE)
    )
