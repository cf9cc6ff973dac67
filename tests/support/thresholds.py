"""Numbers that the bodies of modules state: constants, defaults of fields and of parameters.

``python -m tests.support.thresholds`` writes ``tests/robust/thresholds.txt`` anew.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "tests" / "robust" / "thresholds.txt"
ROOMS = ("engine", "prediction", "techniques", "serving", "planner", "planner/fleet")


def lines() -> list[str]:
    """``module: name = value``, in the order of modules and of what they say."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / "kvsim" / room).glob("*.py")):
            name = f"{room}/{path.stem}".replace("/", ".")
            module = import_module(f"kvsim.{name}")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [f"{name}: {label} = {value}" for label, value in _stated(module, tree)]
    return found


def _stated(module: ModuleType, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                yield from _number(name.id, getattr(module, name.id, None))
        elif isinstance(node, ast.FunctionDef):
            yield from _parameters(node.name, getattr(module, node.name))
        elif isinstance(node, ast.ClassDef):
            kind = getattr(module, node.name)
            if is_dataclass(kind):
                for field in fields(kind):
                    yield from _number(f"{node.name}.{field.name}", field.default)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.decorator_list:
                    yield from _parameters(f"{node.name}.{inner.name}", vars(kind)[inner.name])


def _parameters(label: str, function: Any) -> Iterator[tuple[str, str]]:
    if inspect.isfunction(function):
        for name, parameter in inspect.signature(function).parameters.items():
            yield from _number(f"{label}({name})", parameter.default)


def _number(label: str, value: Any) -> Iterator[tuple[str, str]]:
    """A number, or a plain collection with one in it."""
    if isinstance(value, bool | str) or not isinstance(value, int | float | tuple | list | dict):
        return
    text = repr(value)
    if any(letter.isdigit() for letter in text) and " at 0x" not in text and len(text) < 1000:
        yield label, text


if __name__ == "__main__":
    PLACE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
