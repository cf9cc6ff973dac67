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
            What is wrong with it.
        mend
            What the user can do.
        """
        message = f"{self.where}: field '{self.prefix}{field}' {problem}; {mend}"
        return FieldError(message, field, self.prefix)

    def integer(
        self, *names: str, default: int | None = None, low: int = 1, high: int = LARGEST
    ) -> int:
        """Read a positive integer under the first of several names that is present.

        Parameters
        ----------
        default
            Value of a field that is left out; None if it must be there.
        low
            Smallest value allowed.
        high
            Largest value allowed.
        *names
            Names that the field has in different families.
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
            Value of a field that is left out.
        """
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value_text(value)}, expected true or false")
        return value

    def must(self, name: str, value: bool, why: str) -> None:
        """Refuse a variant whose arithmetic :class:`Model` does not cover.

        Parameters
        ----------
        name
            Name of the field.
        value
            The value that is covered.
        why
            The reason, for the message.
        """
        if self.flag(name, value) is not value:
            problem = (
                f"is {value_text(not value).lower()}, expected {value_text(value).lower()}: {why}"
            )
            raise self.error(name, problem, "choose another model")


def value_text(value: object) -> str:
    """Format a value from a file, short and without line breaks.

    Parameters
    ----------
    value
        The value.
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
