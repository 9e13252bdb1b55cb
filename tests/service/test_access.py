"""What a call leaves behind: its line in the log, and the trailers of its answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from frontend_harness import collect, picture, raw_item, reason_of, serving, until
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server import access
from opticnerve_server.messages import Occupancy

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
MIXED = pb.EncodeRequest(items=[raw_item(picture(16, 16)), pb.Item(encoded_image=pb.EncodedImage(data=b"no image"))])


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == access.__name__]


async def trailers(call: Any) -> dict[str, str]:
    return dict(await call.trailing_metadata())


async def test_a_line_and_trailers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    named = (("x-request-id", "order-7"), ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"))
    async with serving(max_queue_tokens=1000) as server:
        server.tell(Occupancy(3, 250, 500, device_tokens=100))
        await until(lambda: server.frontend.state.occupancy.tokens == 250)
        call = server.stub.Encode(MIXED, metadata=named)
        await collect(call)
        assert await trailers(call) == {
            "x-request-id": "order-7",
            "endpoint-load-metrics": 'JSON {"application_utilization": 0.25, "named_metrics": '
            '{"tokens_in_flight": 100, "tokens_queued": 150}}',
        }
        assert (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).occupancy.device_tokens == 100
    line, info = lines(caplog)
    assert (line["method"], line["code"], line["reason"], line["tenant"]) == ("Encode", "OK", "", "")
    assert (line["items"], line["tokens"], line["outcomes"]) == (2, 4, {"replay": 1, "IMAGE_INVALID": 1})
    assert (line["request_id"], line["trace_id"]) == ("order-7", TRACE)
    assert set(line["stage_ms"]) == {"admit", "preprocess", "queue", "execute", "copy", "stream"}
    assert 0 < line["stage_ms"]["preprocess"] <= line["ms"] < 10_000
    assert info["method"] == "GetServerInfo"
    assert not hasattr(info, "trace_id")


@pytest.mark.parametrize("given", [(), (("x-request-id", "two words"),), (("x-request-id", "a" * 129),)])
async def test_names_of_our_own(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as server:
        call = server.stub.Encode(pb.EncodeRequest(), metadata=given)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert reason_of(caught.value) == "REQUEST_INVALID"
        ended = await trailers(call)
    assert len(ended["x-request-id"]) == 32
    assert json.loads(ended["endpoint-load-metrics"].removeprefix("JSON "))["application_utilization"] == 0
    (line,) = lines(caplog)
    assert (line["code"], line["reason"]) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert line["request_id"] == ended["x-request-id"]


async def test_neither_answers_nor_the_log_hold_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    payload = b"SECRETPIXELS" * 500
    media = [
        pb.Item(encoded_image=pb.EncodedImage(data=head + payload))
        for head in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
    ]
    media += [
        pb.Item(raw_image=pb.RawImage(height=8, width=8, data=payload)),
        pb.Item(encoded_video=pb.EncodedVideo(data=b"\0\0\0\x20ftypisom" + payload)),
        pb.Item(patches=pb.Patches(tensors=[pb.NamedTensor(name="pixel_values", data=payload)])),
    ]
    async with serving() as server:
        answers = await collect(server.stub.Encode(pb.EncodeRequest(items=media)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(server.channel.unary_stream("/opticnerve.v1.EncoderService/Encode")(payload))
    failed = [answer.failed for answer in answers.values() if answer.failed is not None]
    assert len(failed) == len(media)
    assert max(failure.ByteSize() for failure in failed) < 1024
    told = [*map(str, failed), str(caught.value.details()), *(str(vars(record)) for record in caplog.records)]
    assert len(caplog.records) >= 2
    assert not [text for text in told if "SECRET" in text or "U0VDUkVU" in text]


def test_no_more_than_a_hundred_lines_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    monkeypatch.setattr(access.time, "monotonic", lambda: now)
    log = access.AccessLog()
    for _ in range(250):
        log.write({"method": "Encode"})
    assert len(lines(caplog)) == 100
    now = 1001.0
    for _ in range(2):
        log.write({"method": "Encode"})
    assert [line.get("skipped") for line in lines(caplog)[99:]] == [None, 150, None]
