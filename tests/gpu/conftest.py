"""What tests on a device have in common."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """On a device flash-attn-4 may be installed, and what it imports warns of itself."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"))
