"""The table of what must hold names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (TESTS / "ACCEPTANCE.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| # |", "| of |"))
]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_named_tests_exist() -> None:
    named = [test.split("::") for _, _, cell in ROWS for test in re.findall(r"`(.+?)`", cell)]
    assert len(named) > len(ROWS)
    assert not [(file, name) for file, name in named if name not in functions(file)]


def test_every_row_has_a_test_or_says_that_it_has_none() -> None:
    assert not [row for row in ROWS if len(row) != 3 or not ("`" in row[2] or row[2].startswith("not covered"))]
    names = [name for name, _, _ in ROWS]
    assert len(names) == len(set(names))
