"""`--sglang-listen` of a whole server, and SGLang's own receiver: the rows that our client takes of it."""

from __future__ import annotations

import base64
import io
import os
import signal
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import opticnerve
from running_server import Official, eventually
from sglang_wheel import LanguageServer, Processor
from video_files import encode


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


def png(official: Official, seed: int) -> bytes:
    side, file = 8 * official.patch, io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, 2 * side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def test_images_and_a_video_arrive_as_our_client_gets_them(official: Official, sglang: LanguageServer) -> None:
    stills = [png(official, 1), png(official, 2), png(official, 3)]
    clip = encode(20)
    url = "http://" + official.server.wait_for("listening")["sglang_listen"]
    request = SimpleNamespace(
        image_data=[data_url(each) for each in stills],
        video_data=[data_url(clip)],
        audio_data=None,
        mm_content_hashes=None,
    )
    processor = Processor()
    assert await sglang.tokenizer(url, url).recv_mm_data(request, processor, "prompt") is not None  # in three parts
    with opticnerve.Client(official.server.address) as client:
        *images, video = client.encode([*stills, opticnerve.Video(clip)])
    assert torch.equal(processor.embeddings["IMAGE"], torch.cat([each.torch() for each in images]))
    assert torch.equal(processor.embeddings["VIDEO"], video.torch())
    assert processor.meta["img_grid_thw"].tolist() == [list(each.grid) for each in images]
    assert processor.meta["video_grid_thw"].tolist() == [list(video.grid)]
    if official.architecture == "qwen3_vl":
        assert processor.meta["video_timestamps"] == [list(video.plan.timestamps)]
        assert len(video.plan.timestamps) == video.grid.t
    else:
        assert processor.meta["second_per_grid_ts"] == [video.plan.second_per_grid_ts]
        assert video.plan.second_per_grid_ts > 0


def health_of(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("official", ["qwen3_vl"], indirect=True)
def test_a_front_that_dies_is_started_again_and_the_server_does_not_notice(official: Official) -> None:
    server = official.server
    url = "http://" + server.wait_for("listening")["sglang_listen"]
    front = server.children()[-1]
    assert health_of(url)
    os.kill(front, signal.SIGKILL)
    eventually(lambda: server.events("companion died, its calls are lost"))
    assert server.health() == {"readiness": True, "liveness": True, "startup": True}
    eventually(lambda: health_of(url))
    assert server.children()[-1] != front
