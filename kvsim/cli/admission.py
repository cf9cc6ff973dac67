"""Options that say which techniques may be considered, and what quality may be lost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsim.cli.arguments import number, option, words
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.planner.question import Admission

KNOWN_BAD = 0.1  # what --lossy admits at most where the loss is known

OnlyOption = Annotated[str | None, option("--only", "A,B", "Consider these techniques only.")]
WithoutOption = Annotated[str | None, option("--without", "A,B", "Leave these out.")]
EngineOption = Annotated[
    str | None, option("--engine", "NAME", "Techniques that vllm, sglang, ... can run.")
]
LossyOption = Annotated[
    bool,
    typer.Option("--lossy", help="Admit techniques whose loss of quality was not measured."),
]
MaxLossOption = Annotated[
    str | None, option("--max-loss", "0..1", "Largest relative loss of quality; needs evidence.")
]
QualityOption = Annotated[
    str | None, option("--quality", "FILE,..", "What `validate --quality` measured on your model.")
]
AcceptanceOption = Annotated[
    str | None,
    option("--acceptance", "X|X@N|FILE", "Share of drafts accepted (at N drafts), or a file."),
]


def admission(
    only: str | None,
    without: str | None,
    engine: str | None,
    lossy: bool,
    quality: str | None,
    acceptance: str | None,
) -> "Admission":
    """What the options let a plan consider."""
    from kvsim.planner.question import Admission, read_acceptance

    rate, seen_at, accepted = (None, 0, ()) if acceptance is None else read_acceptance(acceptance)
    return Admission(
        only=() if only is None else tuple(words("--only", only)),
        without=() if without is None else tuple(words("--without", without)),
        engine=(engine or "").strip().lower(),
        unmeasured=lossy,
        rate=rate,
        seen_at=seen_at,
        accepted=accepted,
        **({} if quality is None else _measured(quality.split(","))),
    )


def _measured(files: list[str]) -> "dict[str, Any]":
    """Runs of whole techniques, and what widths of single layers lose.

    Raises
    ------
    InputError
        If a file is neither, or two are of layers.
    """
    from kvsim.files import read_json
    from kvsim.files.kinds import ATTENTION
    from kvsim.planner.bits import offered
    from kvsim.quality import layers
    from kvsim.quality.measured import with_own
    from kvsim.traces import attentionfile

    given = {file: read_json(Path(file), ATTENTION) for file in files}
    single = [file for file in files if layers.is_one(given[file])]
    if len(single) > 1:
        raise InputError(f"--quality: {single[0]} and {single[1]} both hold layers; give one")
    found: dict[str, Any] = {}
    if len(files) > len(single):
        own = [file for file in files if file not in single]
        found["runs"] = with_own([attentionfile.of(given[file], Path(file)) for file in own])
    if single:
        losses = layers.of(given[single[0]], Path(single[0]))
        found |= {"layered": offered(losses), "layered_for": losses.model}
    return found


def largest_loss(max_loss: str | None, lossy: bool) -> float:
    """Relative loss of quality that may be known of a setting."""
    if max_loss is not None:
        return number("--max-loss", max_loss, share=True)
    return KNOWN_BAD if lossy else 0.0
