"""Settings collected while an engine's text is written, and text that shells and parsers read back.

Every word of a command goes through :func:`shlex.quote`, every value of a file or a call through
the writer of its format: a name may hold spaces, quotes, ``$( )`` or line breaks.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import TypeAlias, Union

from kvsim.emit.flags import Flag, find_flag
from kvsim.frozen import frozen

BREAK = "\0"
"""Between the options of a command until its layout is chosen; no argument can hold it."""
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*(:/[\w./-]*)?", re.ASCII)
RESERVED = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
"""Words that YAML 1.1 or 1.2 does not read as text."""
UNPRINTABLE = re.compile("[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""What YAML takes for line breaks, or not at all; JSON has escapes for what is below."""

Setting = str | int | float | bool
Yaml: TypeAlias = Union[  # noqa: UP007 - refers to itself
    Setting, Mapping[str, "Yaml"], Sequence[Union[Setting, Mapping[str, "Yaml"]]]  # noqa: UP007
]


@frozen
class Emitted:
    """Settings to paste.

    Attributes
    ----------
    engine
        Name of the engine.
    text
        Files and commands, one option per line.
    line
        The same with each command on one line.
    flags
        Flags that it holds.
    missing
        What the engine has no setting for, in words.
    """

    engine: str
    text: str
    line: str
    flags: tuple[Flag, ...]
    missing: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command alone; where it reads a file, with the option that writes both."""
        *file, command = self.line.splitlines() or [""]
        return f"{command} (`--emit {self.engine}` writes its file)" if file else command


@dataclass
class EngineSettings:
    """Options, flags and gaps of an engine as its text is written.

    Attributes
    ----------
    engine
        Name of the engine.
    options
        Options of its command with their values, in order.
    used
        Flags that were written.
    missing
        What the engine has no setting for, in words.
    """

    engine: str
    options: list[tuple[str, str]] = field(default_factory=list)
    used: list[Flag] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def use(self, *names: str) -> None:
        """Note flags that are written outside the command; refuse unknown ones."""
        self.used += [find_flag(self.engine, name) for name in names]

    def add(self, name: str, value: object = "") -> None:
        """Add an option to the command; without a value, a switch.

        Parameters
        ----------
        name
            Option, such as ``--max-model-len``.
        value
            Its value; empty for a switch.
        """
        self.use(name)
        self.options.append((name, str(value)))

    def lack(self, what: str) -> None:
        """Note something that the engine has no setting for.

        Parameters
        ----------
        what
            What is missing, in words.
        """
        self.missing.append(what)

    def command(self, *words: str) -> str:
        """Return the command that begins with ``words``, with the options added so far."""
        return write_command(words, self.options)

    def finish(self, text: str) -> Emitted:
        """Return the finished text with its flags and gaps.

        Parameters
        ----------
        text
            Text with marks where a long command may break.

        Returns
        -------
        Emitted
            Text laid out in lines, and its command in one line.
        """
        laid_out, line = text.replace(BREAK, " \\\n  "), text.replace(BREAK, " ")
        return Emitted(self.engine, laid_out, line, tuple(self.used), tuple(self.missing))


def write_path(name: str) -> str:
    """Return a path that no command takes for an option: ``-x`` becomes ``./-x``.

    Parameters
    ----------
    name
        File, folder or repository.

    Returns
    -------
    str
        The path.
    """
    return f"./{name}" if name.startswith("-") else name


def write_command(words: tuple[str, ...], options: list[tuple[str, str]]) -> str:
    """Return a quoted command; an empty value makes an option a switch.

    Parameters
    ----------
    words
        Words that the command begins with.
    options
        Options and their values.

    Returns
    -------
    str
        Command with marks where it may break.
    """
    parts = [shlex.join(words)]
    parts += [shlex.join([name, value] if value else [name]) for name, value in options]
    return BREAK.join(parts)


def write_yaml(settings: Mapping[str, Yaml]) -> str:
    """Return settings as YAML, with mappings and lists in them indented.

    Parameters
    ----------
    settings
        Keys with values, or with mappings and lists of them.

    Returns
    -------
    str
        Lines of YAML.
    """
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines += [f"{key}:", indent(write_yaml(value), "  ")]
        elif isinstance(value, str | int | float):
            lines.append(f"{key}: {_yaml_scalar(value)}")
        else:
            lines.append(f"{key}:")
            for item in value:
                text = write_yaml(item) if isinstance(item, Mapping) else _yaml_scalar(item)
                lines.append("- " + indent(text, "  ")[2:])
    return "\n".join(lines)


def _yaml_scalar(value: Setting) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) or (PLAIN.fullmatch(value) and value.lower() not in RESERVED):
        return str(value)
    # a YAML string in double quotes has JSON's escapes, and takes fewer characters as they are
    text = json.dumps(value, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_python(value: Setting | Mapping[str, Setting]) -> str:
    """Return a value as Python source, strings in double quotes where they hold none.

    Parameters
    ----------
    value
        Value to write.

    Returns
    -------
    str
        Expression.
    """
    if isinstance(value, Mapping):
        inner = (f"{write_python(key)}: {write_python(x)}" for key, x in value.items())
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr("'" + value)[2:]  # repr takes double quotes where there is a single one
    return repr(value)
