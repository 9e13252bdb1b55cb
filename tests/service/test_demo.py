"""`make demo`: the first command that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def test_the_demo_encodes_a_photograph_and_finds_its_rows_equal_to_an_eager_forward() -> None:
    command = [sys.executable, str(DEMO / "demo.py"), str(DEMO / "cat.png")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("encoded 1 items: 1 hits, 0 misses, max error ")
