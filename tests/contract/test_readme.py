"""The README's tree is the real one: every module is in it, and everything in it exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNNAMED = {"__init__.py"}


def tree() -> dict[str, set[str]]:
    """Modules and packages under each heading of the README's tree."""
    text = (ROOT / "README.md").read_text()
    block = next(block for block in text.split("```")[1::2] if block.startswith("\nproto/"))
    named: dict[str, set[str]] = {}
    heading = ""
    for line in block.strip("\n").splitlines():
        if not line.startswith(" "):
            heading = line.split()[0]
            named[heading] = set()
            continue
        for word in line.split():
            if not re.fullmatch(r"[a-z_0-9]+(\.py|/)", word):
                break
            named[heading].add(word)
    return named


@pytest.mark.parametrize("heading", ["client/opticnerve/", "server/opticnerve_server/"])
def test_the_tree_names_every_module_and_nothing_else(heading: str) -> None:
    modules = {path.name for path in (ROOT / heading).glob("*.py")}
    packages = {f"{path.parent.name}/" for path in (ROOT / heading).glob("*/__init__.py")}
    assert tree()[heading] == (modules | packages) - UNNAMED


def test_every_heading_exists() -> None:
    for heading in tree():
        assert (ROOT / heading).exists(), heading
