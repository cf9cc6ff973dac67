"""Settings of techniques: allowed values and notation."""

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
    """Define a technique's parameter: its default, meaning with unit, and allowed values.

    Parameters
    ----------
    share : whether a number between 0 and 1 means a share of each sequence's prompt.
    gentler : 1 if larger values lose less quality, -1 if smaller ones do, 0 if unknown. A loss
        measured at one value bounds that of every gentler value.
    quiet : whether 0 is omitted when the technique is written.
    also : returns whether a text other than the choices is valid.
    """
    text += SHARE_HINT if share else ""
    about = {"text": text, "low": low, "high": high, "choices": choices, "whole": whole}
    about |= {"also": also, "share": share, "gentler": gentler, "quiet": quiet}
    return field(default=default, metadata=about)


def check(name: str, key: str, value: object, about: Mapping[str, Any]) -> None:
    """Check the value of a technique's parameter.

    Parameters
    ----------
    name : of the technique.
    key : name of the parameter.
    value : the value, or an array of them.
    about : allowed values, as stored by ``param``.

    Raises
    ------
    InputError
        If the value is not allowed. The message names the parameter, its meaning and allowed
        values.
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
            high = about["high"]
            numeric = isfinite(high) and not all(c in (True, False) for c in choices)
            *some, last = (
                map(str, choices) if choices else (f"{about['low']} to {about['high']:g}",)
            )
            one_of = f"{', '.join(some)} or {last}" if some else last
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
    """A budget of tokens for which plans try several shares of a workload's prompt or context.

    Parameters
    ----------
    shares : the shares to try.
    of : ``prompt``, or ``context`` for prompt and generated tokens together.
    unit : tokens of a block, for settings that count blocks. [tokens]
    least : smallest value of the setting.
    """

    shares: tuple[float, ...]
    of: Literal["context", "prompt"] = "context"
    unit: int = 1
    least: int = 0

    @property
    def of_each_prompt(self) -> Number:
        """The shares themselves, for requests of many lengths."""
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
    """Return an array along the first axis of a grid of settings, batches and contexts."""
    return np.array(values, dtype=float)[:, None, None]


def combine(**settings: Sequence[object]) -> tuple[Mapping[str, object], ...]:
    """Return all combinations of values of several settings; the last setting varies fastest.

    Parameters
    ----------
    settings : values by setting; a value that is a mapping sets several settings at once.
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
    """Return a value as a plain Python number or text, whole numbers without a fraction.

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
