"""Parsers of option values, given as text or as Python objects, with checks of ranges."""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

from kvsim.errors import InputError

MAX_NUMBER = 1e9
"""Largest number of an option without a range of its own."""

WHOLE_PATTERN = re.compile(r"\s*+-?[0-9]{1,18}\s*+")
TIME_PATTERN = re.compile(r"\s*+([0-9.]++(?:[eE][+-]?[0-9]++)?)\s*+(?:(us|ms|s|min)\s*+)?")
SECONDS_PER_SUFFIX = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
TOKENS_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)([kKmM])\s*")
TOKEN_UNITS = {"k": 1_000, "K": 1_024, "m": 1_000_000, "M": 1_048_576}  # as vLLM reads them


@dataclass(frozen=True, slots=True)
class Range:
    """The range of numbers that an option accepts.

    Attributes
    ----------
    least, most
        Smallest and largest value.
    unit
        Unit of the number, for messages.
    whole
        Whether the number must be whole.
    """

    least: float
    most: float
    unit: str = ""
    whole: bool = True

    @property
    def words(self) -> str:
        """The range for a message, as ``a whole number from 1 to 8``."""
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {format_plain(self.least)} to {format_plain(self.most)}"

    def check(self, name: str, value: float, got: str = "") -> None:
        """Refuse a number outside the range.

        Parameters
        ----------
        name
            Name of the option, for messages.
        value
            The number.
        got
            The value as the user gave it, if it is not the number itself.

        Raises
        ------
        InputError
            If the number is out of range; the message names the option, the value and the range.
        """
        holds = self.least <= value <= self.most and (not self.whole or value == int(value))
        if not holds:
            unit = f" [{self.unit}]" if self.unit else ""
            shown = got[:40] or format(value, ".15g")
            raise InputError(f"{name}: got {shown}; expected {self.words}{unit}")


def format_plain(value: float, digits: int = 4) -> str:
    """Format a number for people: whole and large ones with commas, others with few digits.

    Parameters
    ----------
    value
        The number.
    digits
        Significant digits of the others.

    Examples
    --------
    >>> format_plain(1_041.3, 3), format_plain(0.04567, 3)
    ('1,041', '0.0457')
    """
    whole = value == int(value) or abs(value) >= 10**digits - 0.5
    return f"{value:,.0f}" if whole and abs(value) < 1e12 else f"{value:.{digits}g}"


Parser = Callable[[str, object, Range | None], object]
"""Turns what was given for an option (its name, the value, its range) into the value meant."""


def parse_flag(name: str, given: object, allowed: Range | None = None) -> bool:
    """Parse a flag, which Python gives as True or False.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    bool
        The value.

    Raises
    ------
    InputError
        If it is not True or False.
    """
    if not isinstance(given, bool):
        raise InputError(f"{name}: got {_quote(given)}; expected True or False")
    return given


def parse_text(name: str, given: object, allowed: Range | None = None) -> str:
    """Parse one text; a path or a number becomes its text.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    str
        The text.

    Raises
    ------
    InputError
        If it is neither text, a path nor a number.
    """
    if not isinstance(given, str | Path | int | float) or isinstance(given, bool):
        raise InputError(f"{name}: got {_quote(given)}; expected text")
    return str(given)


def parse_model(name: str, given: object, allowed: Range | None = None) -> object:
    """Parse a model: its name or path, or from Python the fields of its ``config.json``.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    str or dict
        Name or path of the model, or the fields of its configuration.

    Raises
    ------
    InputError
        If it is none of these.
    """
    config = getattr(given, "config", given)  # of a kvsim.Model
    return dict(config) if isinstance(config, Mapping) else parse_text(name, given)


def parse_path(name: str, given: object, allowed: Range | None = None) -> Path:
    """Parse the path of a file or folder.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    Path
        The path.

    Raises
    ------
    InputError
        If it is not a path.
    """
    return Path(parse_text(name, given))


def parse_paths(name: str, given: object, allowed: Range | None = None) -> list[Path]:
    """Parse the paths of one or several files.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    list of Path
        The paths.

    Raises
    ------
    InputError
        If one of them is not a path.
    """
    return [parse_path(name, item) for item in _items(given)]


def parse_joined(name: str, given: object, allowed: Range | None = None) -> str:
    """Parse a text that may contain commas, as a technique does; several are joined by commas.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    str
        The text.

    Raises
    ------
    InputError
        If it is not text, nor several texts.
    """
    return ",".join(parse_text(name, item) for item in _items(given))


def parse_names(name: str, given: object, allowed: Range | None = None) -> list[str]:
    """Parse names or paths separated by commas.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    list of str
        The names.

    Raises
    ------
    InputError
        If they are not text.
    """
    text = parse_joined(name, given)
    return [item.strip() for item in text.split(",")] if "," in text else [text]


def parse_words(name: str, given: object, allowed: Range | None = None) -> list[str]:
    """Parse words separated by commas, in small letters, each once.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    list of str
        The words in lower case, without duplicates.

    Raises
    ------
    InputError
        If a word is empty.
    """
    text = parse_joined(name, given)
    found = [word.strip().lower() for word in text.split(",")]
    if not all(found):
        raise InputError(f"{name}: got {text[:40]!r}; expected words separated by commas")
    return list(dict.fromkeys(found))


def words_among(*known: str) -> Parser:
    """Create a parser of known words separated by commas.

    Parameters
    ----------
    *known
        The words, in lower case.

    Returns
    -------
    Parser
        Returns the list of given words, and raises ``InputError`` for any other word.
    """

    def parse(name: str, given: object, allowed: Range | None) -> list[str]:
        found = parse_words(name, given)
        for word in found:
            if word not in known:
                raise InputError(f"{name}: got {word[:40]!r}; expected one of {', '.join(known)}")
        return found

    return parse


def parse_number(name: str, given: object, allowed: Range | None = None) -> float:
    """Parse a number in the option's range, or above 0 if it has no range.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    float
        The number.

    Raises
    ------
    InputError
        If it is not a number within the range.
    """
    value = _real(given)
    if allowed is not None and value == value:
        allowed.check(name, value, repr(given))
    elif not 0 < value <= MAX_NUMBER:
        expected = allowed.words if allowed is not None else f"above 0, at most {MAX_NUMBER:g}"
        expected = expected if allowed is not None else f"a number {expected}"
        raise InputError(f"{name}: got {_quote(given)}; expected {expected}")
    return value


def parse_rate(name: str, given: object, allowed: Range | None = None) -> float:
    """Parse a rate: requests per second, or a factor on those of a trace as ``0.25x``.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    float
        The number, without a trailing x.

    Raises
    ------
    InputError
        If it is not a number within the range.
    """
    return parse_number(
        name, given.rstrip().removesuffix("x") if isinstance(given, str) else given, allowed
    )


def scaled_number(unit: float) -> Parser:
    """Create a parser of numbers in some unit.

    Parameters
    ----------
    unit
        Size of the unit in SI units.

    Returns
    -------
    Parser
        Returns the number in SI units.
    """
    return lambda name, given, allowed: parse_number(name, given, allowed) * unit


def parse_count(
    name: str, given: object, allowed: Range | None = None, alternative: str = ""
) -> int:
    """Parse one whole number in the option's range.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.
    alternative
        Other allowed values, for the message.

    Returns
    -------
    int
        The number.

    Raises
    ------
    InputError
        If it is not a whole number within the range.
    """
    value = _integer(given)
    if value is None:
        raise InputError(f"{name}: got {_quote(given)}; expected one whole number{alternative}")
    if allowed is not None:
        allowed.check(name, value)
    return value


def parse_amount(name: str, given: object, allowed: Range | None = None) -> int:
    """Parse a whole number that may be large: 1000000, 1e6, 50k or 1M.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    int
        The number.

    Raises
    ------
    InputError
        If it is not a whole number within the range.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([km]?)\s*", str(given).lower())
    if found is not None:
        value = round(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6}[found[2]], 3)
        given = int(value) if value.is_integer() else given
    return parse_count(name, given, allowed, ", such as 1000000, 1e6 or 1M")


def parse_counts(name: str, given: object, allowed: Range | None = None) -> list[int]:
    """Parse whole numbers separated by commas, or a list of them.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    list of int
        The numbers.

    Raises
    ------
    InputError
        If one of them is not a whole number within the range.
    """
    values = [_integer(item) for item in _listed(given)]
    found = [value for value in values if value is not None]
    if not values or len(found) < len(values):
        raise InputError(
            f"{name}: got {_quote(given)}; expected whole numbers separated by commas, such as 1,8"
        )
    for value in found:
        if allowed is not None:
            allowed.check(name, value)
    return found


def parse_tokens(name: str, given: object, allowed: Range | None = None) -> int:
    """Parse a number of tokens: 4096, 4k (4,000) or 4K (4,096).

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    int
        Tokens. [tokens]

    Raises
    ------
    InputError
        If it is not a whole number of tokens within the range.
    """
    found = TOKENS_PATTERN.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return parse_count(name, given, allowed, ", such as 4096, 4k (4,000) or 4K (4,096)")
    value = float(found[1]) * TOKEN_UNITS[found[2]]
    if not value.is_integer() or value > MAX_NUMBER:
        raise InputError(
            f"{name}: {found[0][:40]!r} is {value:.15g} tokens; expected a whole number"
        )
    if allowed is not None:
        allowed.check(name, value)
    return int(value)


def parse_token_counts(name: str, given: object, allowed: Range | None = None) -> list[int]:
    """Parse numbers of tokens separated by commas, as ``2048,32k``, or a list of them.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    list[int]
        Numbers of tokens. [tokens]

    Raises
    ------
    InputError
        If one of them is not a whole number within the range.
    """
    items = _listed(given)
    if not items or not all(
        _integer(x) is not None or (isinstance(x, str) and TOKENS_PATTERN.fullmatch(x))
        for x in items
    ):
        raise InputError(
            f"{name}: got {_quote(given)}; expected whole numbers separated by commas, such as "
            "2048,32k"
        )
    return [parse_tokens(name, item, allowed) for item in items]


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths of prompts or answers given as an option.

    Attributes
    ----------
    first, second
        The mean alone; the ends of a range; or the median and the 95th percentile. [tokens]
    kind
        ``mean``, ``range``, ``percentiles`` or ``sample``.
    sample
        Name of the sample trace that has such lengths.
    """

    kind: str
    first: int = 0
    second: int = 0
    sample: str = ""

    def __str__(self) -> str:
        """The lengths as an option is typed."""
        mark = {"range": "-", "percentiles": "/"}.get(self.kind, "")
        if self.sample:
            return f"sample:{self.sample}"
        return f"{self.first}{mark}{self.second}" if mark else str(self.first)


def parse_token_lengths(name: str, given: object, allowed: Range | None = None) -> TokenLengths:
    """Parse lengths: a mean, a range ``512-4096``, ``p50/p95`` as ``700/4k``, or a sample's name.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of each number.

    Raises
    ------
    InputError
        For anything else, and for a second number below the first.
    """
    if isinstance(given, TokenLengths):
        return given
    text = given.strip() if isinstance(given, str) else ""
    if text.startswith("sample:"):
        return TokenLengths("sample", sample=text.removeprefix("sample:"))
    for mark, kind in (("/", "percentiles"), ("-", "range")):
        parts = text.split(mark)
        if len(parts) == 2 and all(part.strip() for part in parts):
            low, high = (parse_tokens(name, part.strip(), allowed) for part in parts)
            if low > high:
                raise InputError(f"{name}: got {text[:40]!r}; expected the smaller number first")
            return TokenLengths(kind, low, high)
    found = TOKENS_PATTERN.fullmatch(text)
    if found is None and _integer(given) is None:
        expected = (
            "a whole number as 2048 or 4k, a range as 512-4096, p50/p95 as 700/4k, or sample:chat"
        )
        raise InputError(f"{name}: got {_quote(given)}; expected {expected}")
    return TokenLengths("mean", parse_tokens(name, given, allowed))


def duration(most_bare: float) -> Parser:
    """Create a parser of times such as 500ms, 2s or 0.5; "none" means no limit.

    Parameters
    ----------
    most_bare
        Largest number that is accepted without a unit: a larger one may be meant in milliseconds.
        [s]

    Returns
    -------
    Parser
        Returns the time, infinite for "none" [s]; raises ``InputError`` for anything else.
    """

    def parse(name: str, given: object, allowed: Range | None) -> float:
        if isinstance(given, str):
            if given.strip().lower() == "none":
                return float("inf")
            found = TIME_PATTERN.fullmatch(given)
            value, unit = _real(found[1]) if found else float("nan"), found[2] if found else None
            plain = found[1] if found else ""
        else:
            value, unit, plain = _real(given), None, f"{given}"
            if value == float("inf"):
                return value
        if unit is None and value > most_bare:
            got = f"{name}: got {str(given)[:40]!r}"
            raise InputError(f"{got} without a unit; write {plain}ms or {plain}s")
        value *= SECONDS_PER_SUFFIX[unit or "s"]
        if not 0 < value <= MAX_NUMBER:
            raise InputError(
                f"{name}: got {str(given)[:40]!r}; expected a time above 0 with its unit, such as "
                f"500ms or 2s, or none for no limit"
            )
        if allowed is not None:
            allowed.check(name, value, repr(given))
        return value

    return parse


def zero_or(parser: Parser) -> Parser:
    """Create a parser that accepts 0 even if it is outside the option's range.

    Parameters
    ----------
    parser
        Parser of all other values.

    Returns
    -------
    Parser
        Parser that returns 0.0, or the result of ``parser``.
    """
    return lambda name, given, allowed: (
        0.0 if given == "0" or given == 0 else parser(name, given, allowed)
    )


def auto_or(parser: Callable[..., object]) -> Parser:
    """Create a parser that also accepts the word "auto".

    Parameters
    ----------
    parser
        Parser of all other values.

    Returns
    -------
    Parser
        Parser that returns None for "auto", else the result of ``parser``.
    """
    return lambda name, given, allowed: (
        None if given == "auto" else parser(name, given, allowed, ", or auto")
    )


def count_or(*words: str) -> Parser:
    """Create a parser of whole numbers that also accepts some words.

    Parameters
    ----------
    *words
        The words.

    Returns
    -------
    Parser
        Returns a word unchanged, and a number as an integer; raises ``InputError`` for anything
        else.
    """

    def parse(name: str, given: object, allowed: Range | None) -> object:
        if given in words:
            return given
        try:
            return parse_count(name, given, allowed)
        except InputError as error:
            raise InputError(f"{error}, or {' or '.join(words)}") from None

    return parse


def several(parser: Parser) -> Parser:
    """Create a parser of several different values separated by commas.

    Parameters
    ----------
    parser
        Parser of a single value.

    Returns
    -------
    Parser
        Parser that returns pairs of the given text and the parsed value; raises ``InputError`` if a
        value is given twice or left empty.
    """

    def parse(name: str, given: object, allowed: Range | None) -> list[tuple[object, object]]:
        items = _listed(given) if not isinstance(given, str) or "," in given else [given]
        if isinstance(given, str):
            items = [str(item).strip() for item in items] if len(items) > 1 else items
        if len(items) != 1 and ("" in items or len(set(items)) < len(items) or not items):
            raise InputError(
                f"{name}: got {_quote(given)}; expected different values, such as 0,20,50"
            )
        return [(item, parser(name, item, allowed)) for item in items]

    return parse


def parse_per_gpu(name: str, given: object, allowed: Range | None = None) -> dict[str, float]:
    """Parse numbers by GPU, as ``h100=2.5,l40s=0.8`` or a dictionary.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        Value that was given, as text or as a Python object.
    allowed
        Range of the option; None if it has none.

    Returns
    -------
    dict[str, float]
        Number by name of the GPU.

    Raises
    ------
    InputError
        If an entry is not of this form, or a GPU appears twice.
    """
    if isinstance(given, Mapping):
        return {str(gpu): parse_number(name, value, allowed) for gpu, value in given.items()}
    found: dict[str, float] = {}
    for item in parse_words(name, given):
        gpu, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"{name}: got {item[:40]!r}; expected GPU=NUMBER,... as h100=2.5")
        if gpu in found:
            raise InputError(f"{name}: {gpu} is given twice; give it once")
        found[gpu] = parse_number(name, value, allowed)
    return found


def parse_total_or_per_gpu(
    name: str, given: object, allowed: Range | None
) -> float | dict[str, float]:
    """Parse a total number, or a number for each of several GPU types.

    Parameters
    ----------
    name
        Name of the option, for messages.
    given
        A number; or numbers by GPU, as ``h100=2,l40s=4`` or a dictionary.
    allowed
        Range of each number; None for no limit.

    Returns
    -------
    float or dict
        The total, or the numbers by name of the GPU.
    """
    if isinstance(given, Mapping) or (isinstance(given, str) and "=" in given):
        return parse_per_gpu(name, given, allowed)
    return float(parse_count(name, given, allowed, " or GPU=N,..."))


PARSERS: Mapping[str, Parser] = {
    name.removeprefix("parse_").replace("_", "-"): parser
    for name, parser in tuple(vars().items())
    if name.startswith("parse_")
} | {
    "gib": scaled_number(2.0**30),
    "gigabytes": scaled_number(1e9),
    "thousands": scaled_number(1e3),
}
"""Parsers as the table of options names them."""


def find_parser(name: str) -> Parser:
    """Return the parser that a row of the table of options names.

    Parameters
    ----------
    name
        A key of :data:`PARSERS`, as ``count``, or one made of others, as ``several zero-or gib``,
        ``among auto cpu``, ``count-or all`` or ``duration 100``.
    """
    kind, _, rest = name.partition(" ")
    match kind:
        case "several":
            return several(find_parser(rest))
        case "zero-or":
            return zero_or(find_parser(rest))
        case "auto-or":
            return auto_or(find_parser(rest))
        case "among":
            return words_among(*rest.split())
        case "count-or":
            return count_or(*rest.split())
        case "duration":
            return duration(float(rest))
    return PARSERS[name]


def _items(given: object) -> list[object]:
    """One value or several as a list."""
    one = isinstance(given, str | Path) or not isinstance(given, Iterable)
    return [given] if one else list(given)  # type: ignore[call-overload]


def _listed(given: object) -> list[object]:
    """Values separated by commas, or the values of a list."""
    return list(given.split(",")) if isinstance(given, str) else _items(given)


def _integer(given: object) -> int | None:
    """The whole number given, or None."""
    if isinstance(given, str):
        return int(given) if WHOLE_PATTERN.fullmatch(given) else None
    if isinstance(given, float):
        return int(given) if given.is_integer() else None
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        return None
    return operator.index(given)


def _real(given: object) -> float:
    """The number given, or NaN."""
    if isinstance(given, bool) or (
        isinstance(given, str) and (not given.isascii() or "_" in given)
    ):
        return float("nan")
    try:
        return float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")


def _quote(given: object) -> str:
    """The given value, for a message."""
    return repr(given[:40]) if isinstance(given, str) else repr(given)[:40]
