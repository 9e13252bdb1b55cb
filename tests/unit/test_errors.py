"""Every row of the table of failures, as the end of a call and as the end of an item."""

from __future__ import annotations

import ast
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import opticnerve_server
from opticnerve_server.errors import (
    TABLE,
    Scope,
    ServiceError,
    internal_error,
    shorten,
    to_item_failed,
    to_status,
)

# The table of the contract, written down a second time: reason -> (code, scope, typed details, whether to retry).
CONTRACT = {
    "IMAGE_INVALID": ("INVALID_ARGUMENT", "item", ["BadRequest"], False),
    "REQUEST_INVALID": ("INVALID_ARGUMENT", "call", ["BadRequest"], False),
    "ITEM_TOO_LARGE": ("INVALID_ARGUMENT", "item", ["BadRequest"], False),
    "REQUEST_TOO_LARGE": ("INVALID_ARGUMENT", "call", ["BadRequest"], False),
    "MODEL_NOT_LOADED": ("NOT_FOUND", "call", ["ResourceInfo"], False),
    "QUEUE_FULL": ("RESOURCE_EXHAUSTED", "call", ["RetryInfo", "QuotaFailure"], True),
    "LOADING": ("UNAVAILABLE", "call", ["RetryInfo"], True),
    "CAPTURING_GRAPHS": ("UNAVAILABLE", "call", ["RetryInfo"], True),
    "DRAINING": ("UNAVAILABLE", "call", ["RetryInfo"], True),
    "EXPIRED_IN_QUEUE": ("DEADLINE_EXCEEDED", "call", [], False),
    "GPU_MEMORY": ("RESOURCE_EXHAUSTED", "item", ["RetryInfo"], True),
    "GPU_FAULT": ("UNAVAILABLE", "call", ["RetryInfo"], True),
    "NON_FINITE_OUTPUT": ("DATA_LOSS", "item", [], False),
    "SLOW_READER": ("RESOURCE_EXHAUSTED", "call", [], False),
    "TOKEN_MISSING": ("UNAUTHENTICATED", "call", [], False),
    "TOKEN_INVALID": ("UNAUTHENTICATED", "call", [], False),
    "NOT_CACHED": ("NOT_FOUND", "item", ["ResourceInfo"], False),
    "FINGERPRINT_MISMATCH": ("FAILED_PRECONDITION", "call", ["PreconditionFailure"], False),
    "UNIMPLEMENTED": ("UNIMPLEMENTED", "either", [], False),
    "STORE_FULL": ("RESOURCE_EXHAUSTED", "item", ["RetryInfo"], True),
    "INTERNAL": ("INTERNAL", "either", ["RequestInfo"], False),
}


def unpacked(packed: Any) -> object:
    detail = getattr(error_details_pb2, packed.TypeName().removeprefix("google.rpc."))()
    assert packed.Unpack(detail)
    return detail


def test_the_table_has_no_other_rows() -> None:
    assert TABLE.keys() == CONTRACT.keys()


@pytest.mark.parametrize("reason", CONTRACT)
def test_row(reason: str) -> None:
    code, scope, kinds, retry = CONTRACT[reason]
    error = ServiceError(reason, "what, the limit, the remedy", subject="items[3]", metadata={"limit": 7})
    assert error.row.scope is {"item": Scope.ITEM, "call": Scope.CALL, "either": Scope.EITHER}[scope]
    assert (error.retry_after is not None) is retry

    status = to_status(error)
    assert rpc_status.to_status(status).code is getattr(grpc.StatusCode, code)
    assert status.message == "what, the limit, the remedy"
    details = [unpacked(packed) for packed in status.details]
    assert [type(detail).__name__ for detail in details] == ["ErrorInfo", *kinds]
    info = details[0]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (reason, "opticnerve", {"limit": "7"})

    failed = to_item_failed(error)
    assert (failed.code, failed.reason, dict(failed.metadata)) == (status.code, reason, {"limit": "7"})
    assert failed.message == "what, the limit, the remedy"
    assert failed.HasField("retry_after") is retry


def test_typed_details_say_what_it_is_about() -> None:
    def detail(reason: str, subject: str, **options: float) -> object:
        return unpacked(to_status(ServiceError(reason, "text", subject=subject, **options)).details[-1])  # type: ignore[arg-type]

    bad = detail("REQUEST_INVALID", "dtype")
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [("dtype", "text")]
    model, digest = detail("MODEL_NOT_LOADED", "m"), detail("NOT_CACHED", "d")
    assert isinstance(model, error_details_pb2.ResourceInfo)
    assert isinstance(digest, error_details_pb2.ResourceInfo)
    assert (model.resource_type, model.resource_name) == ("model", "m")
    assert (digest.resource_type, digest.resource_name) == ("digest", "d")
    retry = detail("GPU_MEMORY", "", retry_after=0.125)
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMicroseconds() == 125_000
    condition = detail("FINGERPRINT_MISMATCH", "fp")
    assert isinstance(condition, error_details_pb2.PreconditionFailure)
    assert (condition.violations[0].type, condition.violations[0].subject) == ("FINGERPRINT_MISMATCH", "fp")


@pytest.mark.parametrize("reason", CONTRACT)
@pytest.mark.parametrize("letter", ["a", "%", "\N{SNOWMAN}", "\n", "\N{GRINNING FACE}"])
def test_trailers_stay_small_whatever_a_caller_wrote(reason: str, letter: str) -> None:
    long = letter * 100_000
    status = to_status(ServiceError(reason, long, subject=long, metadata={"one": long, "two": long, "three": long}))
    assert status.message.isascii()
    assert status.message.isprintable()
    details = status.SerializeToString()
    assert len(details) < 4096
    assert len(details) + len(status.message.replace("%", "%25")) < 4096


def test_shorten() -> None:
    assert shorten("plain", 5) == "plain"
    assert shorten("plainer", 6) == "pla..."
    assert shorten("a\nb\N{SNOWMAN}", 20) == "a\\nb\\u2603"
    assert shorten("it's", 20) == "it's"


def test_unknown_reasons_are_refused() -> None:
    with pytest.raises(KeyError):
        ServiceError("NO_SUCH_REASON", "text")


def test_a_bug_is_an_id(caplog: pytest.LogCaptureFixture) -> None:
    error = internal_error(RuntimeError("the secret"))
    assert error.reason == "INTERNAL"
    assert error.subject in error.message
    assert "secret" not in error.message
    assert "the secret" in caplog.text
    assert caplog.records[0].error_id == error.subject  # type: ignore[attr-defined]


def test_reasons_in_the_code_are_rows() -> None:
    used = set()
    for file in Path(opticnerve_server.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ServiceError", "Failed"):
                position = 0 if node.func.id == "ServiceError" else 2  # type: ignore[attr-defined]
                reason = node.args[position] if len(node.args) > position else None
                if isinstance(reason, ast.Constant):
                    used.add(reason.value)
    assert len(used) > 5
    assert used <= TABLE.keys()
