"""Logging: a constant event and its fields, for programs and for people."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from opticnerve_server import telemetry


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_has_one_object_a_line_with_event_and_fields() -> None:
    stream = io.StringIO()
    telemetry.set_up("engine", stream)
    logging.getLogger("a.b").info("graph captured", extra={"budget": 512, "path": "default"})
    logging.getLogger("a.b").warning("two\nlines", extra={"odd": object})
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("ts").endswith("+00:00")
    assert first == {
        "level": "info",
        "process": "engine",
        "logger": "a.b",
        "event": "graph captured",
        "budget": 512,
        "path": "default",
    }
    assert second["event"] == "two\nlines"
    assert second["odd"] == str(object)


def test_json_carries_the_traceback() -> None:
    stream = io.StringIO()
    telemetry.set_up("engine", stream)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger().exception("batch failed")
    line = json.loads(stream.getvalue())
    assert line["level"] == "error"
    assert "KeyError: 'lost'" in line["exception"]


def test_a_terminal_gets_text() -> None:
    stream = Terminal()
    telemetry.set_up("frontend-1", stream)
    logging.getLogger().info("listening", extra={"listen": "127.0.0.1:1"})
    line = stream.getvalue()
    assert not line.startswith("{")
    assert line.split(maxsplit=1)[1].split() == ["info", "frontend-1", "listening", "listen=127.0.0.1:1"]


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    telemetry.set_up("a", first)
    telemetry.set_up("b", second)
    logging.getLogger().info("once")
    logging.getLogger().debug("never")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_no_field_has_a_name_that_logging_refuses() -> None:
    """A line with such a field raises KeyError where it should be written."""
    taken = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    found = []
    for path in Path(telemetry.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "extra" and isinstance(node.value, ast.Dict):
                found += [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    assert len(found) > 20
    assert not taken & set(found)
