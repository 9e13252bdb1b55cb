"""Sends damaged media files to a front-end: each is answered with rows or with INVALID_ARGUMENT, and nothing is lost.

python fuzz.py [COUNT [FIRST]]    COUNT files, numbers FIRST and up; prints what it saw as JSON, exits with 1 on a fault

One file in eight is a video. The front-end is a whole one, of this process; the engine behind it is a fake.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from google.rpc import code_pb2

from fake_planner import FakePlanner
from frontend_harness import Answer, Harness, collect, serving
from mutants import clips, images, mutant
from opticnerve.v1 import encoder_pb2 as pb

A_CALL = 16
THREADS = 2
TIMEOUT_S = 60.0
ROW_BYTES = FakePlanner.layout.width * 2
GROWTH_MIB = 24
"""By how much memory may grow after the first third: allocators keep what concurrent decodes have needed at most."""

LIMITS = {
    "preprocess_threads": THREADS,
    "max_image_pixels": 1 << 20,
    "max_video_frames": 64,
    "max_item_tokens": 1 << 14,
    "max_queue_bytes": 128 << 20,
}


def image_item(data: bytes) -> pb.Item:
    return pb.Item(encoded_image=pb.EncodedImage(data=data))


def video_item(data: bytes) -> pb.Item:
    return pb.Item(encoded_video=pb.EncodedVideo(data=data))


def outcome(answer: Answer) -> str:
    """What became of an item. Raises AssertionError for what must not."""
    if answer.failed is not None:
        assert answer.failed.code == code_pb2.INVALID_ARGUMENT, answer.failed
        assert not answer.data
        assert 0 < len(answer.failed.message) < 1024
        return answer.failed.reason
    assert answer.started is not None
    assert answer.finished is not None
    assert len(answer.data) == answer.started.plan.tokens * ROW_BYTES > 0
    return "OK"


async def outcomes(server: Harness, items: list[pb.Item]) -> list[str]:
    answers = await collect(server.stub.Encode(pb.EncodeRequest(items=items), timeout=TIMEOUT_S))
    return [outcome(answers[index]) for index in range(len(items))]


def anonymous_mib() -> float:
    """Memory that this process alone holds; slots, which are shared, are not in it."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def workers() -> set[int | None]:
    return {thread.native_id for thread in threading.enumerate() if thread.name.startswith(("decode", "header"))}


async def fuzz(count: int, first: int) -> dict[str, Any]:
    stills, videos = images(), clips()
    seen: Counter[str] = Counter()
    memory, slowest, started = [], 0.0, time.monotonic()
    async with serving(**LIMITS) as server:
        whole = [*map(image_item, stills.values()), *map(video_item, videos.values())]
        for _ in range(3):
            assert set(await outcomes(server, whole)) == {"OK"}, "every file is taken before it is damaged"
        before = workers()
        for start in range(first, first + count, A_CALL):
            numbers = range(start, min(start + A_CALL, first + count))
            items = [video_item(mutant(videos, n)) if n % 8 == 0 else image_item(mutant(stills, n)) for n in numbers]
            began = time.monotonic()
            try:
                seen.update(await outcomes(server, items))
            except BaseException as error:
                error.add_note(f"files {numbers.start} to {numbers.stop - 1}")
                raise
            slowest = max(slowest, time.monotonic() - began)
            memory.append(anonymous_mib())
        assert before <= workers(), "a worker was lost"
        assert set(await outcomes(server, whole)) == {"OK"}
    assert seen.total() == count
    growth = max(memory) - max(memory[: len(memory) // 3 + 1])
    assert growth < GROWTH_MIB, f"memory grew by {growth:.0f} MiB: {[round(mib) for mib in memory]}"
    return {
        "files": count,
        **seen,
        "memory_mib": [round(memory[len(memory) * tenth // 10]) for tenth in range(10)] + [round(memory[-1])],
        "slowest_call_s": round(slowest, 2),
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    faulthandler.enable()
    os.environ["SVT_LOG"] = "1"  # the encoder of AV1 clips is silent but for errors
    count, first = [*map(int, sys.argv[1:]), *(1000, 0)[len(sys.argv) - 1 :]]
    print(json.dumps(asyncio.run(fuzz(count, first))))
