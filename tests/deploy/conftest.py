"""Three whole servers behind one name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet import ADDRESSES, Fleet
from opticnerve_server import cli

DRAIN = ("--drain-delay", "5")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    assert cli.main(["make-checkpoint", "--arch", "qwen3_vl", "--out", str(tmp_path / "model")]) == 0
    fleet = Fleet(tmp_path / "model", tmp_path, "--token-budgets", "64,256", "--store-bytes", "200000000", *DRAIN)
    try:
        fleet.start(*ADDRESSES)
        yield fleet
    finally:
        fleet.close()
