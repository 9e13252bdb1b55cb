"""The SGLang front between a service and SGLang's own receiver, run from the wheel of the release."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from PIL import Image

import opticnerve
from frontend_harness import Harness, picture, serving, until
from opticnerve.integrations.sglang import encoder
from opticnerve.integrations.sglang.frame import Modality, Part, embedding_frames, error_frames
from opticnerve.integrations.sglang.front import Front, FrontSettings
from opticnerve.integrations.sglang.rendezvous import Rendezvous
from opticnerve_server.ports import reserve
from sglang_wheel import RELEASE, LanguageServer, Processor


@dataclass(frozen=True)
class Fronted:
    server: Harness  # a service with a fake engine
    front: Front
    http: str  # URLs, as --encoder-urls has them
    grpc: str

    @property
    def rendezvous(self) -> Rendezvous:
        return self.front._encoder._rendezvous


@asynccontextmanager
async def fronted() -> AsyncIterator[Fronted]:
    (http_port, http), (grpc_port, grpc) = reserve("127.0.0.1:0"), reserve("127.0.0.1:0")
    with http_port, grpc_port:
        async with serving() as server:
            settings = FrontSettings(
                service=server.address, release=RELEASE, listen=http, grpc_listen=grpc, max_request_bytes=256 << 10
            )
            async with Front(settings) as front:
                yield Fronted(server, front, f"http://{http}", f"grpc://{grpc}")


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
    async with fronted() as here:
        tokenizer = sglang.tokenizer(getattr(here, mode), grpc=mode == "grpc")
        processor = Processor()
        request = SimpleNamespace(
            image_data=[data_url(each) for each in pixels], video_data=None, audio_data=None, mm_content_hashes=None
        )
        done = await tokenizer.recv_mm_data(request, processor, "prompt")
        expected = await rows_of(here.server, pixels)
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
    async with fronted() as here:
        urls = [here.http] * 2  # as two encoders: the request has two parts
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
        expected = await rows_of(here.server, pixels)
    for rank in ranks:
        assert rank.status == sglang.code.WaitingMMRequestStatus.SUCCESS
        assert torch.equal(rank.mm_processor.embeddings["IMAGE"], torch.cat([each.torch() for each in expected]))
        assert rank.mm_processor.meta["img_grid_thw"].tolist() == [list(each.grid) for each in expected]


async def told(sglang: LanguageServer, here: Fronted, rid: str) -> Any:
    """A rank of the scheduler that waits for one image, and has told the front so before anyone sends it."""
    rank = sglang.rank(rid, {sglang.code.Modality.IMAGE: [1]}, [here.http])
    waiting = here.rendezvous._waiting
    rank.send_encode_request()
    await until(lambda: here.rendezvous._waiting > waiting)
    return rank


def dispatched(sglang: LanguageServer, here: Fronted, rid: str, image: str) -> asyncio.Task[Any]:
    """The tokenizer's request to encode it; its result is what went wrong."""
    items, assigned = items_of(sglang, IMAGE=[image]), {sglang.code.Modality.IMAGE: [1]}
    encode = sglang.tokenizer().encode(rid, items, None, "encode", num_items_assigned=assigned, encode_urls=[here.http])
    return asyncio.create_task(encode)


BROKEN = "data:image/png;base64," + base64.b64encode(b"no image").decode()


async def test_a_broken_image_fails_its_request_and_no_other(sglang: LanguageServer) -> None:
    good = data_url(picture(64, 96, 1))
    async with fronted() as here:
        rank, other = await told(sglang, here, "bad"), await told(sglang, here, "good")
        dispatch, other_dispatch = dispatched(sglang, here, "bad", BROKEN), dispatched(sglang, here, "good", good)
        error = await dispatch
        await until_decided(rank, other)
        assert await other_dispatch is None
    assert (rank.status, other.status) == (-1, 1)
    assert rank.error_code == error.error_code == 400
    assert "IMAGE_INVALID" in rank.error_msg
    assert error.error_msg == rank.error_msg


@pytest.mark.parametrize("mode", ["http", "grpc"])
async def test_the_tokenizer_does_not_wait_for_a_broken_image(mode: str, sglang: LanguageServer) -> None:
    request = SimpleNamespace(image_data=[BROKEN], video_data=None, audio_data=None, mm_content_hashes=None)
    async with fronted() as here:
        tokenizer = sglang.tokenizer(getattr(here, mode), grpc=mode == "grpc")
        async with asyncio.timeout(5):
            assert await tokenizer.recv_mm_data(request, Processor(), "prompt") is None


async def test_what_it_writes_is_what_sglangs_own_encoder_pickles(sglang: LanguageServer) -> None:
    code, pixels = sglang.code, picture(64, 96, 1)
    async with serving() as server:
        [embedding] = await rows_of(server, [pixels])
    part = Part("r1_local_part_1", 3, 1, Modality.IMAGE)
    rows = embedding.torch()
    official = code.EmbeddingData("r1_local_part_1", 3, 1, [list(embedding.grid)], code.Modality.IMAGE, rows)
    failed = code.EmbeddingData("r1_local_part_1", 3, 1, None, code.Modality.IMAGE, error_msg="no", error_code=400)
    for theirs, ours in (
        (official, embedding_frames(RELEASE, part, [embedding])[0]),
        (failed, error_frames(RELEASE, part, "no", 400)[0]),
    ):
        loaded = code.safe_pickle_loads(ours)
        expected = code.safe_pickle_loads(pickle.dumps(theirs.copy_without_embedding()))
        assert type(loaded) is type(expected)
        assert {**vars(loaded), "_mr_ptr": None} == vars(expected)  # where Mooncake has registered memory


async def post(url: str, body: object) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return answer.status, await answer.json()


async def test_a_body_that_the_service_would_not_take_is_not_read(sglang: LanguageServer) -> None:
    async with fronted() as here:
        status, answer = await post(f"{here.http}/encode", PART | {"mm_items": ["A" * (512 << 10)]})
    assert status == 400
    assert "--max-request-bytes" in answer["message"]


async def health(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return answer.status


PART = {
    "req_id": "r1", "num_parts": 1, "part_idx": 0, "modality": "IMAGE", "mm_items": [BROKEN],
    "prefill_host": "127.0.0.1", "embedding_port": 9, "encoder_idx": 0, "time_stats_json": None,
}  # fmt: skip
TOLD = {"req_id": "r1", "receive_count": 1, "receive_url": "127.0.0.1:9", "modality": "IMAGE"}


@pytest.mark.parametrize(
    ("route", "change", "message"),
    [
        ("encode", {"modality": "AUDIO"}, "'AUDIO' is none of IMAGE, VIDEO"),
        ("encode", {"mm_items": []}, "no items"),
        ("encode", {"mm_items": ["http://host/a.png"]}, "sent, not fetched"),
        ("encode", {"part_idx": 1}, "part 1 of 1 does not exist"),
        ("encode", {"part_idx": -1}, "part -1 of 1 does not exist"),
        ("encode", {"num_parts": "1"}, r"Expected `int`, got `str` - at `$.num_parts`"),
        ("encode", {"num_parts": 10**30}, "does not exist"),
        ("encode", {"req_id": ""}, "req_id is empty"),
        ("encode", {"req_id": "\ud800"}, "not understood"),
        ("encode", {"prefill_host": "192.0.2.1"}, "rows go to the host that asks"),
        ("encode", {"prefill_host": None}, "no receiver"),
        ("scheduler_receive_url", {"receive_url": "192.0.2.1:9"}, "rows go to the host that asks"),
        ("scheduler_receive_url", {"receive_count": 0}, "at least one"),
        ("scheduler_receive_url", {"receive_url": None}, "not understood"),
    ],
)
async def test_refusals_are_answered_as_sglang_reads_them(
    route: str, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "REPORT_S", 0.05)  # nobody receives
    async with fronted() as here:
        status, answer = await post(f"{here.http}/{route}", (PART if route == "encode" else TOLD) | change)
    assert (status, answer["status"]) == (400, "error")
    assert message in answer["message"]


async def test_a_caller_that_goes_away_takes_its_part_along(sglang: LanguageServer) -> None:
    async with fronted() as here:
        here.server.engine.hold_rows = True
        rank = await told(sglang, here, "r1")
        dispatch = dispatched(sglang, here, "r1", data_url(picture(64, 96, 1)))
        await until(lambda: bool(here.server.engine.slots))
        dispatch.cancel()
        await until(lambda: not here.server.engine.slots)
        rank.close_recv_socket()
        here.server.engine.resume()
        again = await told(sglang, here, "r1")
        dispatch = dispatched(sglang, here, "r1", data_url(picture(64, 96, 2)))
        await until_decided(again)
        assert await dispatch is None
    assert again.status == 1


async def test_parts_inside_are_bounded_and_a_stop_waits_for_them(
    sglang: LanguageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "MAX_PARTS", 1)
    async with fronted() as here:
        here.server.engine.hold_rows = True
        rank = await told(sglang, here, "r1")
        dispatch = dispatched(sglang, here, "r1", data_url(picture(64, 96, 1)))
        await until(lambda: bool(here.server.engine.slots))
        status, answer = await post(f"{here.http}/encode", PART)
        assert (status, "1 parts are inside" in answer["message"]) == (429, True)
        assert await health(here.http) == 200
        stopping = asyncio.create_task(here.front.stop(10))
        await asyncio.sleep(0.05)
        status, answer = await post(f"{here.http}/encode", PART)
        assert status == 503
        assert "stopping" in answer["message"]
        assert await health(here.http) == 503
        assert not stopping.done()
        here.server.engine.resume()
        await until_decided(rank)
        await stopping
        assert await dispatch is None
    assert rank.status == 1
