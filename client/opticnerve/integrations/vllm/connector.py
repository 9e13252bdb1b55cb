"""The encoder-cache connector: a vLLM, 0.32 or newer, takes rows from this service instead of computing them.

    --ec-transfer-config '{"ec_connector": "OpticnerveECConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "opticnerve.integrations.vllm.connector",
        "ec_connector_extra_config": {"server": "encoder:50051"}}'

vLLM makes one of it in its scheduler and one in every worker process. The scheduler's fetches each item once, off the
loop, into memory that all ranks of the host map; a rank copies it to its device in the step that needs it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from opticnerve.integrations.vllm import memory
from opticnerve.integrations.vllm.consumer import Consumer
from opticnerve.integrations.vllm.fetcher import Fetcher
from opticnerve.integrations.vllm.items import Load
from opticnerve.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger("vllm.opticnerve")


class Loads(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """From the scheduler to the ranks: what they load in this step, by uuid."""

    def __init__(self, path: str, loads: dict[str, Load]) -> None:
        self.path = path
        self.loads = loads


class OpticnerveECConnector(ECConnectorBase):  # type: ignore[misc]
    """Raises ValueError, when vLLM starts, for a configuration in which rows would be wrong or could not be shared."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        refuse_unfit(vllm_config)
        settings = Settings.of(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._loaded: set[str] = set()
        if role == ECConnectorRole.SCHEDULER:
            self._fetcher = Fetcher(settings)
            self._consumer = Consumer(settings, row_width(vllm_config), self._fetcher)
        else:
            self._device = torch.device(vllm_config.device_config.device_type)

    def shutdown(self) -> None:
        if self.role == ECConnectorRole.SCHEDULER:
            self._fetcher.close()

    # --- in the scheduler

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        try:
            return self._consumer.ensure(request, num_computed_tokens)
        except Exception:
            _LOG.exception("request %s fails for a bug of the connector", request.request_id)
            self._consumer.fail(request.request_id)
            return False

    def has_cache_item(self, identifier: str) -> bool:
        return self._consumer.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._consumer.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        return Loads(self._fetcher.path, self._consumer.take_loads())

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        self._consumer.loaded(connector_output.finished_recving or ())

    def take_unavailable_requests(self) -> set[str]:
        return self._consumer.take_unavailable()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._consumer.finished(request.request_id)
        return super().request_finished(request)  # type: ignore[no-any-return]

    # --- in a worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for uuid, load in metadata.loads.items():
            rows = torch.frombuffer(
                memory.read(metadata.path, load.offset, load.nbytes), dtype=getattr(torch, load.dtype)
            )
            encoder_cache[uuid] = rows.view(load.rows, load.width).to(self._device, copy=True)
            self._loaded.add(uuid)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Nothing: what vLLM encodes itself stays in it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What was loaded in this step: the scheduler's side learns it when all ranks have ended the step."""
        loaded, self._loaded = self._loaded, set()
        return None, loaded or None


def row_width(vllm_config: VllmConfig) -> int:
    """Numbers in a row of the model's tower: the language model's width, times the levels."""
    model = vllm_config.model_config
    return int(model.get_inputs_embeds_size()) * (1 + _deepstack_levels(model))


def refuse_unfit(vllm_config: VllmConfig) -> None:
    """Raises ValueError for a vLLM to which the rows would be wrong, or whose ranks could not reach them."""
    model, transfer = vllm_config.model_config, vllm_config.ec_transfer_config
    if transfer.is_ec_producer:
        raise ValueError("OpticnerveECConnector only consumes: set ec_role to ec_consumer")
    if vllm_config.parallel_config.nnodes > 1:
        raise ValueError("OpticnerveECConnector shares rows through memory: run all ranks of an engine on one host")
    media = model.multimodal_config
    if media.video_pruning_rate:
        raise ValueError("OpticnerveECConnector brings all rows of a video: do not set --video-pruning-rate")
    if _deepstack_levels(model) and not any(media.get_limit_per_prompt(kind) for kind in ("image", "video")):
        raise ValueError(
            "with --limit-mm-per-prompt of 0 vLLM leaves the deepstack levels of this model out, and its tokens would "
            "be wrong: allow images or videos"
        )


def _deepstack_levels(model_config: Any) -> int:
    vision = getattr(model_config.hf_config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
