"""The one table of failures: what a reason means to a caller, as the status of a call or the end of an item.

Everything that can go wrong in the request path is raised as a ServiceError of one reason. Texts are for people, and
leave the process: they name the item, the limit and the remedy, never a path, a class or an address.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from opticnerve.v1 import encoder_pb2 as pb

from .telemetry import CALL

DOMAIN = "opticnerve"

MAX_MESSAGE_CHARS = 600
MAX_VALUE_CHARS = 120
"""Callers' own words come back in messages. A status travels in trailers, of which gRPC refuses more than 8 to 16 KiB,
twice: as text and in the details. With these bounds it stays below 4 KiB."""

_log = logging.getLogger(__name__)


class Scope(enum.Enum):
    """What ends."""

    ITEM = "the item alone"
    CALL = "the call with all its items"
    EITHER = "the item if one item raised it, else the call"


class Detail(enum.Enum):
    """The typed detail beside ErrorInfo, each a message of google.rpc."""

    BAD_REQUEST = "BadRequest"
    RESOURCE = "ResourceInfo"
    RETRY = "RetryInfo"
    QUOTA = "QuotaFailure"
    PRECONDITION = "PreconditionFailure"
    REQUEST = "RequestInfo"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. `retry_after` is the default hint in seconds; None: the same call fails again."""

    code: int
    scope: Scope
    details: tuple[Detail, ...] = ()
    retry_after: float | None = None


_RETRY = (Detail.RETRY,)
_BAD_REQUEST = (Detail.BAD_REQUEST,)

TABLE: dict[str, Row] = {
    # Of an item as it was sent: its media, of any kind, or how it asks for them to be sampled.
    "IMAGE_INVALID": Row(code_pb2.INVALID_ARGUMENT, Scope.ITEM, _BAD_REQUEST),
    "ITEM_TOO_LARGE": Row(code_pb2.INVALID_ARGUMENT, Scope.ITEM, _BAD_REQUEST),
    "REQUEST_INVALID": Row(code_pb2.INVALID_ARGUMENT, Scope.CALL, _BAD_REQUEST),
    "REQUEST_TOO_LARGE": Row(code_pb2.INVALID_ARGUMENT, Scope.CALL, _BAD_REQUEST),
    "MODEL_NOT_LOADED": Row(code_pb2.NOT_FOUND, Scope.CALL, (Detail.RESOURCE,)),
    "FINGERPRINT_MISMATCH": Row(code_pb2.FAILED_PRECONDITION, Scope.CALL, (Detail.PRECONDITION,)),
    "QUEUE_FULL": Row(code_pb2.RESOURCE_EXHAUSTED, Scope.CALL, (Detail.RETRY, Detail.QUOTA), 1.0),
    "LOADING": Row(code_pb2.UNAVAILABLE, Scope.CALL, _RETRY, 5.0),
    "CAPTURING_GRAPHS": Row(code_pb2.UNAVAILABLE, Scope.CALL, _RETRY, 5.0),
    "DRAINING": Row(code_pb2.UNAVAILABLE, Scope.CALL, _RETRY, 0.0),
    "GPU_FAULT": Row(code_pb2.UNAVAILABLE, Scope.CALL, _RETRY, 0.0),
    "EXPIRED_IN_QUEUE": Row(code_pb2.DEADLINE_EXCEEDED, Scope.CALL),
    "GPU_MEMORY": Row(code_pb2.RESOURCE_EXHAUSTED, Scope.ITEM, _RETRY, 1.0),
    "NON_FINITE_OUTPUT": Row(code_pb2.DATA_LOSS, Scope.ITEM),
    "SLOW_READER": Row(code_pb2.RESOURCE_EXHAUSTED, Scope.CALL),
    "TOKEN_MISSING": Row(code_pb2.UNAUTHENTICATED, Scope.CALL),
    "TOKEN_INVALID": Row(code_pb2.UNAUTHENTICATED, Scope.CALL),
    "NOT_CACHED": Row(code_pb2.NOT_FOUND, Scope.ITEM, (Detail.RESOURCE,)),
    "STORE_FULL": Row(code_pb2.RESOURCE_EXHAUSTED, Scope.ITEM, _RETRY, 1.0),
    "UNIMPLEMENTED": Row(code_pb2.UNIMPLEMENTED, Scope.EITHER),
    "INTERNAL": Row(code_pb2.INTERNAL, Scope.EITHER, (Detail.REQUEST,)),
}


class ServiceError(Exception):
    """A failure as callers see it.

    `subject` says what it is about, in the words of its typed detail: the field of the request, the name of the
    resource, the exhausted quota, the id of the request. `retry_after` in seconds overrides the table. Raises KeyError
    for a reason that the table does not have.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        subject: str = "",
        retry_after: float | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self.row = TABLE[reason]
        self.reason = reason
        self.message = shorten(message, MAX_MESSAGE_CHARS)
        self.subject = shorten(subject, MAX_VALUE_CHARS)
        self.retry_after = self.row.retry_after if retry_after is None else retry_after
        self.metadata = {key: shorten(str(value), MAX_VALUE_CHARS) for key, value in (metadata or {}).items()}
        super().__init__(f"{reason}: {self.message}")


def shorten(text: str, limit: int) -> str:
    """Printable ASCII of at most `limit` characters; a longer text ends in three dots."""
    printable = "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in text[: limit + 1])
    return printable if len(printable) <= limit else printable[: limit - 3] + "..."


def internal_error(exception: BaseException) -> ServiceError:
    """What a caller learns of a bug: an id, the request's where it is known. The log has the id and the stack trace."""
    error_id = CALL.get().get("request_id") or uuid.uuid4().hex[:12]
    _log.error("internal error", extra={"error_id": error_id}, exc_info=exception)
    return ServiceError("INTERNAL", f"internal error, id={error_id}; report it with this id", subject=error_id)


def to_status(error: ServiceError) -> status_pb2.Status:
    """The status of a call that ends with `error`: ErrorInfo and the typed details of its row, under 4 KiB."""
    status = status_pb2.Status(code=error.row.code, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    for detail in (info, *(_typed_detail(kind, error) for kind in error.row.details)):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def to_item_failed(error: ServiceError) -> pb.ItemFailed:
    """The end of an item. Which one is said beside it: callers know their items by other numbers than we do."""
    return pb.ItemFailed(
        code=error.row.code,
        reason=error.reason,
        message=error.message,
        retry_after=None if error.retry_after is None else to_duration(error.retry_after),
        metadata=error.metadata,
    )


def to_duration(seconds: float) -> duration_pb2.Duration:
    """Seconds, at least 0, as the wire has them."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def _typed_detail(kind: Detail, error: ServiceError) -> Message:
    subject, text = error.subject, error.message
    detail: Message
    match kind:
        case Detail.BAD_REQUEST:
            field = error_details_pb2.BadRequest.FieldViolation(field=subject, description=text)
            detail = error_details_pb2.BadRequest(field_violations=[field])
        case Detail.RESOURCE:
            resource = "model" if error.reason == "MODEL_NOT_LOADED" else "digest"
            detail = error_details_pb2.ResourceInfo(resource_type=resource, resource_name=subject, description=text)
        case Detail.RETRY:
            detail = error_details_pb2.RetryInfo(retry_delay=to_duration(error.retry_after or 0.0))
        case Detail.QUOTA:
            quota = error_details_pb2.QuotaFailure.Violation(subject=subject, description=text)
            detail = error_details_pb2.QuotaFailure(violations=[quota])
        case Detail.PRECONDITION:
            condition = error_details_pb2.PreconditionFailure.Violation(
                type=error.reason, subject=subject, description=text
            )
            detail = error_details_pb2.PreconditionFailure(violations=[condition])
        case Detail.REQUEST:
            detail = error_details_pb2.RequestInfo(request_id=subject)
    return detail
