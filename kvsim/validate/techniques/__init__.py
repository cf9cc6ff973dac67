"""The real implementations: ``some_name.py`` runs what ``some-name`` is in ``kvsim/techniques``.

A file has the classes of its paper: a piece of one axis, several pieces, or a whole technique. A
preset whose parts all have classes runs as these, ``Composed``; what they share is in
``kvsim/validate/parts``.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from kvsim.errors import unknown
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import size
from kvsim.validate.model.decoder import Decoder, rehearsal
from kvsim.validate.parts.base import Implementation, SmallRun
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.registry import find_class
from kvsim.validate.pinned import check_host_memory, lines, planned

SettingsOf = Callable[[SmallRun], list[str]]
COMPOSITIONS: Mapping[str, SettingsOf] = {
    # by rows, and by columns with a part per sequence
    "offload": lambda run: ["", f"schedule=column,parts={run.batch}"],
    # the batch in one part, and a part per sequence
    "fastdecode": lambda run: ["parts=1", f"parts={run.batch}"] if run.batch > 1 else ["parts=1"],
    # everything on the host, and half of it: whole heads of a batch can be halved more often
    "flexgen": lambda run: [f"parts={run.batch}", "weights_gpu=50,cache_gpu=50,parts=1"],
    # budgets from three eighths of the prompt down to an eighth
    "pyramidkv": lambda run: [f"budget={4 * max(2, run.prompt // 16)},window=4,beta=2"],
}
"""Presets that run as parts alone, and settings under which they act in a small run."""


def _implementations() -> dict[str, type[Implementation]]:
    files = {module.name for module in iter_modules(__path__)}
    names = [n for n in TECHNIQUES if n in COMPOSITIONS or n.replace("-", "_") in files]
    return {name: find_class(Implementation, name) or Composed for name in names}


IMPLEMENTATIONS: Mapping[str, type[Implementation]] = _implementations()
"""How each preset that can be run is run."""


def small_settings(name: str, run: SmallRun) -> list[str]:
    """Settings under which a preset acts in a small run, as the notation writes them."""
    if name in COMPOSITIONS:
        return COMPOSITIONS[name](run)
    source = find_class(object, name) or import_module(f"{__name__}.{name.replace('-', '_')}")
    written: list[str] = source.small_settings(run)  # type: ignore[union-attr]
    return written


def check_known(techniques: Iterable[Technique]) -> None:
    """Refuse presets that cannot be run; other techniques are refused when they are made.

    Raises
    ------
    InputError
        If one has no real implementation.
    """
    for technique in techniques:
        alone = len(technique.terms) == 1 and technique.terms[0].preset
        if alone and technique.name not in IMPLEMENTATIONS:
            raise unknown("real implementation", technique.name, IMPLEMENTATIONS)


def implement(
    technique: Technique,
    decoder: Decoder,
    lengths: list[int],
    generate: int,
    kinds: Mapping[str, type[Implementation]] = IMPLEMENTATIONS,
) -> Implementation:
    """A technique with its settings on a decoder, for prompts of these lengths.

    Raises
    ------
    InputError
        If it has no real implementation, cannot run like this, or needs more host memory than is
        free.
    """
    check_known([technique])
    kind = kinds.get(technique.name, Composed)
    if decoder.device.type != "cuda":
        return kind(technique, decoder, lengths, generate)
    rehearsed = kind(technique, rehearsal(decoder), lengths, generate)
    rehearsed.close()
    homes = rehearsed.resident().get("host", {}).values()
    needed = sum(lines(size(home)) for some in homes for home in some)
    check_host_memory(needed, str(technique))
    with planned(needed):
        return kind(technique, decoder, lengths, generate)
