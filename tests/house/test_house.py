"""What a reader can rely on everywhere in the package, counted in its source."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tests.support.places import ROOT

ARGUMENTS = 4  # of a compiled function, at most
WORDS = 3  # a docstring has more
COMPILED = {"njit", "jit_function", "jit_entry", "jit_unless_tiered"}
TRITON = "kvsim/validate/kernels/"
"""Triton's kernels take every pointer and stride as an argument of its own: it knows no records."""
TWINS = ("kvsim/techniques/", "kvsim/validate/")
"""A part of a technique and its real implementation share their class's name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package by its path in the repository."""
    files = sorted((ROOT / "kvsim").rglob("*.py"))
    return {p.relative_to(ROOT).as_posix(): ast.parse(p.read_text("utf-8")) for p in files}


def functions() -> Iterator[tuple[str, Function]]:
    """Every function and method with the path of its file."""
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def public(node: ast.AST) -> Iterator[Function]:
    """Functions and methods that others may call: no underscore in front of them or their class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public(child)
        elif isinstance(child, Function) and not child.name.startswith("_"):
            yield child


def parameters(function: Function) -> list[str]:
    """The names of all parameters."""
    given = function.args
    some = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [each.arg for each in some]


def test_the_whole_package_is_counted() -> None:
    assert len(sources()) > 250
    assert {"kvsim/api/__init__.py", "kvsim/cli/app.py"} <= sources().keys()
    assert any(path.startswith("kvsim/planner/") for path in sources())
    assert not [path for path in (ROOT / "kvsim").rglob("*") if path.is_symlink()]


PUBLIC = "kvsim/api/objects.py"  # whose classes are named as what they stand for


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and path != PUBLIC:
                places[node.name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    intended = {
        name
        for name, paths in twice.items()
        if len(paths) == 2
        and all(path.startswith(room) for path, room in zip(paths, TWINS, strict=True))
    }
    assert {name: paths for name, paths in twice.items() if name not in intended} == {}
    assert len(intended) > 10


def test_compiled_functions_take_at_most_four_arguments() -> None:
    found = {
        f"{path}: {function.name}": len(parameters(function))
        for path, function in functions()
        if not path.startswith(TRITON) and any(map(_compiles, function.decorator_list))
    }
    assert len(found) > 60
    assert {name: count for name, count in found.items() if count > ARGUMENTS} == {}


def test_parameters_of_public_functions_are_words() -> None:
    letters = {
        f"{path}: {function.name}({name})"
        for path, tree in sources().items()
        for function in public(tree)
        for name in parameters(function)
        if len(name) == 1 and name != "_"
    }
    assert letters == set()


def test_docstrings_say_more_than_the_name() -> None:
    short = {
        f"{path}: {getattr(node, 'name', 'the file')}: {text}"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, Documented)
        and (text := ast.get_docstring(node)) is not None
        and len(text.split()) <= WORDS
    }
    assert short == set()


def _compiles(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in COMPILED
