"""Classes of values: fields cannot be set or deleted, and the constructor is a dataclass's."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, field, replace
from functools import cached_property
from typing import Any

import pytest

import kvsim
from kvsim.frozen import frozen


@frozen
class Shape:
    """A class of values with every kind of field."""

    rows: int
    columns: int = 2
    values: list[str] = field(default_factory=list)  # as a local of the constructor was called
    note: str = field(default="", compare=False, repr=False)
    scale: float = field(kw_only=True, default=1.0)

    @cached_property
    def area(self) -> int:
        return self.rows * self.columns


@frozen
class Square(Shape):
    """Its constructor checks the fields."""

    def __post_init__(self) -> None:
        if self.rows != self.columns:
            raise ValueError("not a square")


def test_constructor_takes_positions_keywords_and_defaults() -> None:
    shape = Shape(3, 4, scale=2.0)
    assert (shape.rows, shape.columns, shape.values, shape.note, shape.scale) == (3, 4, [], "", 2.0)
    assert Shape(3).values is not Shape(3).values
    assert [*inspect.signature(Shape).parameters] == ["rows", "columns", "values", "note", "scale"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rows'"):
        Shape()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Shape(1, 2, [], "", 1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="not a square"):
        Square(1, 2)


def test_fields_cannot_be_set_or_deleted() -> None:
    shape = Square(2)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'rows' of Square"):
        shape.rows = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'other'"):
        shape.other = 3  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'rows'"):
        del shape.rows
    assert shape == Square(2)


def test_copies_and_cached_properties_work() -> None:
    shape = Shape(3, 4, note="first")
    assert shape.area == 12
    assert replace(shape, rows=5).area == 20
    for same in (copy.copy(shape), copy.deepcopy(shape), pickle.loads(pickle.dumps(shape))):
        assert same == shape
    assert shape == Shape(3, 4, note="second") != Shape(3, 5)
    assert repr(shape) == "Shape(rows=3, columns=4, values=[], scale=1.0)"


def test_a_prediction_and_a_plan_cannot_be_changed() -> None:
    predicted: Any = kvsim.predict("llama2-7b", "a6000").found
    planned: Any = kvsim.plan(
        "llama2-7b", "a6000", offline=True, prompt=1024, generate=8, only="full"
    ).found
    for deployment in (predicted[0].deployment, planned.choice.deployment):
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'tp' of Deployment"):
            deployment.tp = 8
        assert deployment.tp == deployment.gpus == 1


def test_a_field_may_have_any_name() -> None:
    @frozen
    class Named:
        values: int
        names: int
        lines: int
        _factory: int

    made = Named(1, 2, 3, 4)
    assert (made.values, made.names, made.lines, made._factory) == (1, 2, 3, 4)
