"""Settings of techniques: what each may be, and how it is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from itertools import product
from math import floor, isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsim.errors import InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Number

SHARE_HINT = "; between 0 and 1 a share of each prompt"


def param(
    default: object,
    text: str,
    *,
    low: float = 0,
    high: float = 1e9,
    choices: tuple[object, ...] = (),
    whole: bool = True,
    share: bool = False,
    gentler: Literal[-1, 0, 1] = 0,
    quiet: bool = False,
    also: Callable[[str], bool] | None = None,
) -> Any:
    """A technique's parameter: default, meaning with its unit, and the values it may take.

    Parameters
    ----------
    share : whether a number between 0 and 1 is a share of each sequence's prompt.
    gentler : 1 where a larger number loses less quality, -1 where a smaller one does, 0 where
        no order is stated. Evidence about a setting speaks for every gentler one.
    quiet : whether 0 is left unsaid where the technique is written.
    also : tells whether a text that is none of the choices is a value.
    """
    text += SHARE_HINT if share else ""
    about = {"text": text, "low": low, "high": high, "choices": choices, "whole": whole}
    about |= {"also": also, "share": share, "gentler": gentler, "quiet": quiet}
    return field(default=default, metadata=about)


def check(name: str, key: str, value: object, about: Mapping[str, Any]) -> None:
    """Refuse a value that a technique's parameter does not take.

    Parameters
    ----------
    name : of the technique.
    key : name of the parameter.
    value : the value, or an array of them.
    about : what the parameter takes, as ``param`` keeps it.

    Raises
    ------
    InputError
        Which names the technique, the parameter, what it may be and what it means.
    """
    choices = about["choices"]
    numbers = isinstance(value, np.ndarray) or not (choices or isinstance(value, str))
    if numbers and _valid(value, about):
        return
    text = f"{name}: {key}={value!r}"
    if isinstance(value, str) and about["also"] and about["also"](value):
        return
    if isinstance(value, str) or (choices and not isinstance(value, np.ndarray)):
        if value not in choices:
            numeric = isfinite(about["high"]) and not all(c in (True, False) for c in choices)
            one_of = ", ".join(str(c) for c in choices) or f"{about['low']} to {about['high']:g}"
            if isinstance(value, str) or not numeric or "auto" not in choices:
                raise InputError(f"{text}; expected {one_of} ({about['text']})")
        else:
            return
    if not _valid(value, about):
        kind = "a whole number" if about["whole"] else "a number"
        raise InputError(
            f"{text}; expected {kind} from {about['low']:g} to {about['high']:g} ({about['text']})"
        )


def _valid(value: Any, about: Mapping[str, Any]) -> bool:
    """Whether numbers lie in a parameter's range and are whole where they must be."""
    low, high = about["low"], about["high"]
    if about["share"] and np.any(shared := is_share(value)):
        value = np.where(shared, high, value)
    if isinstance(value, int | float):  # plans make thousands of these
        return bool(low <= value <= high and (not about["whole"] or value == floor(value)))
    numbers = np.asarray(value, dtype=float)
    valid = (numbers >= low) & (numbers <= high)  # False for NaN
    return bool(np.all(valid & (numbers == np.floor(numbers)) if about["whole"] else valid))


@frozen
class Budget:
    """A number of tokens that plans try as shares of a workload's prompt or context.

    Parameters
    ----------
    shares : of the prompt or of the context, tried one after another.
    of : what they are shares of; the context is the prompt with all that is generated.
    unit : tokens of a block, for settings that count blocks. [tokens]
    least : the setting at least.
    """

    shares: tuple[float, ...]
    of: Literal["context", "prompt"] = "context"
    unit: int = 1
    least: int = 0

    @property
    def of_each_prompt(self) -> Number:
        """The shares as they are, for requests of many lengths."""
        return make_axis(*self.shares) if len(self.shares) > 1 else self.shares[0]

    def tokens(self, prompt: int, generate: int) -> Number:
        """Return the setting for prompts and answers of given lengths.

        Parameters
        ----------
        prompt, generate : lengths of prompts and answers. [tokens]

        Returns
        -------
        float or array
            The setting; an array along the first axis for several shares. [tokens]
        """
        whole = prompt + generate if self.of == "context" else prompt
        found = np.ceil(np.ceil(self.of_each_prompt * whole) / self.unit)
        return np.maximum(found, self.least) if len(self.shares) > 1 else float(found)


def make_axis(*values: float) -> Array:
    """Return numbers along the first axis of a grid of settings, batches and contexts."""
    return np.array(values, dtype=float)[:, None, None]


def combine(**settings: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Return every combination of some values of settings; the last setting changes fastest.

    Parameters
    ----------
    settings : values by setting; values that are mappings stand for several settings at once.
    """
    found = []
    for values in product(*settings.values()):
        one: dict[str, object] = {}
        for name, value in zip(settings, values, strict=True):
            one |= value if isinstance(value, Mapping) else {name: value}
        found.append(one)
    return tuple(found)


def is_share(value: object) -> bool | NDArray[np.bool_]:
    """Return whether a number of tokens is given as a share of the prompt.

    Parameters
    ----------
    value : a number, or an array of them.

    Returns
    -------
    bool or array
        True between 0 and 1, both excluded.
    """
    if isinstance(value, int | float):
        return 0 < value < 1
    numbers = np.asarray(value, dtype=float)
    return (numbers > 0) & (numbers < 1)


def simplify(value: object) -> object:
    """Return a value as a Python number without a needless fraction.

    Parameters
    ----------
    value : a number or a text.

    Returns
    -------
    int, float or str
        Truth values are written in lower case; other values stay.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return str(value).lower() if isinstance(value, bool) else value
