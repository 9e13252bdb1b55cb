"""Spans of calls and batches, by OpenTelemetry: off unless a standard variable names a collector.

A front-end has a span a call, within the caller's trace if it sends one (`traceparent`), with a child for each stage of
each item. The engine has a span a batch, which belongs to no call and links to every call whose items it ran.

The standard OTEL_ variables decide all else: sampler, resource, headers, batching. The packages are imported in the
processes that `set_up` was called in while a collector is named, and nowhere else. Functions may be called from any
thread, and do nothing where tracing is off.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import __version__
from .settings import ConfigError
from .types import Dispatched

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext, Tracer

    from .dispatcher import Finished

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_OUR_FAULT = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Status codes that make a server's span an error, by the semantic conventions of RPC spans."""

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")

_log = logging.getLogger(__name__)
_tracer: Tracer | None = None


def check(environ: Mapping[str, str]) -> bool:
    """Whether traces are asked for. Raises ConfigError where they are and cannot be sent."""
    if not any(environ.get(name) for name in ENDPOINTS) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return False
    named = next(name for name in ENDPOINTS if environ.get(name))
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"traces are sent by the protocol grpc alone, not {protocol}: unset {', '.join(PROTOCOLS)}")
    if not all(map(_is_installed, _PACKAGES)):
        raise ConfigError(f"{named} asks for traces: pip install 'opticnerve[otel]' or unset it")
    return True


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even a package above it
        return False


def set_up(process: str) -> None:
    """Send the spans of this process, with its name, to the collector that the environment names, if it does.

    What is not sent yet when the process exits is sent then. Raises ConfigError, see `check`.
    """
    global _tracer
    if not check(os.environ):
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = Resource({"service.name": "opticnerve", "service.version": __version__, "opticnerve.process": process})
    provider = TracerProvider(resource=Resource.create().merge(ours).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("opticnerve", __version__)


# --- front-ends


def begin(method: str, metadata: Mapping[str, str | bytes]) -> str:
    """Start the span of a call, the current one of its task from now on; its trace id, empty where tracing is off."""
    if _tracer is None:
        return ""
    from opentelemetry import context, propagate, trace

    attributes = {"rpc.system.name": "grpc", "rpc.method": method}
    span = _tracer.start_span(method, propagate.extract(metadata), trace.SpanKind.SERVER, attributes)
    context.attach(trace.set_span_in_context(span))
    return trace.format_trace_id(span.get_span_context().trace_id)


def end(code: str, reason: str, request_id: str) -> None:
    """End the span of the current call. `code` is that of gRPC, `reason` that of the error table or empty."""
    if _tracer is None:
        return
    from opentelemetry import trace

    span = trace.get_current_span()
    span.set_attributes({"rpc.response.status_code": code, "opticnerve.request_id": request_id})
    if reason:
        span.set_attribute("opticnerve.reason", reason)
    if code in _OUR_FAULT:
        span.set_status(trace.StatusCode.ERROR, reason)
    span.end()


def item(index: int, stages: Mapping[str, tuple[float, float]], dispatches: Sequence[Dispatched]) -> None:
    """Children of the current call's span: the stages of one item by name, when each began and ended, on the clock of
    time.monotonic(). `dispatches` say how it was executed.
    """
    if _tracer is None:
        return
    at = _epoch()
    for stage, (began, ended) in stages.items():
        attributes = {"opticnerve.item": index} | (_attributes(dispatches) if stage == "execute" else {})
        _tracer.start_span(stage, attributes=attributes, start_time=at(began)).end(at(ended))


def item_failed(index: int, reason: str) -> None:
    """An event of the current call's span."""
    if _tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().add_event("item failed", {"opticnerve.item": index, "opticnerve.reason": reason})


def current() -> str:
    """The current call's span for another process, as `batch` takes it; empty where there is none to be linked to."""
    if _tracer is None:
        return ""
    from opentelemetry import trace

    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}-{span.span_id:016x}" if span.trace_flags.sampled else ""


# --- engine


def batch(finished: Finished) -> None:
    """The span of a batch that is done, its time on the device, with a link to each call that is traced."""
    calls = sorted({result.part.work.trace for result in finished.results} - {""})
    if _tracer is None or not calls:
        return
    from opentelemetry import trace

    runs = [
        Dispatched(run.path, run.outcome, run.budget, run.load.units, run.load.items, run.load.units)
        for run in finished.runs
    ]
    at, links = _epoch(), [trace.Link(_remote(call)) for call in calls]
    span = _tracer.start_span("batch", attributes=_attributes(runs), links=links, start_time=at(finished.began_at))
    span.end(at(finished.began_at + finished.execute_s))


def _remote(call: str) -> SpanContext:
    from opentelemetry import trace

    trace_id, _, span_id = call.partition("-")
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=flags)


def _attributes(dispatches: Sequence[Dispatched]) -> dict[str, Any]:
    """How each path ran, in order."""
    return {
        "opticnerve.path": [run.path for run in dispatches],
        "opticnerve.outcome": [run.outcome.value for run in dispatches],
        "opticnerve.budget": [run.budget for run in dispatches],
        "opticnerve.batch_items": [run.batch_items for run in dispatches],
        "opticnerve.batch_units": [run.batch_units for run in dispatches],
    }


def _epoch() -> Callable[[float], int]:
    """From the clock of time.monotonic() to nanoseconds since 1970, as the two clocks stand to each other now."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda seconds: offset + round(seconds * 1e9)
