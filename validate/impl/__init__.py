"""The real implementations, under the names their techniques have in ``kvsim.techniques``."""

from collections.abc import Iterable, Mapping

from kvsim.errors import unknown
from kvsim.techniques.base import Technique
from kvsim.validate.impl.base import Implementation
from kvsim.validate.impl.full import Full
from kvsim.validate.impl.h2o import H2o
from kvsim.validate.impl.kcache import Kcache
from kvsim.validate.impl.kivi import Kivi
from kvsim.validate.impl.kvpr import Kvpr
from kvsim.validate.impl.magicdec import Magicdec
from kvsim.validate.impl.offload import Offload
from kvsim.validate.impl.quantspec import Quantspec
from kvsim.validate.impl.snapkv import Snapkv
from kvsim.validate.impl.specache import Specache
from kvsim.validate.impl.streamingllm import Streamingllm
from kvsim.validate.impl.zipcache import Zipcache
from kvsim.validate.model.decoder import Decoder

IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    "full": Full,
    "offload": Offload,
    "kvpr": Kvpr,
    "kcache": Kcache,
    "specache": Specache,
    "zipcache": Zipcache,
    "quantspec": Quantspec,
    "magicdec": Magicdec,
    "kivi": Kivi,
    "h2o": H2o,
    "streamingllm": Streamingllm,
    "snapkv": Snapkv,
}


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
