"""Names that users build on: flags, variables, file keys, metrics, calls.

A change here breaks somebody's deployment, dashboard or client, and belongs in CHANGELOG.md.
"""

from __future__ import annotations

import pytest
from prometheus_client.metrics import MetricWrapperBase

from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import cli, metrics
from opticnerve_server.config import Config
from opticnerve_server.settings import flag, settings_of, variable
from opticnerve_server.types import Outcome, Phase, Reason

SETTINGS = {
    "model": ("--model", "OPTICNERVE_MODEL"),
    "load_format": ("--load-format", "OPTICNERVE_LOAD_FORMAT"),
    "device": ("--device", "OPTICNERVE_DEVICE"),
    "dtype": ("--dtype", "OPTICNERVE_DTYPE"),
    "attention_backend": ("--attention-backend", "OPTICNERVE_ATTENTION_BACKEND"),
    "kernels": ("--kernels", "OPTICNERVE_KERNELS"),
    "projector": ("--projector", "OPTICNERVE_PROJECTOR"),
    "modalities": ("--modalities", "OPTICNERVE_MODALITIES"),
    "alpha_background": ("--alpha-background", "OPTICNERVE_ALPHA_BACKGROUND"),
    "listen": ("--listen", "OPTICNERVE_LISTEN"),
    "health_listen": ("--health-listen", "OPTICNERVE_HEALTH_LISTEN"),
    "metrics_listen": ("--metrics-listen", "OPTICNERVE_METRICS_LISTEN"),
    "frontends": ("--frontends", "OPTICNERVE_FRONTENDS"),
    "preprocess_threads": ("--preprocess-threads", "OPTICNERVE_PREPROCESS_THREADS"),
    "tls_cert": ("--tls-cert", "OPTICNERVE_TLS_CERT"),
    "tls_key": ("--tls-key", "OPTICNERVE_TLS_KEY"),
    "tls_client_ca": ("--tls-client-ca", "OPTICNERVE_TLS_CLIENT_CA"),
    "reflection": ("--reflection", "OPTICNERVE_REFLECTION"),
    "auth_token_file": ("--auth-token-file", "OPTICNERVE_AUTH_TOKEN_FILE"),
    "graphs": ("--graphs", "OPTICNERVE_GRAPHS"),
    "token_budgets": ("--token-budgets", "OPTICNERVE_TOKEN_BUDGETS"),
    "max_token_budget": ("--max-token-budget", "OPTICNERVE_MAX_TOKEN_BUDGET"),
    "max_items_per_batch": ("--max-items-per-batch", "OPTICNERVE_MAX_ITEMS_PER_BATCH"),
    "graph_memory_bytes": ("--graph-memory-bytes", "OPTICNERVE_GRAPH_MEMORY_BYTES"),
    "on_capture_failure": ("--on-capture-failure", "OPTICNERVE_ON_CAPTURE_FAILURE"),
    "max_queue_items": ("--max-queue-items", "OPTICNERVE_MAX_QUEUE_ITEMS"),
    "max_queue_tokens": ("--max-queue-tokens", "OPTICNERVE_MAX_QUEUE_TOKENS"),
    "max_queue_bytes": ("--max-queue-bytes", "OPTICNERVE_MAX_QUEUE_BYTES"),
    "store_bytes": ("--store-bytes", "OPTICNERVE_STORE_BYTES"),
    "max_lease": ("--max-lease", "OPTICNERVE_MAX_LEASE"),
    "advertise": ("--advertise", "OPTICNERVE_ADVERTISE"),
    "max_image_pixels": ("--max-image-pixels", "OPTICNERVE_MAX_IMAGE_PIXELS"),
    "max_video_frames": ("--max-video-frames", "OPTICNERVE_MAX_VIDEO_FRAMES"),
    "max_video_seconds": ("--max-video-seconds", "OPTICNERVE_MAX_VIDEO_SECONDS"),
    "max_item_tokens": ("--max-item-tokens", "OPTICNERVE_MAX_ITEM_TOKENS"),
    "max_request_bytes": ("--max-request-bytes", "OPTICNERVE_MAX_REQUEST_BYTES"),
    "default_timeout": ("--default-timeout", "OPTICNERVE_DEFAULT_TIMEOUT"),
    "stream_stall_timeout": ("--stream-stall-timeout", "OPTICNERVE_STREAM_STALL_TIMEOUT"),
    "startup_timeout": ("--startup-timeout", "OPTICNERVE_STARTUP_TIMEOUT"),
    "drain_delay": ("--drain-delay", "OPTICNERVE_DRAIN_DELAY"),
    "grace": ("--grace", "OPTICNERVE_GRACE"),
    "sglang_listen": ("--sglang-listen", "OPTICNERVE_SGLANG_LISTEN"),
    "sglang_grpc_listen": ("--sglang-grpc-listen", "OPTICNERVE_SGLANG_GRPC_LISTEN"),
    "sglang_version": ("--sglang-version", "OPTICNERVE_SGLANG_VERSION"),
    "sglang_receivers": ("--sglang-receivers", "OPTICNERVE_SGLANG_RECEIVERS"),
}
"""By file key."""

NEGATED = ("--no-graphs", "--no-projector", "--no-reflection")
"""Flags that turn a setting off."""

COMMANDS = {
    "serve": {"--config", "--print-config", *NEGATED},
    "check": {"--config", "--json", *NEGATED},
    "soak": {"--config", "--calls", "--minutes", "--concurrency", "--seed", *NEGATED},
    "collect-env": {"--config", "--json", *NEGATED},
    "download": {"--repository", "--revision", "--out"},
    "make-checkpoint": {"--arch", "--out", "--seed"},
}
"""The flags of each command beside those of the settings."""

METRICS = {
    "opticnerve_requests": ("counter", ("method", "code")),
    "opticnerve_request_duration_seconds": ("histogram", ("method",)),
    "opticnerve_items": ("counter", ("result",)),
    "opticnerve_stage_duration_seconds": ("histogram", ("stage",)),
    "opticnerve_queue_items": ("gauge", ()),
    "opticnerve_queue_tokens": ("gauge", ()),
    "opticnerve_queue_bytes": ("gauge", ()),
    "opticnerve_inflight_items": ("gauge", ()),
    "opticnerve_rejected": ("counter", ("reason",)),
    "opticnerve_store_lookups": ("counter", ("result",)),
    "opticnerve_store_items": ("gauge", ()),
    "opticnerve_store_bytes": ("gauge", ()),
    "opticnerve_store_leased_bytes": ("gauge", ()),
    "opticnerve_store_evictions": ("counter", ()),
    "opticnerve_batch_items": ("histogram", ()),
    "opticnerve_batch_tokens": ("histogram", ()),
    "opticnerve_dispatches": ("counter", ("path", "outcome", "reason")),
    "opticnerve_dispatched_items": ("counter", ("path", "outcome")),
    "opticnerve_graph_replays": ("counter", ("path", "budget")),
    "opticnerve_graph_tokens": ("counter", ("path", "kind")),
    "opticnerve_execute_duration_seconds": ("histogram", ("path", "outcome")),
    "opticnerve_graphs": ("gauge", ("path",)),
    "opticnerve_graph_memory_bytes": ("gauge", ("path",)),
    "opticnerve_capture_duration_seconds": ("gauge", ("path",)),
    "opticnerve_phase": ("gauge", ("phase",)),
    "opticnerve_startup_duration_seconds": ("gauge", ("phase",)),
    "opticnerve_gpu_heartbeat_timestamp_seconds": ("gauge", ()),
    "opticnerve_embedding_bytes": ("counter", ()),
    "opticnerve_build_info": ("gauge", ("version", "torch", "cuda")),
    "opticnerve_config_info": ("gauge", ("model", "revision", "dtype", "attention_backend")),
}
"""Name (a counter's samples end in _total), type, labels. """


def test_settings() -> None:
    assert {name: (flag(name), variable(name)) for name in settings_of(Config)} == SETTINGS


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    expected = set(COMMANDS[command])
    if "--config" in expected:
        expected |= {flag for flag, _ in SETTINGS.values()}
    found = {word.strip(",[]") for word in shown.split() if word.startswith(("--", "[--"))}
    assert found - {"--help"} == expected


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("opticnerve 0.")


def test_calls() -> None:
    service = pb.DESCRIPTOR.services_by_name["EncoderService"]
    assert service.full_name == "opticnerve.v1.EncoderService"
    methods = {method.name: (method.client_streaming, method.server_streaming) for method in service.methods}
    assert methods == {
        "Encode": (False, True),
        "PlanItems": (False, False),
        "Release": (False, False),
        "GetServerInfo": (False, False),
    }
    assert tuple(methods) == metrics.METHODS


def test_metric_names_types_and_labels() -> None:
    declared = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    declared.append(metrics.batch_tokens_histogram([64]))
    found = {metric._name: (metric._type, metric._labelnames) for metric in declared}
    assert found == METRICS


def test_metric_label_values() -> None:
    assert [*metrics.Result] == ["ok", "invalid", "failed", "cancelled", "expired"]
    assert [*metrics.Stage] == ["admit", "preprocess", "queue", "execute", "copy", "stream"]
    assert [*metrics.Rejection] == ["queue_full", "too_large", "draining", "loading", "auth"]
    assert [*metrics.Lookup] == ["hit", "shared", "miss"]
    assert [*metrics.TokenKind] == ["useful", "padding"]
    assert [*Outcome] == ["hit", "miss"]
    assert [*Reason] == [
        "fits",
        "too_many_tokens",
        "too_many_items",
        "too_many_segments",
        "segment_too_long",
        "not_captured",
        "disabled",
    ]
    assert [*Phase] == ["loading", "capturing", "ready", "unhealthy", "draining", "failed"]
