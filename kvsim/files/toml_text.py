"""Tables as TOML text."""

from collections.abc import Mapping


def toml_lines(entries: Mapping[str, object], quoted: bool = False) -> str:
    """A table's entries: texts, numbers, flags, lists of texts; ``quoted`` keys may have dots."""
    return "".join(
        f'"{key}" = {_toml(value)}\n' if quoted else f"{key} = {_toml(value)}\n"
        for key, value in entries.items()
    )


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{"".join(c if c.isprintable() else " " for c in escaped)}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
