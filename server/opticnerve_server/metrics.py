"""Every metric of the server, declared once. Names and labels are a contract, frozen by a test.

Each process writes its own values into files of the directory PROMETHEUS_MULTIPROC_DIR, the supervisor serves the
merged ones. prometheus_client reads that variable when it is first imported, so it is set before this module is. Where
it is not set, in unit tests, the same constants count in memory.

Label values are closed sets: the enums here and in `types.py`, gRPC's status codes, the tower's paths and budgets.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

METHODS = ("Encode", "PlanItems", "Release", "GetServerInfo")


class Result(enum.StrEnum):
    """How an item ended."""

    OK = "ok"
    INVALID = "invalid"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Stage(enum.StrEnum):
    """Where the time of an item goes, in order."""

    ADMIT = "admit"
    PREPROCESS = "preprocess"
    QUEUE = "queue"
    EXECUTE = "execute"
    COPY = "copy"
    STREAM = "stream"


class Rejection(enum.StrEnum):
    """Why a call was not let in."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    DRAINING = "draining"
    LOADING = "loading"
    AUTH = "auth"


class Lookup(enum.StrEnum):
    """What the store had for an item: its rows, the same item on its way, or nothing."""

    HIT = "hit"
    SHARED = "shared"
    MISS = "miss"


class TokenKind(enum.StrEnum):
    """What a replay computed: tokens of items, or padding up to its budget."""

    USEFUL = "useful"
    PADDING = "padding"


SECONDS = tuple(0.0005 * 2**i for i in range(15))
"""Edges of durations: 0.5 ms to 8.2 s, each twice the one before."""

ITEMS_PER_BATCH = (1, 2, 4, 8, 16, 32, 64)

REQUESTS = Counter("opticnerve_requests_total", "Calls that ended, by gRPC status code.", ["method", "code"])
REQUEST_DURATION = Histogram(
    "opticnerve_request_duration_seconds", "Time from arrival to end of a call.", ["method"], buckets=SECONDS
)
ITEMS = Counter("opticnerve_items_total", "Items that ended.", ["result"])
STAGE_DURATION = Histogram(
    "opticnerve_stage_duration_seconds", "Time of an item in a stage.", ["stage"], buckets=SECONDS
)
EMBEDDING_BYTES = Counter("opticnerve_embedding_bytes_total", "Bytes of embedding rows sent.")
REJECTED = Counter("opticnerve_rejected_total", "Calls that were not let in.", ["reason"])

QUEUE_ITEMS = Gauge("opticnerve_queue_items", "Items admitted and not finished.", multiprocess_mode="livesum")
QUEUE_TOKENS = Gauge("opticnerve_queue_tokens", "Tokens of admitted items.", multiprocess_mode="livesum")
QUEUE_BYTES = Gauge("opticnerve_queue_bytes", "Bytes reserved for admitted items.", multiprocess_mode="livesum")
INFLIGHT_ITEMS = Gauge("opticnerve_inflight_items", "Items on the device.", multiprocess_mode="livesum")

STORE_LOOKUPS = Counter("opticnerve_store_lookups_total", "Items looked up in the store.", ["result"])
STORE_ITEMS = Gauge("opticnerve_store_items", "Items whose rows are stored.", multiprocess_mode="livesum")
STORE_BYTES = Gauge("opticnerve_store_bytes", "Bytes of stored rows.", multiprocess_mode="livesum")
STORE_LEASED_BYTES = Gauge(
    "opticnerve_store_leased_bytes", "Bytes of rows under a lease, those to come included.", multiprocess_mode="livesum"
)
STORE_EVICTIONS = Counter("opticnerve_store_evictions_total", "Stored items that made room for others.")

BATCH_ITEMS = Histogram("opticnerve_batch_items", "Items in a batch.", buckets=ITEMS_PER_BATCH)
DISPATCHES = Counter(
    "opticnerve_dispatches_total",
    "Paths of batches run: hit is a replay, miss is eager.",
    ["path", "outcome", "reason"],
)
DISPATCHED_ITEMS = Counter("opticnerve_dispatched_items_total", "Items in dispatches.", ["path", "outcome"])
GRAPH_REPLAYS = Counter("opticnerve_graph_replays_total", "Replays of a captured graph.", ["path", "budget"])
GRAPH_TOKENS = Counter("opticnerve_graph_tokens_total", "Units computed by replays.", ["path", "kind"])
EXECUTE_DURATION = Histogram(
    "opticnerve_execute_duration_seconds", "Time of a dispatch on the device.", ["path", "outcome"], buckets=SECONDS
)

GRAPHS = Gauge("opticnerve_graphs", "Captured graphs.", ["path"], multiprocess_mode="livesum")
GRAPH_MEMORY_BYTES = Gauge(
    "opticnerve_graph_memory_bytes", "Device memory of captured graphs.", ["path"], multiprocess_mode="livesum"
)
CAPTURE_DURATION = Gauge(
    "opticnerve_capture_duration_seconds",
    "Time to capture all graphs of a path.",
    ["path"],
    multiprocess_mode="livesum",
)
GPU_HEARTBEAT = Gauge(
    "opticnerve_gpu_heartbeat_timestamp_seconds", "When the device last had nothing to do, or had just done it.",
    multiprocess_mode="livemax",
)  # fmt: skip

PHASE = Gauge("opticnerve_phase", "1 for the phase the server is in.", ["phase"], multiprocess_mode="livesum")
STARTUP_DURATION = Gauge(
    "opticnerve_startup_duration_seconds", "Time the start spent in a phase.", ["phase"], multiprocess_mode="livesum"
)
BUILD_INFO = Gauge("opticnerve_build_info", "1; what runs.", ["version", "torch", "cuda"], multiprocess_mode="livemax")
CONFIG_INFO = Gauge(
    "opticnerve_config_info", "1; what it serves. The revision is the fingerprint.",
    ["model", "revision", "dtype", "attention_backend"], multiprocess_mode="livemax",
)  # fmt: skip

for _result in Result:
    ITEMS.labels(_result)
for _rejection in Rejection:
    REJECTED.labels(_rejection)
for _lookup in Lookup:
    STORE_LOOKUPS.labels(_lookup)

_batch_tokens: Histogram | None = None


def batch_tokens_histogram(budgets: Iterable[int]) -> Histogram:
    """BATCH_TOKENS, opticnerve_batch_tokens: its edges are the captured budgets, so a column is a budget.

    Made once by the engine, when the budgets are known; made again, it replaces the one before.
    """
    global _batch_tokens
    if _batch_tokens is not None:
        REGISTRY.unregister(_batch_tokens)
    edges = sorted({float(budget) for budget in budgets})
    _batch_tokens = Histogram(
        "opticnerve_batch_tokens", "Units of a batch on its largest path.", buckets=edges or (1.0,)
    )
    return _batch_tokens


def merged() -> CollectorRegistry:
    """A registry that reads the files of all processes at every scrape. Needs PROMETHEUS_MULTIPROC_DIR."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that has ended; its counters stay, as counters must."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
