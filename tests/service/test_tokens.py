"""Tokens through a real front-end: who gets in, what stays open, and that tenants are strangers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fake_engine import SharingEngine
from frontend_harness import Harness, collect, details_of, picture, raw_item, reason_of, serving
from opticnerve.digests import digest_of
from opticnerve.v1 import encoder_pb2 as pb
from opticnerve_server.auth import watch_tokens
from opticnerve_server.config import Config
from opticnerve_server.credentials import CredentialFiles
from opticnerve_server.metrics import REJECTED, REQUESTS, Rejection
from opticnerve_server.settings import ConfigError

RED, BLUE = "red-token-0123456789", "blue-token-0123456789"
ITEM = raw_item(picture(16, 16))
FETCH = pb.Item(digest=pb.Digest(sha256=digest_of(ITEM)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"red:{RED}\nblue:{BLUE}\n")
    return path


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def calls(server: Harness, **options: Any) -> dict[str, Any]:
    """One call of each method that asks for a token."""
    stub, size = server.stub, pb.MediaSize(size=pb.MediaSize.Size(height=8, width=8))
    mirror = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "Encode": lambda: collect(stub.Encode(pb.EncodeRequest(items=[ITEM]), **options)),
        "PlanItems": lambda: stub.PlanItems(pb.PlanItemsRequest(items=[size]), **options),
        "Release": lambda: stub.Release(pb.ReleaseRequest(digests=[bytes(32)]), **options),
        "GetServerInfo": lambda: stub.GetServerInfo(pb.GetServerInfoRequest(), **options),
        "reflection": lambda: mirror.ServerReflectionInfo(iter([asked]), **options).read(),
    }


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [((), "TOKEN_MISSING"), (bearer("wrong-token-0123456789"), "TOKEN_INVALID")],
)
async def test_without_a_token(file: Path, metadata: Any, reason: str) -> None:
    rejected = REJECTED.labels(Rejection.AUTH)._value.get()
    counted = REQUESTS.labels("Encode", "UNAUTHENTICATED")._value.get()
    async with serving(auth_token_file=str(file)) as server:  # which waits for its health, without a token
        for call in calls(server, metadata=metadata).values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert reason_of(caught.value) == reason
            assert set(details_of(caught.value)) == {"ErrorInfo"}
        assert not server.engine.reserved
    assert REJECTED.labels(Rejection.AUTH)._value.get() == rejected + 4, "reflection is not counted as a call"
    assert REQUESTS.labels("Encode", "UNAUTHENTICATED")._value.get() == counted + 1


async def test_with_a_token(file: Path) -> None:
    async with serving(auth_token_file=str(file), store_bytes=32 << 20, engine_class=SharingEngine) as server:
        for call in calls(server, metadata=bearer(RED)).values():
            assert await call() not in ({}, grpc.aio.EOF)


async def test_reflection_is_open_where_there_are_no_tokens() -> None:
    async with serving() as server:
        answer = await calls(server)["reflection"]()
        names = {service.name for service in answer.list_services_response.service}
        assert "opticnerve.v1.EncoderService" in names


async def encode(server: Harness, item: pb.Item, token: str) -> tuple[str, str]:
    """How the item ended, and its tenant in the engine's eyes."""
    answers = await collect(server.stub.Encode(pb.EncodeRequest(items=[item]), metadata=bearer(token)))
    answer, tenant = answers[0], server.engine.reserved[-1].tenant
    if answer.failed is not None:
        return answer.failed.reason, tenant
    assert answer.finished is not None
    return "hit" if answer.finished.store_hit else "miss", tenant


async def test_tenants_never_see_each_others_entries(file: Path) -> None:
    async with serving(auth_token_file=str(file), store_bytes=32 << 20, engine_class=SharingEngine) as server:
        assert await encode(server, ITEM, RED) == ("miss", "red")
        assert await encode(server, ITEM, RED) == ("hit", "red")
        assert await encode(server, FETCH, RED) == ("hit", "red")
        assert await encode(server, FETCH, BLUE) == ("NOT_CACHED", "blue")
        assert await encode(server, ITEM, BLUE) == ("miss", "blue")
        assert await encode(server, FETCH, BLUE) == ("hit", "blue")
        held = pb.EncodeRequest(items=[ITEM], delivery=pb.Delivery(hold=pb.Delivery.Hold()))
        await collect(server.stub.Encode(held, metadata=bearer(RED)))
        lease = pb.ReleaseRequest(digests=[digest_of(ITEM)])
        assert (await server.stub.Release(lease, metadata=bearer(BLUE))).released == 0, "another's lease"
        assert (await server.stub.Release(lease, metadata=bearer(RED))).released == 1


def write(file: Path, content: str) -> None:
    file.write_text(content)


async def test_rotation_without_a_restart(file: Path) -> None:
    young = "red-token-next-0123456789"
    async with serving(auth_token_file=str(file), store_bytes=32 << 20, engine_class=SharingEngine) as server:
        assert await encode(server, ITEM, RED) == ("miss", "red")
        write(file, f"red:{RED}\nred:{young}\n")
        assert await encode(server, ITEM, young) == ("hit", "red"), "the tenant is the same"
        write(file, f"red:{young}\n")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encode(server, ITEM, RED)
        assert reason_of(caught.value) == "TOKEN_INVALID"
        write(file, "broken")
        assert await encode(server, ITEM, young) == ("hit", "red"), "the last good tokens"


async def test_a_front_end_that_starts_with_a_broken_file(file: Path) -> None:
    good = CredentialFiles(Config(model="tiny", auth_token_file=str(file))).last_good()
    assert repr(good) == "Credentials()", "they are secret"
    write(file, "broken")
    with pytest.raises(ConfigError, match="is not TENANT:TOKEN"):
        watch_tokens(Config(model="tiny", auth_token_file=str(file)))
    async with serving(
        auth_token_file=str(file), store_bytes=32 << 20, engine_class=SharingEngine, good=good
    ) as server:
        assert await encode(server, ITEM, RED) == ("miss", "red")
        write(file, "blue:blue-token-next-0123456789")
        assert await encode(server, ITEM, "blue-token-next-0123456789") == ("miss", "blue")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await encode(server, ITEM, RED)
        assert reason_of(caught.value) == "TOKEN_INVALID"
