"""The parts of the SGLang front that need no socket: what it writes and reads, who receives, who waits for whom."""

from __future__ import annotations

import asyncio
import base64
import pickle
import pickletools

import pytest

from opticnerve import Video
from opticnerve.errors import DeadlineExceededError, RequestInvalidError, ResourceExhaustedError
from opticnerve.integrations.sglang import rendezvous, rpc
from opticnerve.integrations.sglang.frame import MODALITY_MODULES, Modality, Part, error_frames
from opticnerve.integrations.sglang.gate import Gate, parse_networks
from opticnerve.integrations.sglang.media import to_sources
from opticnerve.integrations.sglang.pickled import Call, Global, Value, pickled
from opticnerve.integrations.sglang.rendezvous import Rendezvous


@pytest.mark.parametrize(
    "value",
    [
        [0, 1, -1, 127, 128, -128, -129, 255, 256, 2**31, -(2**63), 2**64],
        {"a": 1.5, "b": None, "c": [], "d": {}, "e": "", "f": "h\u00e9\U0001f600\n"},
        [[1, [2, "x"]], [[]]],
        float("inf"),
    ],
    ids=repr,
)
def test_what_is_pickled_is_what_pickle_reads(value: Value) -> None:
    assert pickle.loads(pickled(value)) == value


def test_a_call_is_made_by_the_reader() -> None:
    assert pickle.loads(pickled(Call(Global("builtins", "list"), "ab"))) == ["a", "b"]


def test_only_named_types_are_written() -> None:
    with pytest.raises(TypeError, match="set"):
        pickled({1})  # type: ignore[arg-type]


@pytest.mark.parametrize("release", MODALITY_MODULES)
def test_a_head_names_three_globals_at_most(release: str) -> None:
    """Of the release's own modules; what else a reader finds there is numbers, texts and lists."""
    head = error_frames(release, Part("r", 2, 1, Modality.VIDEO), "it broke", 400)[0]
    names = [argument for opcode, argument, _ in pickletools.genops(head) if opcode.name == "GLOBAL"]
    data = "sglang.srt.disaggregation.encoder.receiver EmbeddingData"
    assert names == [data, f"{MODALITY_MODULES[release]} Modality"]


DATA = base64.b64encode(b"file").decode()


@pytest.mark.parametrize(
    "item", [f"data:image/png;base64,{DATA}", DATA, {"url": DATA}, {"url": DATA, "content_hash": "sha256:00"}]
)
def test_media_are_the_bytes_in_the_request(item: object) -> None:
    assert to_sources([item], Modality.IMAGE) == [b"file"]
    assert to_sources([item], Modality.VIDEO) == [Video(b"file")]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("http://host/a.png", "sent, not fetched"),
        ("http://host/a,b.png", "sent, not fetched"),
        ("file:///etc/passwd", "sent, not fetched"),
        ("../a.png", "sent, not fetched"),
        ("data:image/png,abc", "neither a data URL"),
        (f"data:image/png;base64,{DATA[:-1]}", "padding"),
        ({"url": DATA, "detail": "low"}, "options that would be ignored: detail"),
        ({"content_hash": "x"}, "NoneType"),
        ([DATA], "is list"),
        (None, "NoneType"),
    ],
)
def test_other_media_are_refused_by_name(item: object, message: str) -> None:
    with pytest.raises(RequestInvalidError, match=rf"item 1 .*{message}"):
        to_sources([DATA, item], Modality.IMAGE)


@pytest.mark.parametrize(
    ("receiver", "caller", "networks", "endpoint"),
    [
        ("10.1.2.3:5000", "10.1.2.3", "caller", "tcp://10.1.2.3:5000"),
        ("10.1.2.3:5000", "::ffff:10.1.2.3", "caller", "tcp://10.1.2.3:5000"),
        ("[fd00::1]:5000", "fd00::1%eth0", "caller", "tcp://[fd00::1]:5000"),
        ("fd00::1:5000", "fd00::1", "caller", "tcp://[fd00::1]:5000"),  # as SGLang writes host and port apart
        ("127.0.0.1:5000", "127.0.0.1", "caller", "tcp://127.0.0.1:5000"),
        ("127.0.0.2:5000", "127.0.0.1", "caller", "tcp://127.0.0.2:5000"),  # both are this host
        ("localhost:5000", "127.0.0.1", "caller", "tcp://"),
        ("10.1.2.3:5000", "10.9.9.9", "10.1.0.0/16", "tcp://10.1.2.3:5000"),
        ("[fd00::1]:5000", "10.9.9.9", "10.1.0.0/16,fd00::/8", "tcp://[fd00::1]:5000"),
    ],
)
async def test_rows_go_to_the_host_that_asks_and_to_named_networks(
    receiver: str, caller: str, networks: str, endpoint: str
) -> None:
    assert (await Gate(parse_networks(networks)).endpoint(receiver, caller)).startswith(endpoint)


@pytest.mark.parametrize(
    ("receiver", "caller", "message"),
    [
        ("10.1.2.3:5000", "10.1.2.4", "sglang-receivers"),
        ("169.254.169.254:80", "127.0.0.1", "sglang-receivers"),
        ("127.0.0.1:5000", "10.1.2.3", "sglang-receivers"),  # of the front itself
        ("0.0.0.0:5000", "127.0.0.1", "sglang-receivers"),
        ("host.invalid:5000", "10.1.2.3", "no receiver"),
        ("10.1.2.3", "10.1.2.3", "write host:port"),
        ("10.1.2.3:0", "10.1.2.3", "write host:port"),
        ("10.1.2.3:65536", "10.1.2.3", "write host:port"),
        ("10.1.2.3:\u0663", "10.1.2.3", "write host:port"),
        (":5000", "10.1.2.3", "no receiver"),
        ("10.1.2.3:5000", "", "unknown"),
    ],
)
async def test_other_receivers_are_refused(receiver: str, caller: str, message: str) -> None:
    with pytest.raises(RequestInvalidError, match=message):
        await Gate(parse_networks("10.2.0.0/16")).endpoint(receiver, caller)


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.1.2.3:5000", "10.1.2.3"), ("ipv6:%5Bfd00::1%5D:5000", "fd00::1"), ("unix:", ""), ("", "")],
)
def test_the_address_of_a_caller_by_grpc(peer: str, address: str) -> None:
    assert rpc._address(peer) == address


async def told(parts: Rendezvous, *endpoints: str, count: int) -> list[str]:
    """The receivers of a part that comes first."""
    async with parts.part("p") as receivers:
        telling = [asyncio.create_task(parts.tell("p", endpoint, count)) for endpoint in endpoints]
        found = [each async for each in receivers.each()]
        await asyncio.gather(*telling)
    return found


async def test_each_distinct_receiver_is_given_once() -> None:
    assert await told(Rendezvous(), "a", "b", "a", "c", count=3) == ["a", "b", "c"]


async def test_a_receiver_may_come_first() -> None:
    parts = Rendezvous()
    telling = [asyncio.create_task(parts.tell("p", endpoint, 2)) for endpoint in "ab"]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in telling)
    async with parts.part("p") as receivers:
        assert [each async for each in receivers.each()] == ["a", "b"]
    await asyncio.gather(*telling)


async def test_receivers_agree_on_how_many_they_are() -> None:
    parts = Rendezvous()
    async with parts.part("p"):
        await parts.tell("p", "a", 2)
        with pytest.raises(RequestInvalidError, match="of 3 receivers now, of 2 before"):
            await parts.tell("p", "b", 3)


async def test_a_part_is_inside_once_at_a_time() -> None:
    parts = Rendezvous()
    for _ in range(2):
        async with parts.part("p"):
            with pytest.raises(RequestInvalidError, match="already"):
                async with parts.part("p"):
                    raise AssertionError("not reached")


async def test_neither_side_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.05)
    parts = Rendezvous()
    with pytest.raises(DeadlineExceededError, match=r"no part p came within 0\.05 s"):
        await parts.tell("p", "a", 1)
    async with parts.part("p") as receivers:
        with pytest.raises(DeadlineExceededError, match="0 of all receivers"):
            [each async for each in receivers.each()]
        await parts.tell("p", "a", 2)
        with pytest.raises(DeadlineExceededError, match="1 of 2 receivers"):
            [each async for each in receivers.each()]


async def test_receivers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_WAITING", 2)
    parts = Rendezvous()
    waiting = [asyncio.create_task(parts.tell(part, "a", 1)) for part in "pq"]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="2 receivers wait"):
        await parts.tell("r", "a", 1)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    async with parts.part("q"):
        await waiting[1]
        await parts.tell("q", "b", 1)
