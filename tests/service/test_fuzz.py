"""A thousand damaged files through a front-end: rows or a clear refusal, flat memory, no worker lost. See fuzz.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[1] / "fuzz.py"
FILES = 1000


def test_damaged_files_are_rows_or_refusals() -> None:
    run = subprocess.run([sys.executable, FUZZ, str(FILES)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    seen = json.loads(run.stdout)
    print(seen)
    assert seen["files"] == FILES
    assert seen["OK"] > FILES // 10
    assert seen["IMAGE_INVALID"] > FILES // 10
