"""Spans: of calls in a front-end, of batches in an engine, and what a collector receives of a whole server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from frontend_harness import collect, picture, raw_item, serving
from opticnerve import Client
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import cli, tracing
from opticnerve_server.models.checkpoint import write_checkpoint
from running_server import eventually, running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "order-7"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
METHOD = "opticnerve.v1.EncoderService/Encode"
MIXED = pb.EncodeRequest(items=[raw_item(picture(16, 16)), pb.Item(encoded_image=pb.EncodedImage(data=b"no image"))])


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What a front-end in this process exports."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = {span.name: span for span in spans.get_finished_spans()}
    assert len(found) == len(spans.get_finished_spans())
    return found


def contained(inner: Any, outer: Any) -> bool:
    return outer.start_time <= inner.start_time <= inner.end_time <= outer.end_time


async def test_a_call_and_the_stages_of_its_items(spans: InMemorySpanExporter) -> None:
    before = time.time_ns()
    async with serving() as server:
        answers = await collect(server.stub.Encode(MIXED, metadata=TRACED))
        (submitted,) = server.engine.submitted
    found = named(spans)
    call = found.pop(METHOD)
    assert set(found) == {"admit", "preprocess", "queue", "execute", "copy", "stream"}
    assert call.kind is SpanKind.SERVER
    assert call.context is not None
    assert call.parent is not None
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE, PARENT)
    assert call.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
        "opticnerve.request_id": "order-7",
    }
    ((name, attributes),) = [(event.name, event.attributes) for event in call.events]
    assert (name, attributes) == ("item failed", {"opticnerve.item": 1, "opticnerve.reason": "IMAGE_INVALID"})
    assert submitted.trace == f"{TRACE}-{call.context.span_id:016x}"
    for span in found.values():
        assert span.parent == call.context
        assert span.attributes is not None
        assert span.attributes["opticnerve.item"] == 0
    assert answers[0].finished is not None
    for stage, duration in answers[0].finished.durations.ListFields():
        span = found[stage.name]
        assert span.end_time - span.start_time == pytest.approx(duration.ToNanoseconds(), abs=2)
    behind = [found[stage] for stage in ("preprocess", "queue", "execute", "copy", "stream")]
    for span, following in pairwise(behind):
        assert span.end_time == following.start_time
    assert contained(found["admit"], call)
    assert contained(found["stream"], call)
    assert before < call.start_time < call.end_time < time.time_ns()
    assert found["execute"].attributes["opticnerve.path"] == ("default",)


async def test_a_call_that_fails(spans: InMemorySpanExporter) -> None:
    async with serving(ready=False) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(server.stub.Encode(MIXED))
        await server.check()
    call = named(spans)[METHOD]  # health checks have none
    assert call.parent is None
    assert call.attributes is not None
    assert call.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert call.attributes["opticnerve.reason"] == "LOADING"
    assert call.status.status_code is StatusCode.ERROR


async def test_what_is_not_sampled_is_not_linked(spans: InMemorySpanExporter) -> None:
    async with serving() as server:
        await collect(server.stub.Encode(MIXED, metadata=UNSAMPLED))
        assert [submitted.trace for submitted in server.engine.submitted] == [""]
    assert not spans.get_finished_spans()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it: the attributes of each resource and its spans."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], Span]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            whose = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.received += [(whose, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_whole_server_sends_them_to_a_collector(tmp_path: Path) -> None:
    write_checkpoint("qwen3_vl", tmp_path / "model", 0)
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_RESOURCE_ATTRIBUTES": "zone=a"}
    try:
        with (
            running(tmp_path / "model", tmp_path, "--token-budgets", "64", **environment) as server_process,
            Client(server_process.address) as client,
        ):
            assert len(list(client.encode([picture(64, 64, seed) for seed in range(3)]))) == 3
            (line,) = eventually(lambda: [c for c in server_process.events("call") if c["method"] == "Encode"])
    finally:
        server.stop(None).wait()
    calls = {span.span_id: span for _, span in collector.received if span.name == METHOD}
    (call,) = calls.values()
    assert line["trace_id"] == call.trace_id.hex()
    batches = [(whose, span) for whose, span in collector.received if span.name == "batch"]
    for whose, span in batches:
        assert (whose["service.name"], whose["zone"], whose["opticnerve.process"]) == ("opticnerve", "a", "engine-0")
        assert [(link.trace_id, link.span_id) for link in span.links] == [(call.trace_id, call.span_id)]
        assert span.trace_id != call.trace_id
    executed = [span for _, span in collector.received if span.name == "execute"]
    assert [span.parent_span_id for span in executed] == [call.span_id] * 3
    assert 1 <= len(batches) <= 3


ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        (ASKED, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        (ASKED | {"OTEL_SDK_DISABLED": "true"}, False),
        (ASKED | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ASKED | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], asked: bool) -> None:
    assert tracing.check(environment) is asked


@pytest.mark.parametrize(
    ("variable", "value", "missing", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", False, "protocol grpc alone, not http/protobuf"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317", True, "pip install 'opticnerve[otel]'"),
    ],
)
def test_what_cannot_be_sent_stops_the_start(
    variable: str,
    value: str,
    missing: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_checkpoint("qwen3_vl", tmp_path / "model", 0)
    for name, given in (ASKED | {variable: value}).items():
        monkeypatch.setenv(name, given)
    if missing:
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert cli.main(["serve", "--model", str(tmp_path / "model")]) == 2
    assert said in capsys.readouterr().err
