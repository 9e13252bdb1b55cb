"""The SGLang front between a service and SGLang's own receiver, run from the wheel of the release."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import opticnerve
from frontend_harness import Harness, picture, serving
from opticnerve.integrations.sglang.front import Front, FrontSettings
from opticnerve_server.ports import reserve
from sglang_wheel import LanguageServer, Processor, receiver_of

RELEASE = "0.5.23"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Any]:
    with receiver_of(RELEASE) as module:
        yield module


@pytest.fixture
def sglang(receiver: Any) -> Iterator[LanguageServer]:
    with closing(LanguageServer(receiver)) as server:
        yield server


@asynccontextmanager
async def front(**settings: Any) -> AsyncIterator[tuple[Harness, str, str]]:
    """A service with a fake engine, and the addresses of a front before it: HTTP, gRPC."""
    held, http = reserve("127.0.0.1:0")
    held2, rpc = reserve("127.0.0.1:0")
    with held, held2:
        async with serving() as server:
            asked = FrontSettings(service=server.address, release=RELEASE, listen=http, grpc_listen=rpc, **settings)
            async with Front(asked):
                yield server, http, rpc


def data_url(pixels: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def rows_of(server: Harness, pixels: list[np.ndarray[Any, Any]]) -> list[opticnerve.Embedding]:
    async with opticnerve.AsyncClient(server.address) as client:
        return [each async for each in client.encode(pixels)]


@pytest.mark.parametrize("mode", ["http", "grpc"])
async def test_rows_for_the_tokenizer(mode: str, sglang: LanguageServer) -> None:
    pixels = [picture(64, 96, 1), picture(128, 64, 2)]
    async with front() as (server, http, rpc):
        tokenizer = sglang.tokenizer(f"{mode}://{http if mode == 'http' else rpc}", grpc=mode == "grpc")
        processor = Processor()
        request = SimpleNamespace(
            image_data=[data_url(each) for each in pixels], video_data=None, audio_data=None, mm_content_hashes=None
        )
        done = await tokenizer.recv_mm_data(request, processor, "prompt")
        expected = await rows_of(server, pixels)
    assert done.input_ids == [1, 2, 3]
    assert torch.equal(processor.embeddings["IMAGE"], torch.cat([each.torch() for each in expected]))
    assert processor.meta["img_grid_thw"].tolist() == [list(each.grid) for each in expected]


def items_of(sglang: LanguageServer, **urls: list[str]) -> list[dict[str, Any]]:
    """The items of a request by modality, as SGLang's tokenizer holds them."""
    return [{"url": url, "modality": sglang.code.Modality[name]} for name, each in urls.items() for url in each]


async def until_decided(*ranks: Any) -> None:
    """As the scheduler's loop does."""
    async with asyncio.timeout(20):
        while any(rank.status == 0 for rank in ranks):
            for rank in ranks:
                rank._try_recv_mm_data()
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("first", ["part", "receiver"])
async def test_rows_for_two_ranks_of_the_scheduler(first: str, sglang: LanguageServer) -> None:
    pixels = [picture(64, 96, 1), picture(128, 64, 2), picture(64, 64, 3)]
    async with front() as (server, http, _):
        urls = [f"http://{http}"] * 2  # as two encoders: the request has two parts
        items = items_of(sglang, IMAGE=[data_url(each) for each in pixels])
        assigned = {sglang.code.Modality.IMAGE: [2, 1]}
        ranks = [sglang.rank("r1", assigned, urls, ranks=2) for _ in range(2)]
        encode = sglang.tokenizer().encode("r1", items, None, "encode", num_items_assigned=assigned, encode_urls=urls)
        if first == "part":
            encoding = asyncio.create_task(encode)
            await asyncio.sleep(0.3)
        ranks[0].send_encode_request()
        await asyncio.sleep(0.1)
        ranks[1].send_encode_request()
        if first == "receiver":
            await asyncio.sleep(0.3)
            encoding = asyncio.create_task(encode)
        await until_decided(*ranks)
        assert await encoding is None
        expected = await rows_of(server, pixels)
    for rank in ranks:
        assert rank.status == sglang.code.WaitingMMRequestStatus.SUCCESS
        assert torch.equal(rank.mm_processor.embeddings["IMAGE"], torch.cat([each.torch() for each in expected]))
        assert rank.mm_processor.meta["img_grid_thw"].tolist() == [list(each.grid) for each in expected]
