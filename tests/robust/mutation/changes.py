"""Every small change of a module, by two generators that share no change.

``symbols`` changes an operator, a comparison, a constant or a sign. ``logic`` turns conditions
round, takes the other arm, drops a term, exchanges arguments and scales constants.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "*",
    ast.Pow: "*", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==",
}  # fmt: skip

OTHERS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
Piece = tuple[int, int, int, str]


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes
    ----------
    path
        The module.
    line
        Where the change is.
    name
        The module, the change and the line of source: what stays when other lines move.
    source
        The whole changed module.
    """

    path: Path
    line: int
    name: str
    source: str

    @property
    def text(self) -> str:
        """The line of source before the change."""
        return self.path.read_text(encoding="utf-8").splitlines()[self.line - 1].strip()


def plant(path: Path, qualified: str) -> Mutant | None:
    """Return the change that makes a function raise at its first line, if that can be written.

    Parameters
    ----------
    qualified
        Name of the function in its module, as in ``Timeline.play``.
    """
    content = path.read_text(encoding="utf-8")
    node: ast.AST | None = ast.parse(content)
    for name in qualified.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        inside = [x for x in getattr(node, "body", ()) if isinstance(x, kinds) and x.name == name]
        node = inside[0] if len(inside) == 1 else None
    if not isinstance(node, ast.FunctionDef) or not isinstance(
        node.body[0], ast.Expr | ast.Assign | ast.Return
    ):
        return None
    lines = content.splitlines(keepends=True)
    first = node.body[0]
    line = lines[first.lineno - 1]
    if line[: first.col_offset].strip():  # on the line of the def
        return None
    raised = 'raise AssertionError("planted"); '  # on the same line, so that no other moves
    lines[first.lineno - 1] = line[: first.col_offset] + raised + line[first.col_offset :]
    place = path.relative_to(ROOT).as_posix()
    return Mutant(path, first.lineno, f"{place}: planted in {qualified}", "".join(lines))


def mutants(path: Path, generator: str = "symbols") -> Iterator[Mutant]:
    """Every change of one module by one of GENERATORS."""
    content = path.read_bytes()
    lines = content.decode().splitlines()
    seen: Counter[str] = Counter()
    for line, first, last, piece in sorted(GENERATORS[generator](content)):
        before = content[first:last].decode()
        place = path.relative_to(ROOT).as_posix()
        name = f"{place}: {before!r} -> {piece!r} in {lines[line - 1].strip()}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"
        made = (content[:first] + piece.encode() + content[last:]).decode()
        yield Mutant(path, line, name, made)


def drawn(paths: list[Path], count: int, seed: int) -> list[Mutant]:
    """Some mutants of files by both generators; a change elsewhere draws no others."""
    both = (_drawn(paths, generator, count, seed) for generator in GENERATORS)
    return [mutant for pair in zip_longest(*both) for mutant in pair if mutant][:count]


def _drawn(paths: list[Path], generator: str, count: int, seed: int) -> list[Mutant]:
    every: Iterable[Mutant] = (m for path in paths for m in mutants(path, generator))

    def chance(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    return sorted(every, key=chance)[:count]


class _Source:
    """A module's expressions, but for annotations and texts, and where they are in its bytes."""

    def __init__(self, content: bytes) -> None:
        self.starts = [0]
        for line in content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        tree = ast.parse(content)
        skipped = _types(tree)
        for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
            skipped |= {(n.lineno, n.col_offset) for n in ast.walk(text) if isinstance(n, ast.expr)}
        self.expressions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.expr) and (node.lineno, node.col_offset) not in skipped
        ]

    def begin(self, node: ast.expr) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset


def _symbols(content: bytes) -> Iterator[Piece]:
    """Line, first and last byte of each piece of source that is changed, and into what."""
    source = _Source(content)
    begin, end = source.begin, source.end
    for node in source.expressions:
        if isinstance(node, ast.BinOp | ast.Compare):
            left, right = (
                (node.left, node.right)
                if isinstance(node, ast.BinOp)
                else (node.left, node.comparators[0])
            )
            kind = type(node.op if isinstance(node, ast.BinOp) else node.ops[0])
            between = content[end(left) : begin(right)].decode()
            symbol = between.strip(" ()\n")
            if kind in SWAPS and symbol and "\n" not in between and " " not in symbol:
                piece = between.replace(symbol, SWAPS[kind], 1)
                yield node.lineno, end(left), begin(right), piece
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            assert isinstance(node.value, int | float)
            yield node.lineno, begin(node), end(node), repr(node.value + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node.lineno, begin(node), begin(node) + 1, "+"


def _logic(content: bytes) -> Iterator[Piece]:
    """The same of changes that leave no operator as it was, or take another way."""
    source = _Source(content)

    def text(node: ast.expr) -> str:
        return f"({content[source.begin(node) : source.end(node)].decode()})"

    for node in source.expressions:
        if node.lineno != node.end_lineno:  # texts of several lines would move others
            continue
        pieces: list[str] = []
        match node:
            case ast.BoolOp(op=op, values=values):
                pieces = [(" and " if isinstance(op, ast.Or) else " or ").join(map(text, values))]
            case ast.IfExp(test=test, body=body, orelse=other):
                pieces = [f"{text(other)} if {text(test)} else {text(body)}"]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                pieces = [text(operand)]
            case ast.BinOp(
                left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right
            ):
                pieces = [text(left), text(right)]
            case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]):
                pieces = [f"not {text(node)}"]
            case ast.Call(func=called, args=[_, *_]) if _name(called) in OTHERS:
                end = content[source.end(called) : source.end(node)].decode()
                before = text(called)[1 : -1 - len(_name(called))]
                pieces = [before + OTHERS[_name(called)] + end]
            case ast.Call(args=[first, second, *rest], keywords=[]) if not any(
                isinstance(one, ast.Starred) for one in node.args
            ):
                words = ", ".join(text(one)[1:-1] for one in (second, first, *rest))
                pieces = [f"{text(node.func)[1:-1]}({words})"]
            case ast.Constant(value=float() as value) if value:
                pieces = [repr(value * 1.5)]
        for piece in pieces:
            yield node.lineno, source.begin(node), source.end(node), f"({piece})"


GENERATORS = {"symbols": _symbols, "logic": _logic}


def _name(called: ast.expr) -> str:
    """The last word of what is called."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _types(tree: ast.AST) -> set[tuple[int, int]]:
    """Places that are no arithmetic: annotations and their literals."""
    found: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.AST):
                for inner in ast.walk(annotation):
                    found.add((getattr(inner, "lineno", 0), getattr(inner, "col_offset", 0)))
    return found
