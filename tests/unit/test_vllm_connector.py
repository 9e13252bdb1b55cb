"""The connector as vLLM calls it, step by step, with stand-ins for vLLM's own classes and a scripted service."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch

from fake_service import FakeService, answer, failed, serving
from opticnerve.integrations.vllm import Reference

ROWS, HIDDEN, LEVELS = 6, 4, 1
WIDTH = HIDDEN * (1 + LEVELS)
UUID = Reference.of(bytes(range(32)), "fp", "bfloat16").uuid
ARRAY = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH).astype(ml_dtypes.bfloat16)


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """As far as vLLM's ECConnectorBase does anything."""

    def __init__(self, vllm_config: Any, role: Role) -> None:
        self.role = role

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata

    def request_finished(self, request: Any) -> tuple[bool, None]:
        return False, None


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """`connector`, imported with a vLLM that is not there."""
    names = ["vllm", "vllm.distributed", "vllm.distributed.ec_transfer", "vllm.distributed.ec_transfer.ec_connector"]
    base = ModuleType("base")
    base.__dict__.update(ECConnectorBase=Base, ECConnectorMetadata=object, ECConnectorRole=Role)
    fakes = {name: ModuleType(name) for name in names} | {f"{names[-1]}.base": base}
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in fakes.items():
            patch.setitem(sys.modules, name, fake)
        name = "opticnerve.integrations.vllm.connector"
        yield importlib.import_module(name)
        del sys.modules[name]


def config(server: str = "a:1", *, limit: int = 999, **changes: Any) -> Any:
    """vLLM's, with what the connector looks at."""
    media = SimpleNamespace(
        video_pruning_rate=changes.pop("pruning", None),
        get_limit_per_prompt=lambda kind: limit if kind == "image" else 0,
    )
    vision = SimpleNamespace(deepstack_visual_indexes=[3] * changes.pop("levels", LEVELS))
    model = SimpleNamespace(
        hf_config=SimpleNamespace(vision_config=vision),
        multimodal_config=media,
        get_inputs_embeds_size=lambda: HIDDEN,
    )
    transfer = SimpleNamespace(
        is_ec_producer=changes.pop("producer", False), ec_connector_extra_config={"server": server, "timeout_s": 5}
    )
    return SimpleNamespace(
        model_config=model,
        ec_transfer_config=transfer,
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(nnodes=changes.pop("nnodes", 1)),
    )


def request(name: str = "a", rows: int = ROWS) -> Any:
    position = SimpleNamespace(offset=0, length=rows, get_num_embeds=lambda: rows)
    feature = SimpleNamespace(identifier=UUID, mm_position=position, modality="image", data={"image_grid_thw": None})
    return SimpleNamespace(request_id=name, mm_features=[feature], ec_transfer_params=None)


async def wait(scheduler: Any, asking: Any) -> bool:
    """Passes until the scheduler may go on, or the request has failed."""
    for _ in range(500):
        if scheduler.ensure_cache_available(asking, 0):
            return True
        if scheduler.take_unavailable_requests():
            return False
        await asyncio.sleep(0.01)
    raise AssertionError("neither")


async def test_two_ranks_load_what_was_fetched_once(module: Any) -> None:
    service = FakeService(lambda _: answer(0, ARRAY, deepstack_levels=LEVELS))
    async with serving(service) as address:
        scheduler = module.OpticnerveECConnector(config(address), Role.SCHEDULER)
        ranks = [module.OpticnerveECConnector(config(address), Role.WORKER) for _ in range(2)]
        caches = []
        for asking in (request("a"), request("b")):
            assert await wait(scheduler, asking)
            assert scheduler.has_cache_item(UUID)
            scheduler.update_state_after_alloc(asking, 0)
            metadata = scheduler.build_connector_meta(None)
            for rank in ranks:
                cache: dict[str, torch.Tensor] = {}
                rank.bind_connector_metadata(metadata)
                rank.start_load_caches(cache)
                assert cache[UUID].dtype == torch.bfloat16
                assert torch.equal(cache[UUID].float(), torch.from_numpy(ARRAY.astype(np.float32)))
                caches.append(cache[UUID])
                assert rank.get_finished(set()) == (None, {UUID})
                assert rank.get_finished(set()) == (None, None)
            scheduler.update_connector_output(SimpleNamespace(finished_recving={UUID}))
            assert scheduler.build_connector_meta(None).loads == {}
            assert scheduler.request_finished(asking) == (False, None)
        scheduler._fetcher._memory.free(0, ARRAY.nbytes)
        assert all(torch.equal(one.float(), torch.from_numpy(ARRAY.astype(np.float32))) for one in caches)
        scheduler.shutdown()
    assert len(service.encode_requests) == 1


async def test_a_missing_item_fails_its_request(module: Any) -> None:
    async with serving(FakeService(lambda _: [failed(0, grpc.StatusCode.NOT_FOUND, "NOT_CACHED")])) as address:
        scheduler = module.OpticnerveECConnector(config(address), Role.SCHEDULER)
        assert not await wait(scheduler, request())
        assert not scheduler.has_cache_item(UUID)
        scheduler.shutdown()


async def test_rows_of_another_width_fail_their_request(module: Any) -> None:
    async with serving(FakeService(lambda _: answer(0, ARRAY[:, :HIDDEN].copy()))) as address:
        scheduler = module.OpticnerveECConnector(config(address), Role.SCHEDULER)
        assert not await wait(scheduler, request())
        scheduler.shutdown()


async def test_a_bug_fails_its_request(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = module.OpticnerveECConnector(config(), Role.SCHEDULER)
    broken = SimpleNamespace(request_id="a", mm_features=[None], ec_transfer_params=None)
    assert scheduler.ensure_cache_available(broken, 0) is False
    assert scheduler.take_unavailable_requests() == {"a"}
    assert "bug" in caplog.text
    scheduler.shutdown()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"producer": True}, "only consumes"),
        ({"nnodes": 2}, "one host"),
        ({"pruning": 0.5}, "video-pruning-rate"),
        ({"limit": 0}, "deepstack"),
        ({"server": ""}, "server"),
    ],
)
def test_configurations_that_would_be_wrong(module: Any, changes: dict[str, Any], why: str) -> None:
    for role in Role:
        with pytest.raises(ValueError, match=why):
            module.OpticnerveECConnector(config(**changes), role)


def test_a_decoder_without_a_tower_is_fine_where_there_are_no_levels(module: Any) -> None:
    fine = config(limit=0, levels=0)
    module.refuse_unfit(fine)
    assert module.row_width(fine) == HIDDEN
    assert module.row_width(config()) == WIDTH
