"""How benches take times: by the host's clock until the device is done, or by the device's own clock."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..graphs import no_collection

WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Times:
    """What many runs took, in milliseconds."""

    median: float
    mean: float
    p99: float

    @staticmethod
    def of(seconds: Iterable[float]) -> Times:
        ordered = sorted(1e3 * each for each in seconds)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return Times(statistics.median(ordered), statistics.fmean(ordered), p99)


def repeated(run: Callable[[], float], repeats: int) -> Times:
    """Times of `repeats` runs that return seconds, after WARM_UPS others."""
    for _ in range(WARM_UPS):
        run()
    return Times.of([run() for _ in range(repeats)])


def host_times(run: Callable[[], object], device: torch.device, repeats: int) -> Times:
    """Times from a call to when the device is done, by the host's clock."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what came before
    return repeated(once, repeats)


def device_ms(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median milliseconds on the device alone: of graphs, launched one behind another without waiting for any.

    A run that the device does before the host has launched it would count the launching. On a CPU the host's clock.
    """
    if device.type != "cuda":
        return host_times(run, device, repeats).median
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(WARM_UPS):
        run()
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(start.elapsed_time(end)) for start, end in pairs)


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` in a CUDA graph of its own, after one run outside of it; on a CPU `run` itself."""
    if device.type != "cuda":
        return run
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
    torch.cuda.synchronize(device)
    with no_collection(), torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize(device)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize(device)
    return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all, as libraries keep a workspace for each."""
    return torch.cuda.Stream(device)
