"""Random faults of Python code: an operator is applied at a place that a seed chooses. Only inside functions, and only
where the fault stays in one line. A fault's place in the order of a seed depends on its own text alone, so that other
changes of the code leave the draw as it is."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tests.mutations.named import Fault

_FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


def candidates(path: Path, root: Path) -> list[Fault]:
    """Every fault that the operators can make in a file, in the order of its text."""
    text = path.read_text()
    name = str(path.relative_to(root))
    lines = [line.encode() for line in text.splitlines()]  # the parser counts columns in bytes
    faults = [
        Fault(operator, name, before.decode(), after.decode(), line)
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
        for operator, line, begin, end, text in _edits(node, lines)
        for before in (lines[line - 1],)
        for after in (before[:begin] + text.encode() + before[end:],)
    ]
    faults.sort(key=lambda fault: (fault.line, fault.name, fault.new))
    return list({text_of(fault): fault for fault in reversed(faults)}.values())[::-1]  # of equal ones the first


def text_of(fault: Fault) -> Fault:
    """A fault without its line's number, which changes with every line above it."""
    return fault._replace(line=0)


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """`count` faults of all packages; the same code and seed give the same ones, fewer are the first of more, and a
    fault stays among them while its text does, or nearly."""
    paths = sorted(path for path in root.glob("ddrl/**/*.py") if path.name != "__init__.py")
    known = [fault for path in paths for fault in candidates(path, root)]
    return sorted(known, key=lambda fault: hashlib.blake2b(repr((seed, text_of(fault))).encode()).digest())[:count]


def _edits(node: ast.AST, lines: list[bytes]) -> Iterator[tuple[str, int, int, int, str]]:
    """(operator, line from 1, first column, column after the last, new text) of each fault at this node."""

    def source(part: ast.expr) -> str:
        return lines[part.lineno - 1][part.col_offset : part.end_col_offset].decode()

    def edit(operator: str, begin: ast.expr | ast.stmt, text: str) -> Iterator[tuple[str, int, int, int, str]]:
        if begin.lineno == begin.end_lineno:
            yield operator, begin.lineno, begin.col_offset, begin.end_col_offset or 0, text

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if left.end_lineno == right.lineno:
            flipped = f" {_FLIPPED[type(operator)]} "
            yield "comparison", right.lineno, left.end_col_offset or 0, right.col_offset, flipped
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield from edit("constant", node, str(value + 1))
        case ast.Expr(value=ast.Call()):
            yield from edit("dropped call", node, "pass")
        case ast.Call(args=[first, second, *_]) if first.lineno == second.end_lineno:
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                swapped = f"{source(second)}, {source(first)}"
                begin = first.col_offset
                end = second.end_col_offset or 0
                yield "swapped arguments", first.lineno, begin, end, swapped
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from edit("negated condition", test, f"(not ({source(test)}))")
        case _:
            pass
