"""User-defined techniques: Python files that are sent to every worker with the sweep."""

import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from kvsim.errors import InputError, first_line
from kvsim.files import Kind, read_text
from kvsim.frozen import frozen
from kvsim.techniques import register_technique
from kvsim.techniques.axes.base import Term
from kvsim.techniques.notation import terms

PLUGIN = Kind("plugin", "a Python file with techniques", 1_000_000, 8)

FROZEN = "; a technique's class is @frozen, from kvsim.frozen, where it was a frozen dataclass"


@frozen
class Plugin:
    """A Python file: its path and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """Module name, derived from the text so that it is the same on every machine."""
        return f"kvsim_plugin_{sha256(self.text.encode()).hexdigest()[:16]}"


def read(paths: tuple[Path, ...]) -> tuple[Plugin, ...]:
    """Read the user's technique files.

    Parameters
    ----------
    paths
        The files.

    Returns
    -------
    tuple of Plugin
        One per file, in the same order.

    Raises
    ------
    InputError
        If one cannot be read.
    """
    return tuple(Plugin(str(path), read_text(path, PLUGIN)) for path in paths)


def install(plugins: tuple[Plugin, ...]) -> None:
    """Register the techniques of plugins, once in each process.

    Parameters
    ----------
    plugins
        The user's technique files.

    Raises
    ------
    InputError
        If a file fails, has no technique, or one of a name that is taken.
    """
    for plugin in plugins:
        if plugin.module not in sys.modules:
            _install(plugin)


def _install(plugin: Plugin) -> None:
    module = ModuleType(plugin.module)
    module.__file__ = plugin.path
    sys.modules[plugin.module] = module
    try:
        exec(compile(plugin.text, plugin.path, "exec"), module.__dict__)
    except Exception as problem:
        del sys.modules[plugin.module]
        kind = type(problem).__name__
        mend = FROZEN if "inherit frozen dataclass" in str(problem) else ""
        raise InputError(
            f"plugins: {plugin.path}: {kind}: {first_line(problem, 200)}{mend}"
        ) from None
    own = [
        found
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, Term)
        and found.__module__ == plugin.module
        and isinstance(getattr(found, "name", None), str)
    ]
    taken = [term.name for term in own if term.name in terms()]
    if not own or taken:
        del sys.modules[plugin.module]
        wrong = f"the name {taken[0]!r} is taken" if taken else "it has no technique"
        raise InputError(
            f"plugins: {plugin.path}: {wrong}; expected classes that extend Term with a name "
            f"of their own"
        )
    for term in own:
        register_technique(term)
