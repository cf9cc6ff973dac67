"""The real implementations: ``some_name.py`` runs the technique ``some-name``.

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
    """Check that presets have a real implementation; other techniques are checked when they are set
    up.

    Raises
    ------
    InputError
        If one of them has none.
    """
    for technique in techniques:
        alone = len(technique.terms) == 1 and technique.terms[0].preset
        if alone and technique.name not in IMPLEMENTATIONS:
            raise unknown("real implementation", technique.name, IMPLEMENTATIONS)


def implement(
    technique: Technique,
    decoder: Decoder,
    prompts: tuple[int, int],
    generate: int,
    kind: type[Composed] = Composed,
) -> Composed:
    """Set up a technique on a decoder.

    Parameters
    ----------
    prompts
        Number of prompts, and tokens of each.
    kind
        Class that runs it: ``Composed``, or a subclass that also records something.

    Raises
    ------
    InputError
        If it has no real implementation, cannot run with these settings, or needs more host memory
        than is free.
    """
    check_known([technique])
    if decoder.device.type != "cuda":
        return kind(technique, decoder, prompts, generate)
    rehearsed = kind(technique, rehearsal(decoder), prompts, generate)
    rehearsed.shutdown()
    homes = rehearsed.resident().get("host", {}).values()
    needed = sum(lines(size(home)) for some in homes for home in some)
    check_host_memory(needed, str(technique))
    with planned(needed):
        return kind(technique, decoder, prompts, generate)
