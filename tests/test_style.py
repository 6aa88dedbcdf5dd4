"""Laws of the sources that no tool checks."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ddrl", "benchmarks", "dashboard", "notebooks")


def assigns_several(node: ast.AST) -> bool:
    """Whether one statement gives several names new values, other than by unpacking or a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(each) for each in target.elts} != {ast.unparse(each) for each in node.value.elts}


def test_a_statement_that_assigns_several_things_is_told_from_a_swap_and_from_unpacking():
    words = {
        "a, b = 1, 2": True,
        "a, b = b, a": False,
        "a, b = pair": False,
        "a = b, c": False,
        "x.a, y = f(), 1": True,
    }
    assert {line: assigns_several(ast.parse(line).body[0]) for line in words} == words


def test_each_line_assigns_one_thing():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and assigns_several(node)
    ]
    assert found == []
