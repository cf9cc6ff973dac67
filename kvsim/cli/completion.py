"""Values that the shell completes: models, GPUs, techniques, formats, stacks and samples."""

from collections.abc import Callable, Iterable

Known = Callable[[str], Iterable[str]]
"""Gives what a value may be from the part of it that was typed."""


def _models(typed: str) -> Iterable[str]:
    from kvsim.models.catalogue import model_names, names_in_use

    return (name for name in names_in_use() if "/" in name) if "/" in typed else model_names()


def _gpus(typed: str) -> Iterable[str]:
    from kvsim.machines.profiles import hardware_names

    return hardware_names()


def _stacks(typed: str) -> Iterable[str]:
    from kvsim.machines.profiles import stack_names

    return stack_names()


def _techniques(typed: str) -> Iterable[str]:
    from kvsim.techniques import TECHNIQUES

    return TECHNIQUES


def _weights(typed: str) -> Iterable[str]:
    from kvsim.machines.deployment import WEIGHT_FORMATS

    return ("released", *WEIGHT_FORMATS)


def _traces(typed: str) -> Iterable[str]:
    from kvsim.traces.source import SAMPLE, samples

    return (SAMPLE + name for name in samples())


def _engines(typed: str) -> Iterable[str]:
    from kvsim.emit.engines import WRITERS

    return WRITERS


KNOWN: dict[str, Known] = {
    "model": _models,
    "gpu": _gpus,
    "gpus": _gpus,
    "stack": _stacks,
    "technique": _techniques,
    "techniques": _techniques,
    "only": _techniques,
    "without": _techniques,
    "compare": _techniques,
    "weights": _weights,
    "trace": _traces,
    "emit": _engines,
}
"""What is known, by option."""

NAMED: dict[str, Known] = {
    "models": _models,
    "gpus": _gpus,
    "techniques": _techniques,
    "stacks": _stacks,
}
"""The same for the lists, which take a name alone."""


def values(command: str, option: str) -> Callable[[str], list[str]] | None:
    """Return what completes an option; None where nothing is known about it.

    Parameters
    ----------
    command
        The command, as ``plan``.
    option
        Its keyword, as ``model``.

    Returns
    -------
    callable
        Completes what was typed; of several values separated by commas, the last.
    """
    known = NAMED.get(command) if option == "name" else KNOWN.get(option)
    if known is None:
        return None

    def complete(incomplete: str) -> list[str]:
        before, comma, typed = incomplete.rpartition(",")
        found = (name for name in known(typed) if name.lower().startswith(typed.lower()))
        return [f"{before}{comma}{name}" for name in found]

    return complete
