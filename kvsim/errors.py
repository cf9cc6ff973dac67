"""The two ways a command can end without an answer.

Every message is one line and says what is wrong, where, what was expected and how to mend it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """What the user gave cannot be used; the command line prints it and exits with 2."""


class InfeasibleError(Exception):
    """Nothing meets the limits the user set; the command line prints it and exits with 1."""


def brief(problem: BaseException, most: int) -> str:
    """The first line of another library's error, or its class name where it has no message."""
    return next(iter(str(problem).splitlines()), type(problem).__name__)[:most]


def unknown(kind: str, name: str, known: Iterable[str], mend: str = "") -> InputError:
    """An unknown name, with the nearest known ones."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    hint = f"nearest: {', '.join(near)}" if near else f"known: {some or 'none'}"
    return InputError(f"unknown {kind} {name[:80]!r}; {hint}{'; ' + mend if mend else ''}")
