"""The real implementations: ``some_name.py`` runs what ``some-name`` is in ``kvsim/techniques``.

A file has the classes of its paper: a piece of one axis, or several. ``parts.composed`` puts them
together; what they share is in ``kvsim/validate/parts``.
"""

from collections.abc import Iterable

from kvsim.errors import unknown
from kvsim.techniques.technique import Technique
from kvsim.validate.counter import size
from kvsim.validate.model.decoder import Decoder, rehearsal
from kvsim.validate.parts.composed import Composed
from kvsim.validate.registry import IMPLEMENTATIONS
from kvsim.validate.transfer import check_host_memory, lines, planned


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
    kind: type[Composed] = Composed,
) -> Composed:
    """A technique with its settings on a decoder, for prompts of these lengths.

    Parameters
    ----------
    kind
        What runs it: ``Composed``, or a class that notes something beside it.

    Raises
    ------
    InputError
        If it has no real implementation, cannot run like this, or needs more host memory than is
        free.
    """
    check_known([technique])
    if decoder.device.type != "cuda":
        return kind(technique, decoder, lengths, generate)
    rehearsed = kind(technique, rehearsal(decoder), lengths, generate)
    rehearsed.shutdown()
    homes = rehearsed.resident().get("host", {}).values()
    needed = sum(lines(size(home)) for some in homes for home in some)
    check_host_memory(needed, str(technique))
    with planned(needed):
        return kind(technique, decoder, lengths, generate)
