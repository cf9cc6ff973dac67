"""Options that give a number per GPU, as h100=2.5,l40s=0.8."""

from kvsim.cli.arguments import number, words
from kvsim.errors import InputError, unknown


def per_gpu(name: str, text: str, gpus: list[str]) -> dict[str, float]:
    """A number above 0 for some of the GPUs.

    Raises
    ------
    InputError
        If it is not of that form, or names a GPU that is not asked about.
    """
    found: dict[str, float] = {}
    for item in words(name, text):
        gpu, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"{name}: got {item[:40]!r}; expected GPU=NUMBER,... as h100=2.5")
        if gpu not in gpus:
            raise unknown(f"GPU in {name}:", gpu, gpus, "name one of --gpus")
        if gpu in found:
            raise InputError(f"{name}: {gpu} is there twice; give it once")
        found[gpu] = number(name, value)
    return found
