"""Logging of every process: a constant event and its fields, as one JSON object a line or, on a terminal, for people.

Code logs through the standard library: `logging.getLogger(__name__).info("graph captured", extra={"budget": 512})`. The
message is the event and never varies; what varies is in `extra`. Lines of a call carry the fields of CALL besides.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


CALL: ContextVar[Mapping[str, str]] = ContextVar("call", default=MappingProxyType({}))
"""What names the call that is being answered: `request_id`, and `trace_id` if the caller traces."""


def set_up(process: str, stream: TextIO | None = None) -> None:
    """Send the log of this process to `stream` (default: standard output), every line with the process's name.

    Replaces an earlier set-up. Warnings of the `warnings` module are logged too.
    """
    stream = stream or sys.stdout
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter(process) if stream.isatty() else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller put in `extra`, and what names the call."""
    return {**CALL.get(), **{name: value for name, value in vars(record).items() if name not in _STANDARD}}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, process, event, the fields, and the traceback as `exception`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "ts": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    """`12:00:00 info    engine  graph captured budget=512`, a traceback below it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = f"{time} {record.levelname.lower():7} {self.process:11} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
