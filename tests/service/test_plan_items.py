"""PlanItems: the arithmetic of Encode, without pixels."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from frontend_harness import collect, picture, png_item, raw_item, reason_of, serving
from opticnerve.v1 import encoder_pb2 as pb


def size(height: int, width: int, frames: int = 0) -> pb.MediaSize:
    return pb.MediaSize(size=pb.MediaSize.Size(height=height, width=width, frames=frames))


async def test_plans_are_those_of_encode() -> None:
    pictures = [picture(h, w) for h, w in ((1, 1), (8, 8), (9, 17), (64, 200))]
    async with serving() as server:
        planned = await server.stub.PlanItems(
            pb.PlanItemsRequest(items=[size(*p.shape[:2]) for p in pictures], model="tiny")
        )
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[raw_item(p) for p in pictures])))
    assert planned.fingerprint == "fp-1"
    assert (planned.layout.hidden, planned.layout.deepstack_levels, planned.layout.rows) == (16, 1, 0)
    for index, item in enumerate(planned.items):
        started = answers[index].started
        assert started is not None
        assert item.plan == started.plan
        assert len(answers[index].data) == item.plan.tokens * 32 * 2


async def test_headers_are_enough_and_may_be_too_short() -> None:
    file = png_item(picture(40, 50)).encoded_image.data
    async with serving() as server:
        first = await server.stub.PlanItems(pb.PlanItemsRequest(items=[pb.MediaSize(header=file[:10])]))
        need = first.items[0].need_bytes
        assert need > 10
        again = await server.stub.PlanItems(pb.PlanItemsRequest(items=[pb.MediaSize(header=file[:need])]))
    assert (again.items[0].plan.grid_thw.h, again.items[0].plan.grid_thw.w) == (10, 14)


async def test_refusals_are_those_of_encode() -> None:
    items = [
        (size(0, 8), "IMAGE_INVALID", "sides"),
        (size(1, 5000), "IMAGE_INVALID", "sides"),
        (size(300, 300), "IMAGE_INVALID", "max_image_pixels"),
        (size(200, 200), "ITEM_TOO_LARGE", "max_item_tokens"),
        (size(8, 8, frames=4), "IMAGE_INVALID", "set its fps"),
        (pb.MediaSize(header=b"no image at all, whatever comes later" * 10), "IMAGE_INVALID", ""),
        (pb.MediaSize(), "IMAGE_INVALID", "neither"),
    ]
    async with serving(max_image_pixels=50_000, max_item_tokens=624) as server:
        request = pb.PlanItemsRequest(items=[item for item, _, _ in items] + [size(8, 8)])
        planned = await server.stub.PlanItems(request)
    for index, (_, reason, text) in enumerate(items):
        failed = planned.items[index].failed
        assert failed.reason == reason
        assert text in failed.message
    assert planned.items[-1].plan.tokens == 1


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.PlanItemsRequest(), "REQUEST_INVALID"),
        (pb.PlanItemsRequest(items=[size(8, 8)] * 4097), "REQUEST_TOO_LARGE"),
        (pb.PlanItemsRequest(items=[size(8, 8)], model="other"), "MODEL_NOT_LOADED"),
    ],
)
async def test_bad_requests(request_: pb.PlanItemsRequest, reason: str) -> None:
    async with serving() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.PlanItems(request_)
        assert reason_of(caught.value) == reason
