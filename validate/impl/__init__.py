"""The real implementations, found in the files of this folder.

``some_name.py`` runs the technique ``some-name``: its class of that name is the implementation.
Files of other names hold what implementations share.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from kvsim.errors import unknown
from kvsim.techniques import TECHNIQUES
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation
from kvsim.validate.model.decoder import Decoder


def _found() -> dict[str, type[Implementation]]:
    files = {module.name for module in iter_modules(__path__)}
    return {name: _class(name) for name in TECHNIQUES if name.replace("-", "_") in files}


def _class(name: str) -> type[Implementation]:
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    kinds = {key.lower(): kind for key, kind in vars(module).items() if isinstance(kind, type)}
    found = kinds[name.replace("-", "")]
    assert issubclass(found, Implementation)
    return found


IMPLEMENTATIONS: dict[str, type[Implementation]] = _found()


def check_known(techniques: Iterable[Technique]) -> None:
    """Refuse techniques that cannot be run.

    Raises
    ------
    InputError
        If one has no real implementation.
    """
    for technique in techniques:
        if technique.name not in IMPLEMENTATIONS:
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
        If it has no real implementation, or cannot run like this.
    """
    check_known([technique])
    return kinds[technique.name](technique, decoder, lengths, generate)
