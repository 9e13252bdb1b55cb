"""The access log: one line a call, made of what passes the border."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Any

from opticnerve.v1 import encoder_pb2 as pb

from .auth import TENANT
from .telemetry import CALL

LINES_PER_SECOND = 100

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")  # W3C Trace Context

_log = logging.getLogger(__name__)


def identify(metadata: Mapping[str, str | bytes]) -> Mapping[str, str]:
    """What names a call, by its metadata: the caller's `x-request-id`, or one of ours where it sends none that fits
    into a line of a log (up to 128 printable characters), and the trace id of its `traceparent`, if it has one.
    """
    given, parent = metadata.get("x-request-id"), metadata.get("traceparent")
    names = {"request_id": given if isinstance(given, str) and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex}
    if isinstance(parent, str) and (match := _TRACEPARENT.fullmatch(parent)):
        names["trace_id"] = match[1]
    return names


class Access:
    """What the log will say of one call. `request` and `response` are told of every message of it."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._started = time.monotonic()
        self._items = self._tokens = 0
        self._outcomes: Counter[str] = Counter()
        self._stages: dict[str, float] = {}

    def request(self, message: Any) -> None:
        """The request: how many things it asks for."""
        self._items = len(getattr(message, "items", getattr(message, "digests", ())))

    def response(self, message: pb.EncodeResponse) -> None:
        """One answer. Of several items a stage's time is that of the slowest."""
        match message.WhichOneof("event"):
            case "started":
                self._tokens += message.started.plan.tokens
            case "failed":
                self._outcomes[message.failed.reason] += 1
            case "finished":
                self._outcomes[_outcome(message.finished)] += 1
                for field, duration in message.finished.durations.ListFields():
                    milliseconds = round(duration.ToNanoseconds() / 1e6, 3)
                    self._stages[field.name] = max(milliseconds, self._stages.get(field.name, 0.0))

    def seconds(self) -> float:
        """Since the call arrived."""
        return time.monotonic() - self._started

    def fields(self, code: str, reason: str) -> dict[str, object]:
        """The line. `reason` is that of the error table, empty where it has none."""
        return {
            "method": self.method,
            "code": code,
            "reason": reason,
            "items": self._items,
            "tokens": self._tokens,
            "outcomes": dict(self._outcomes),
            "ms": round(1000 * self.seconds(), 3),
            "stage_ms": self._stages,
            "tenant": TENANT.get(),
            **CALL.get(),
        }


def _outcome(finished: pb.ItemFinished) -> str:
    """What an item cost: `stored` nothing, `eager` a forward, `replay` a graph; `held` is not known yet."""
    if finished.store_hit:
        return "stored"
    if not finished.dispatches:
        return "held"
    eager = any(dispatch.outcome == pb.OUTCOME_EAGER for dispatch in finished.dispatches)
    return "eager" if eager else "replay"


class AccessLog:
    """Writes at most LINES_PER_SECOND lines a second; the next line behind a gap says how many were `skipped`."""

    def __init__(self) -> None:
        self._second = self._lines = self._skipped = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """One call has ended."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        if self._lines == LINES_PER_SECOND:
            self._skipped += 1
            return
        self._lines += 1
        skipped = {"skipped": self._skipped} if self._skipped else {}
        self._skipped = 0
        _log.info("call", extra={**fields, **skipped})
