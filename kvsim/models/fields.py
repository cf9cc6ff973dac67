"""Fields of a ``config.json``, checked as they are read."""

from collections.abc import Mapping

from kvsim.errors import InputError

LARGEST = 10**9  # no dimension of a model comes near it


class FieldError(InputError):
    """An invalid field of a configuration."""

    def __init__(self, message: str, field: str, prefix: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.prefix = prefix


class Fields:
    """A configuration whose fields are checked as they are read; null counts as missing."""

    def __init__(self, config: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.values = {key: value for key, value in config.items() if value is not None}
        self.where = where
        self.prefix = prefix

    def with_defaults(self, defaults: Mapping[str, object]) -> "Fields":
        """Copy the configuration with defaults for missing fields.

        Parameters
        ----------
        defaults
            Values by name of the field.

        Returns
        -------
        Fields
            The copy.
        """
        return Fields({**defaults, **self.values}, self.where, self.prefix)

    def error(self, field: str, problem: str, mend: str = "correct it") -> FieldError:
        """Create the error about one field.

        Parameters
        ----------
        field
            Name of the field.
        problem
            The problem.
        mend
            The remedy.

        Returns
        -------
        FieldError
            The error, to be raised.
        """
        message = f"{self.where}: field '{self.prefix}{field}' {problem}; {mend}"
        return FieldError(message, field, self.prefix)

    def integer(
        self, *names: str, default: int | None = None, low: int = 1, high: int = LARGEST
    ) -> int:
        """Read an integer that may have different names in different families.

        Parameters
        ----------
        *names
            Names of the field; the first one that is present is read.
        default
            Value of a missing field; None if it must be present.
        low, high
            Smallest and largest value allowed.

        Returns
        -------
        int
            The value.

        Raises
        ------
        FieldError
            If the field is missing, not an integer, or out of range.
        """
        expected = f"a whole number from {low} to {high}"
        name = next((name for name in names if name in self.values), None)
        if name is None:
            if default is None:
                raise self.error(names[0], f"is missing, expected {expected}", "add it")
            return default
        value = self.values[name]
        # bool is an int to Python, but true is no size
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"is {value_text(value)}, expected {expected}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Read a field that is true or false.

        Parameters
        ----------
        name
            Name of the field.
        default
            Value of a missing field.

        Returns
        -------
        bool
            The value.

        Raises
        ------
        FieldError
            If it is neither true nor false.
        """
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value_text(value)}, expected true or false")
        return value

    def must(self, name: str, value: bool, why: str) -> None:
        """Refuse a variant that :class:`Model` does not describe.

        Parameters
        ----------
        name
            Name of a field that is true or false.
        value
            Value of the variant that is supported, which is also that of a missing field.
        why
            Why the other value is not supported, for the message.

        Raises
        ------
        FieldError
            If the field has the other value.
        """
        if self.flag(name, value) is not value:
            problem = (
                f"is {value_text(not value).lower()}, expected {value_text(value).lower()}: {why}"
            )
            raise self.error(name, problem, "choose another model")


def value_text(value: object) -> str:
    """Format a value for a message, shortened and in one line.

    Parameters
    ----------
    value
        The value.

    Returns
    -------
    str
        Its representation, of at most 63 characters.
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
