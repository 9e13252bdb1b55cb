"""What can go wrong, as one tree; every reason of the server has a class of its own.

    OpticnerveError
    |-- ProtocolError                   the answer breaks the wire contract
    |   `-- ChecksumError               the rows that arrived are not the rows that were sent
    `-- ServerError                     the server refused; `index` is the item, None the whole call
        |-- InvalidArgumentError        the request must change
        |   |-- RequestInvalidError     REQUEST_INVALID
        |   |-- RequestTooLargeError    REQUEST_TOO_LARGE, or more bytes than the server takes in one request
        |   |-- ImageInvalidError       IMAGE_INVALID
        |   `-- ItemTooLargeError       ITEM_TOO_LARGE
        |-- NotFoundError               the server does not have it
        |   |-- ModelNotLoadedError     MODEL_NOT_LOADED
        |   `-- NotCachedError          NOT_CACHED
        |-- FingerprintMismatchError    FINGERPRINT_MISMATCH
        |-- UnauthenticatedError        TOKEN_MISSING, TOKEN_INVALID
        |-- ResourceExhaustedError      the server has no room
        |   |-- QueueFullError          QUEUE_FULL
        |   |-- GpuMemoryError          GPU_MEMORY
        |   |-- StoreFullError          STORE_FULL
        |   `-- SlowReaderError         SLOW_READER
        |-- UnavailableError            no server is ready, or the connection broke
        |   |-- LoadingError            LOADING
        |   |-- CapturingGraphsError    CAPTURING_GRAPHS
        |   |-- DrainingError           DRAINING
        |   `-- GpuFaultError           GPU_FAULT
        |-- DeadlineExceededError       the time was up
        |   `-- ExpiredInQueueError     EXPIRED_IN_QUEUE
        |-- NonFiniteOutputError        NON_FINITE_OUTPUT
        |-- UnimplementedError          UNIMPLEMENTED
        `-- InternalError               INTERNAL

Mistakes that need no server to be seen (an image of the wrong type, an unknown dtype) are ValueError and TypeError.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.rpc import code_pb2, error_details_pb2, status_pb2

from opticnerve.v1 import encoder_pb2 as pb


class OpticnerveError(Exception):
    """Anything that this package raises about a call."""


class ProtocolError(OpticnerveError):
    """The answer breaks the wire contract: a bug of the server, or of something between."""


class ChecksumError(ProtocolError):
    """The CRC-32 of the rows that arrived differs from the one that the server sent."""


class ServerError(OpticnerveError):
    """The server refused the call or one item of it.

    Attributes:
        message: sentence for people.
        code: name of the gRPC status code, such as "INVALID_ARGUMENT".
        reason: constant for programs, such as "IMAGE_INVALID"; "" when gRPC itself ended the call.
        retry_after: seconds after which a retry makes sense; None when the server named none.
        metadata: values for programs, such as the limit that was exceeded.
        index: position of the item in the caller's list; None when the whole call failed.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        index: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.retry_after = retry_after
        self.metadata = dict(metadata or {})
        self.index = index

    def __str__(self) -> str:
        item = "" if self.index is None else f"item {self.index}: "
        return f"{item}{self.message} ({self.reason or self.code})"


class InvalidArgumentError(ServerError):
    """The request must change before it can succeed."""


class RequestInvalidError(InvalidArgumentError):
    """The request breaks a rule of the wire contract."""


class RequestTooLargeError(InvalidArgumentError):
    """The request has more bytes or needs more room than the server ever grants one call: send fewer items."""


class ImageInvalidError(InvalidArgumentError):
    """The item cannot be taken as it is: bytes that are no image or video that the server decodes, too many pixels,
    or a sampling that its video or the model has no answer to."""


class ItemTooLargeError(InvalidArgumentError):
    """The item needs more tokens than the server runs."""


class NotFoundError(ServerError):
    """The server does not have what the request names."""


class ModelNotLoadedError(NotFoundError):
    """The server serves another model."""


class NotCachedError(NotFoundError):
    """The server does not hold this digest: send the media."""


class FingerprintMismatchError(ServerError):
    """The server's embeddings do not fit the decoder that expects this fingerprint."""


class UnauthenticatedError(ServerError):
    """The token is missing or wrong."""


class ResourceExhaustedError(ServerError):
    """The server has no room, or the request is larger than it reads."""


class QueueFullError(ResourceExhaustedError):
    """The server's queue is full; the client has already retried for as long as the deadline allows."""


class GpuMemoryError(ResourceExhaustedError):
    """The device ran out of memory on this item; one retry may help."""


class StoreFullError(ResourceExhaustedError):
    """The server cannot hold one more embedding."""


class SlowReaderError(ResourceExhaustedError):
    """The caller took the rows too slowly."""


class UnavailableError(ServerError):
    """No server is ready, or the connection broke more often than the client resends."""


class LoadingError(UnavailableError):
    """The server is reading its model."""


class CapturingGraphsError(UnavailableError):
    """The server is capturing its graphs."""


class DrainingError(UnavailableError):
    """The server is about to stop."""


class GpuFaultError(UnavailableError):
    """The server's device broke, or does not compute at present."""


class DeadlineExceededError(ServerError):
    """The time was up. The message names the server's phase when no server was ready."""


class ExpiredInQueueError(DeadlineExceededError):
    """The time was up before the device took the item."""


class NonFiniteOutputError(ServerError):
    """The embedding holds NaN or infinity, or does not fit float16."""


class UnimplementedError(ServerError):
    """The wire contract names it, this server does not do it."""


class InternalError(ServerError):
    """A bug of the server; its log has the details."""


_BY_REASON: dict[str, type[ServerError]] = {
    "REQUEST_INVALID": RequestInvalidError,
    "REQUEST_TOO_LARGE": RequestTooLargeError,
    "IMAGE_INVALID": ImageInvalidError,
    "ITEM_TOO_LARGE": ItemTooLargeError,
    "MODEL_NOT_LOADED": ModelNotLoadedError,
    "NOT_CACHED": NotCachedError,
    "FINGERPRINT_MISMATCH": FingerprintMismatchError,
    "TOKEN_MISSING": UnauthenticatedError,
    "TOKEN_INVALID": UnauthenticatedError,
    "QUEUE_FULL": QueueFullError,
    "GPU_MEMORY": GpuMemoryError,
    "STORE_FULL": StoreFullError,
    "SLOW_READER": SlowReaderError,
    "LOADING": LoadingError,
    "CAPTURING_GRAPHS": CapturingGraphsError,
    "DRAINING": DrainingError,
    "GPU_FAULT": GpuFaultError,
    "EXPIRED_IN_QUEUE": ExpiredInQueueError,
    "NON_FINITE_OUTPUT": NonFiniteOutputError,
    "UNIMPLEMENTED": UnimplementedError,
    "INTERNAL": InternalError,
}

# For errors that gRPC raises itself, and for reasons that are newer than this client.
_BY_CODE: dict[str, type[ServerError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "UNIMPLEMENTED": UnimplementedError,
    "INTERNAL": InternalError,
}


def from_status(status: status_pb2.Status) -> ServerError:
    """The error of a whole call, from the google.rpc.Status that ended it."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after = None
    for detail in status.details:
        if detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
        detail.Unpack(info)  # leaves `info` alone when the detail is of another type
    return _error(status.code, info.reason, status.message, retry_after, info.metadata, None)


def from_item(failed: pb.ItemFailed, index: int) -> ServerError:
    """The error of the item at `index` of the caller's list."""
    retry_after = failed.retry_after.ToNanoseconds() / 1e9 if failed.HasField("retry_after") else None
    return _error(failed.code, failed.reason, failed.message, retry_after, failed.metadata, index)


def _error(
    number: int,
    reason: str,
    message: str,
    retry_after: float | None,
    metadata: Mapping[str, str],
    index: int | None,
) -> ServerError:
    code = code_pb2.Code.Name(number) if number in code_pb2.Code.values() else "UNKNOWN"
    leaf = _BY_REASON.get(reason) or _BY_CODE.get(code) or ServerError
    return leaf(message, code=code, reason=reason, retry_after=retry_after, metadata=metadata, index=index)
