"""The two ways a command can end without an answer.

Every message is one line and says what is wrong, where, what was expected and how to mend it.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

EXTRAS = {
    "pyarrow": ("traces", "sweeps, Parquet files and zstd"),
    "pandas": ("frames", "data frames"),
    "gguf": ("gguf", "GGUF files"),
    "torch": ("validate", "calibrate and validate"),
}
"""Packages that a plain installation lacks: the extra that has each, and what needs it."""


NEAR = 0.55
"""Likeness, from 0 to 1, from which a name is suggested instead of an unknown one."""
MAX_NAMES = 40  # of which an error lists the first


class InputError(ValueError):
    """Invalid user input; the command line prints it and exits with 2."""


class InfeasibleError(Exception):
    """No feasible answer within the user's limits; the command line prints it and exits with 1."""


def first_line(problem: BaseException, most: int) -> str:
    """Return the first line of another library's error, or its class name if it has no message.

    Parameters
    ----------
    problem
        The error.
    most
        Longest text returned. [characters]
    """
    return next(iter(str(problem).splitlines()), type(problem).__name__)[:most]


def missing_dependency(package: str | None) -> InputError | None:
    """Create the error that says how to install an optional package.

    Parameters
    ----------
    package
        Name of the module that could not be imported.

    Returns
    -------
    InputError | None
        None for a package that is not optional.
    """
    name = (package or "").partition(".")[0]
    if name not in EXTRAS:
        return None
    extra, uses = EXTRAS[name]
    return InputError(f"{uses} need {name}, not installed; pip install 'kvsim[{extra}]'")


def require(*packages: str) -> None:
    """Check that optional packages are installed, before anything is written.

    Raises
    ------
    InputError
        Naming the first package and what to install.
    """
    for package in packages:
        problem = missing_dependency(package)
        if problem is not None and find_spec(package) is None:
            raise problem


def unknown(kind: str, name: str, known: Iterable[str], mend: str = "") -> InputError:
    """Create the error about an unknown name, with the nearest known ones.

    Parameters
    ----------
    kind
        Kind of the name, such as "model".
    name
        The unknown name.
    known
        All known names.
    mend
        A further hint for the user.
    """
    names = sorted(known)
    plain = {_squeeze(each): each for each in names}
    near = [plain[each] for each in get_close_matches(_squeeze(name), plain, n=3, cutoff=NEAR)]
    hint = (
        f"known: {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else "none is known"
    )
    if near or len(names) > MAX_NAMES:
        hint = f"nearest: {', '.join(near)}" if near else "no known name is similar"
    return InputError(f"unknown {kind} {name[:80]!r}; {hint}{'; ' + mend if mend else ''}")


def _squeeze(name: str) -> str:
    """A name in lower case without separators."""
    return re.sub("[-_ .]", "", name.lower())
