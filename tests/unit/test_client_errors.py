"""Errors: one class for each reason, and the tree that the module draws is the tree that it defines."""

from __future__ import annotations

import pickle
import re

import grpc
import pytest

from fake_service import Abort, FakeService, serving
from opticnerve import AsyncClient, errors
from opticnerve.v1 import encoder_pb2 as pb

# Reason, code, class: the table of failures that the server answers with.
REASONS = [
    ("IMAGE_INVALID", "INVALID_ARGUMENT", errors.ImageInvalidError),
    ("REQUEST_INVALID", "INVALID_ARGUMENT", errors.RequestInvalidError),
    ("ITEM_TOO_LARGE", "INVALID_ARGUMENT", errors.ItemTooLargeError),
    ("REQUEST_TOO_LARGE", "INVALID_ARGUMENT", errors.RequestTooLargeError),
    ("MODEL_NOT_LOADED", "NOT_FOUND", errors.ModelNotLoadedError),
    ("NOT_CACHED", "NOT_FOUND", errors.NotCachedError),
    ("FINGERPRINT_MISMATCH", "FAILED_PRECONDITION", errors.FingerprintMismatchError),
    ("TOKEN_MISSING", "UNAUTHENTICATED", errors.UnauthenticatedError),
    ("TOKEN_INVALID", "UNAUTHENTICATED", errors.UnauthenticatedError),
    ("QUEUE_FULL", "RESOURCE_EXHAUSTED", errors.QueueFullError),
    ("GPU_MEMORY", "RESOURCE_EXHAUSTED", errors.GpuMemoryError),
    ("STORE_FULL", "RESOURCE_EXHAUSTED", errors.StoreFullError),
    ("SLOW_READER", "RESOURCE_EXHAUSTED", errors.SlowReaderError),
    ("LOADING", "UNAVAILABLE", errors.LoadingError),
    ("CAPTURING_GRAPHS", "UNAVAILABLE", errors.CapturingGraphsError),
    ("DRAINING", "UNAVAILABLE", errors.DrainingError),
    ("GPU_FAULT", "UNAVAILABLE", errors.GpuFaultError),
    ("EXPIRED_IN_QUEUE", "DEADLINE_EXCEEDED", errors.ExpiredInQueueError),
    ("NON_FINITE_OUTPUT", "DATA_LOSS", errors.NonFiniteOutputError),
    ("UNIMPLEMENTED", "UNIMPLEMENTED", errors.UnimplementedError),
    ("INTERNAL", "INTERNAL", errors.InternalError),
]


@pytest.mark.parametrize(("reason", "code", "leaf"), REASONS)
def test_each_reason_has_its_class_for_calls_and_items(reason: str, code: str, leaf: type[errors.ServerError]) -> None:
    status_code = grpc.StatusCode[code]
    abort = Abort(status_code, reason, "the limit is 7", retry_after=1.5, metadata={"limit": "7"})
    call = errors.from_status(abort.status())
    item = errors.from_item(pb.ItemFailed(code=status_code.value[0], reason=reason, message="the limit is 7"), index=4)
    for error in (call, item):
        assert type(error) is leaf
        assert (error.code, error.reason, error.message) == (code, reason, "the limit is 7")
    assert (call.retry_after, call.metadata, call.index) == (1.5, {"limit": "7"}, None)
    assert (item.retry_after, item.metadata, item.index) == (None, {}, 4)
    assert str(call) == f"the limit is 7 ({reason})"
    assert str(item) == f"item 4: the limit is 7 ({reason})"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("INVALID_ARGUMENT", errors.InvalidArgumentError),
        ("NOT_FOUND", errors.NotFoundError),
        ("RESOURCE_EXHAUSTED", errors.ResourceExhaustedError),
        ("UNAVAILABLE", errors.UnavailableError),
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError),
        ("PERMISSION_DENIED", errors.ServerError),
    ],
)
@pytest.mark.parametrize("reason", ["", "NEWER_THAN_THIS_CLIENT"])
def test_without_a_known_reason_the_code_decides(code: str, expected: type[errors.ServerError], reason: str) -> None:
    error = errors.from_status(Abort(grpc.StatusCode[code], reason).status())
    assert type(error) is expected
    assert error.code == code


def test_a_code_that_grpc_does_not_have_is_unknown() -> None:
    error = errors.from_item(pb.ItemFailed(code=99, message="odd"), index=0)
    assert (type(error), error.code) == (errors.ServerError, "UNKNOWN")


def test_errors_survive_pickling() -> None:
    error = errors.QueueFullError("full", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", retry_after=2.0, index=1)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.QueueFullError
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


async def test_details_that_contradict_the_status_are_a_protocol_error() -> None:
    class Contradiction(FakeService):
        async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> None:
            details = Abort(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_LOADED").status().SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", details),))
            await context.abort(grpc.StatusCode.INTERNAL, "other")

    async with serving(Contradiction()) as address, AsyncClient(address, timeout=10) as client:
        with pytest.raises(errors.ProtocolError, match="failed with INTERNAL, its details cannot be read"):
            await client.info()


def test_the_docstring_draws_the_tree() -> None:
    drawn: dict[str, str] = {}
    ancestors: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ((?:\|   |    )*(?:[|`]-- )?)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            ancestors = [*ancestors[:depth], match[2]]
            drawn[match[2]] = ancestors[-2] if depth else "Exception"
    defined = {
        name: value.__base__.__name__
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__base__
    }
    assert drawn == defined
    assert len(drawn) > 25
