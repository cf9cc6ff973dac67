"""All cases together."""

from collections.abc import Iterator

from tests.robust.cases import Case, numbers, stacks
from tests.robust.readings import inputs
from tests.robust.writings import outputs


def table() -> list[Case]:
    """Every case, by a name of its own."""

    def every() -> Iterator[Case]:
        yield from inputs()
        yield from outputs()
        yield from numbers()
        yield from stacks()

    return list({case.name: case for case in every()}.values())
