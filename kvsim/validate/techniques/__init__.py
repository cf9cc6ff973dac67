"""The real implementations, found in the files of this folder.

``some_name.py`` runs what ``some-name`` is in ``kvsim/techniques``: its class of that name is a
piece of one axis, or a whole technique. A preset whose parts all have pieces runs as these,
``Composed``. Files of other names hold what implementations share.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from kvsim.errors import unknown
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import size
from kvsim.validate.homes import check_host_memory, lines, planned
from kvsim.validate.model.decoder import Decoder, rehearsal
from kvsim.validate.parts.base import Implementation, SmallRun
from kvsim.validate.parts.composed import Composed
from kvsim.validate.parts.registry import find_class


def _found() -> dict[str, type[Implementation]]:
    files = {module.name for module in iter_modules(__path__)}
    names = [name for name in TECHNIQUES if name.replace("-", "_") in files]
    return {name: find_class(Implementation, name) or Composed for name in names}


IMPLEMENTATIONS: dict[str, type[Implementation]] = _found()
"""How each preset that can be run is run."""


def small_settings(name: str, run: SmallRun) -> list[str]:
    """Settings under which a preset acts in a small run, as the notation writes them."""
    source: Any = find_class(object, name) or import_module(f"{__name__}.{name.replace('-', '_')}")
    written: list[str] = source.small_settings(run)
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
