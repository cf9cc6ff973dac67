"""kvsim's frozen dataclasses behave as the standard library's do, and mix with them."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import numpy as np
import pytest

from kvsim.frozen import dataclass

Decorator = Callable[..., Any]


def made(decorator: Decorator, below: Decorator) -> tuple[Any, Any, Any]:
    """A class, one that inherits from it, and one with a single field."""

    @decorator(frozen=True)
    class First:
        one: int
        several: list[int] = field(default_factory=list, compare=False)
        name: str = field(default="a", kw_only=True, repr=False)

        def __post_init__(self) -> None:
            if self.one < 0:
                raise ValueError("one")

    @below(frozen=True)
    class Second(First):
        more: tuple[int, ...] = ()

        def __repr__(self) -> str:
            return "own"

    @decorator(frozen=True)
    class Alone:
        only: Any

    return First, Second, Alone


@pytest.mark.parametrize("below", [dataclass, dataclasses.dataclass])
@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_as_the_standard_librarys(decorator: Decorator, below: Decorator) -> None:
    found, wanted = made(decorator, below), made(dataclasses.dataclass, dataclasses.dataclass)
    for own, other in zip(found, wanted, strict=True):
        assert str(inspect.signature(own)) == str(inspect.signature(other))
        assert own.__match_args__ == other.__match_args__
    for (first, second, alone), _ in ((found, 0), (wanted, 1)):
        assert first(1) == first(1, [2]) != first(2)
        assert hash(first(1)) == hash(first(1, [2]))
        assert first(1) != first(1, name="b")
        assert first(1) != second(1) == second(1, more=())
        assert repr(first(1)).endswith("First(one=1, several=[])")
        assert repr(second(1)) == "own"
        assert dataclasses.replace(second(1), more=(3,)).more == (3,)
        assert dataclasses.asdict(first(1)) == {"one": 1, "several": [], "name": "a"}
        assert copy.deepcopy(second(1)) == second(1)
        assert first(1).several is not first(1).several
        same = alone(np.ones(2)).only
        assert alone(same) == alone(same)
        with pytest.raises(ValueError, match="one"):
            first(-1)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'one'"):
            second()
        for instance in (first(1), second(1)):
            with pytest.raises(FrozenInstanceError):
                instance.one = 2
            with pytest.raises(FrozenInstanceError):
                del instance.one


@dataclass(frozen=True)
class Sent:
    """A class that pickle finds."""

    one: int


def test_goes_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Sent(1))) == Sent(1)


def test_what_is_not_frozen_is_no_base() -> None:
    @dataclass
    class Loose:
        one: int

    Loose(1).one = 2
    with pytest.raises(TypeError, match="non-frozen"):

        @dataclass(frozen=True)
        class Firm(Loose):  # type: ignore[misc]
            two: int
