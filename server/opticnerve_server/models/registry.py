"""From `--model` to a planner and a tower. Imports no torch until one of them is built."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..types import Launch
from .base import Planner, Tower
from .config import ModelError
from .presets import PRESETS, PROCESSORS, VIDEO_PROCESSORS

if TYPE_CHECKING:
    import torch

    from ..attention.base import AttentionBackend

__all__ = ["ARCHITECTURES", "LoadedTower", "ModelError", "ModelSource", "build_planner", "build_tower", "open_model"]

TOWERS = {
    "qwen3_vl": "qwen3_vl:Qwen3VLTower",
    "qwen3_vl_moe": "qwen3_vl:Qwen3VLTower",
    "qwen3_5": "qwen3_vl:Qwen35Tower",
    "qwen3_5_moe": "qwen3_vl:Qwen35Tower",
    "qwen2_5_vl": "qwen2_5_vl:Qwen25VLTower",
    "qwen2_vl": "qwen2_vl:Qwen2VLTower",
    "glm4v": "glm4v:Glm4vTower",
    "glm46v": "glm4v:Glm4vTower",
    "glm4v_moe": "glm4v:Glm4vTower",
    "ernie4_5_vl_moe": "ernie4_5_vl:Ernie45VLTower",
    "gemma4": "gemma4:Gemma4Tower",
    "gemma3": "gemma3:Gemma3Tower",
    "internvl": "internvl:InternVLTower",
    "internvl_chat": "internvl:InternVLChatTower",
    "llama4": "llama4:Llama4Tower",
    "kimi_vl": "kimi_vl:KimiVLTower",
    "deepseek_ocr": "deepseek_ocr:DeepseekOcrTower",
    "step3_vl": "step3_vl:Step3Tower",
    "step_vl": "step3_vl:PerceptionTower",
    "step3p7": "step3_vl:PerceptionTower",
    "minicpmv": "minicpmv:MiniCPMVTower",
}
"""Tower class by architecture, which is config.json's `model_type`."""

UNPROJECTED = {"llama4": "llama4:Llama4AdapterTower"}
"""Tower class whose rows are those before the projector, of the architectures that have decoders of either kind."""

CLASSES = {
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm46VForConditionalGeneration": "glm46v",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_vl_moe",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma3ForConditionalGeneration": "gemma3",
    "InternVLForConditionalGeneration": "internvl",
    "InternVLChatModel": "internvl_chat",
    "Llama4ForConditionalGeneration": "llama4",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "DeepseekOCRForCausalLM": "deepseek_ocr",
    "Step3VLForConditionalGeneration": "step3_vl",
    "StepVLForConditionalGeneration": "step_vl",
    "Step3p7ForConditionalGeneration": "step3p7",
    "MiniCPMV": "minicpmv",
}
"""Architecture by the class name in config.json's `architectures`, which wins over `model_type`."""

IN_CONFIG = {"internvl_chat": ("dynamic_image_size", "use_thumbnail", "min_dynamic_patch", "max_dynamic_patch")}
"""Keys of config.json that are the settings of the image processor, by the architectures that keep them there."""

IN_CODE = ("deepseek_ocr", "step3_vl", "step_vl", "step3p7")
"""Architectures whose processor is written in their code: without a file it is that."""

DENSE = ("deepseek_ocr", "step3_vl", "step_vl", "step3p7")
"""Architectures whose views are of one size on each path: attention over them is dense, with no segments to pack."""

NO_VIDEO_FILE = ("gemma3", "internvl_chat", "kimi_vl", "llama4", "minicpmv")
"""Architectures whose planners know without a file how they see videos, or that they do not."""

ARCHITECTURES = tuple(TOWERS)
"""Every architecture that the server supports."""

PRESET = "preset:"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's parsed files. `directory` is None for a preset."""

    name: str
    architecture: str
    config: dict[str, Any]  # config.json
    processor: dict[str, Any]  # preprocessor_config.json, or what config.json has instead
    directory: Path | None
    video_processor: dict[str, Any] | None = None  # video_preprocessor_config.json, if there
    projector: bool = True  # whether rows are those behind the projector

    @property
    def prunes_videos(self) -> bool:
        """Whether the checkpoint asks to drop tokens of videos by what is in them (EVS)."""
        return bool(self.config.get("video_pruning_rate"))


@dataclass(frozen=True, slots=True)
class LoadedTower:
    """A tower with its weights, and what was chosen for it; `reasons` by the name of the setting."""

    tower: Tower
    weights_digest: str
    attention_backend: str
    launch: Launch  # of the backend
    reasons: dict[str, str]
    tensors: int  # how many the weights are


def open_model(model: str, load_format: str, *, projector: bool = True) -> ModelSource:
    """Read the configuration of a checkpoint directory or of "preset:NAME"; no weights.

    With load format "dummy" a directory needs config.json alone: without a processor file the published one is used.
    Without `projector` the tower ends before it. Raises ModelError, also for an architecture that has no such rows.
    """
    preset = model.startswith(PRESET)
    source = _open_preset(model.removeprefix(PRESET), load_format) if preset else _open_directory(model, load_format)
    if not projector and source.architecture not in UNPROJECTED:
        raise ModelError(
            f"--no-projector is for {', '.join(UNPROJECTED)}: rows of {source.architecture} ({source.name}) have one "
            "layout, that of --projector"
        )
    return dataclasses.replace(source, projector=projector)


def _open_directory(model: str, load_format: str) -> ModelSource:
    directory = Path(model)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{model}: no config.json there; --model takes a checkpoint directory or {PRESET}NAME with NAME one of "
            f"{', '.join(PRESETS)}"
        )
    config = _read_json(directory / "config.json")
    architecture = _architecture(config, directory)
    processor = _read_processor(directory, config, architecture)
    if processor is None:
        if load_format != "dummy" and architecture not in IN_CODE:
            raise ModelError(
                f"{directory}: neither preprocessor_config.json nor a processor_config.json with an image_processor; "
                "save the model's image processor there"
            )
        processor = PROCESSORS[architecture]
    video_processor = _read_video_processor(directory)
    if video_processor is None and load_format == "dummy":
        video_processor = VIDEO_PROCESSORS.get(architecture)
    return ModelSource(directory.resolve().name, architecture, config, processor, directory, video_processor)


def build_planner(source: ModelSource) -> Planner:
    """The planner of a model. Raises ModelError.

    Where the video processor cannot be followed, or is not there, videos are refused for that reason, and images taken.
    """
    from .processor import ProcessorError

    cls = tower_class(source.architecture, projector=source.projector)
    config = cls.read_config(source.config)
    try:
        planner: Planner = cls.build_planner(source.architecture, config, source.processor)
    except ProcessorError as error:
        raise ModelError(f"the image processor of {source.name}: {error}") from error
    return _with_clips(planner, source)


def build_tower(
    source: ModelSource,
    planner: Planner,
    *,
    load_format: str,
    device: str | torch.device,
    dtype: str,
    attention_backend: str,
    kernels: str,
) -> LoadedTower:
    """Load the weights onto `device` and build the tower; every setting may be "auto".

    Raises ModelError for wrong weights, attention.AttentionError for a backend, kernels.KernelsError for kernels that
    cannot run there.
    """
    from .. import kernels as between
    from .weights import open_tensors

    cls = tower_class(source.architecture, projector=source.projector)
    config = cls.read_config(source.config)
    placed, device_reason = _choose_device(device)
    chosen, dtype_reason = _choose_dtype(dtype, placed)
    backend, backend_reason = choose_attention(attention_backend, source.architecture, placed, chosen, config.head_dim)
    kernels_reason = between.choose(kernels, placed)
    if placed.type == "cuda":
        import torch

        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # TF32 by default, unlike matrix products: off by 1e-4
    tensors = open_tensors(source.directory, cls.prefixes, load_format=load_format, device=placed, dtype=chosen)
    tower: Tower = cls(config, planner, tensors, backend)
    reasons = {"device": device_reason, "dtype": dtype_reason, "attention_backend": backend_reason}
    reasons["kernels"] = f"{between.chosen(placed)}: {kernels_reason}"
    digest = tensors.finish()
    return LoadedTower(tower, digest, backend.name, backend.launch, reasons, tensors.count)


def choose_attention(
    name: str, architecture: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionBackend, str]:
    """The attention backend called `name`, or "auto", for the tower of an architecture, and the reason for the choice.

    Raises attention.AttentionError for one that cannot run there, or would have nothing to do.
    """
    from .. import attention

    if architecture not in DENSE:
        return attention.resolve(name, device, dtype, head_dim)
    if name not in ("auto", "sdpa"):
        raise attention.AttentionError(
            f"attention backend {name} has nothing to do in {architecture}, whose views are of one size: attention "
            "over them is dense; use auto or sdpa"
        )
    backend, _ = attention.resolve("sdpa", device, dtype, head_dim)
    return backend, f"views of {architecture} are of one size: attention over them is dense"


def _with_clips(planner: Planner, source: ModelSource) -> Planner:
    """`planner` with the rule for its videos, or with the reason why it takes none."""
    from .clip import ClipRule, NoClips
    from .grid import GridPlanner
    from .processor import ProcessorError
    from .tiles import TilePlanner
    from .video_processor import read_clips, read_tile_clips

    if not isinstance(planner, GridPlanner | TilePlanner) or source.architecture in NO_VIDEO_FILE:
        return planner
    clips: ClipRule = NoClips(f"{source.name} has no video_preprocessor_config.json: send images")
    if source.video_processor is not None:
        try:
            if isinstance(planner, TilePlanner):
                clips = read_tile_clips(source.video_processor, planner)
            else:
                clips = read_clips(source.video_processor, planner, source.directory)
        except ProcessorError as error:
            clips = NoClips(f"the video processor of {source.name}: {error}; send images")
    return dataclasses.replace(planner, clips=clips)


def _open_preset(name: str, load_format: str) -> ModelSource:
    if name not in PRESETS:
        raise ModelError(f"unknown preset {name!r}: use one of {', '.join(PRESETS)}")
    if load_format != "dummy":
        raise ModelError(
            f"preset {name} has no weights: use --load-format dummy, or --model with a checkpoint directory"
        )
    config = PRESETS[name]
    architecture = config["model_type"]
    return ModelSource(name, architecture, config, PROCESSORS[architecture], None, VIDEO_PROCESSORS.get(architecture))


def _architecture(config: Mapping[str, Any], directory: Path) -> str:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    known = [CLASSES[name] for name in names if name in CLASSES]
    if known:
        return known[0]
    if not names and model_type in TOWERS:
        return str(model_type)
    raise ModelError(
        f"{directory}/config.json: unsupported architecture {names or model_type!r}; supported are {', '.join(CLASSES)}"
    )


def _read_processor(directory: Path, config: Mapping[str, Any], architecture: str) -> dict[str, Any] | None:
    """The image processor's settings: nested in the newer file, else the older file; None where neither has them."""
    if architecture in IN_CONFIG:
        return {key: config[key] for key in IN_CONFIG[architecture] if key in config}
    newer, older = directory / "processor_config.json", directory / "preprocessor_config.json"
    if newer.is_file():
        nested = _read_json(newer).get("image_processor")
        if isinstance(nested, dict):
            return nested
    return _read_json(older) if older.is_file() else None


def _read_video_processor(directory: Path) -> dict[str, Any] | None:
    """The video processor's settings where transformers looks for them, last in the image processor's file."""
    whole = directory / "processor_config.json"
    if whole.is_file():
        nested = _read_json(whole).get("video_processor")
        if isinstance(nested, dict):
            return nested
    alone, image = directory / "video_preprocessor_config.json", directory / "preprocessor_config.json"
    return next((_read_json(path) for path in (alone, image) if path.is_file()), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read it as JSON: {error}; download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


def tower_class(architecture: str, *, projector: bool = True) -> Any:
    """The Tower class of an architecture, with its `read_config` and `build_planner`."""
    module, name = (TOWERS if projector else UNPROJECTED)[architecture].split(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def _choose_device(device: str | torch.device) -> tuple[torch.device, str]:
    import torch

    if device != "auto":
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            raise ModelError("device is cuda, but torch sees no CUDA device: check the driver, or use --device cpu")
        return torch.device(device), "asked for by name"
    if torch.cuda.is_available():
        return torch.device("cuda"), "a CUDA device is there"
    return torch.device("cpu"), "no CUDA device"


def _choose_dtype(dtype: str, device: torch.device) -> tuple[torch.dtype, str]:
    import torch

    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16, "the dtype of the published weights, on CUDA"
        return torch.float32, "CPUs compute float32 fastest"
    if dtype not in named:
        raise ModelError(f"unknown dtype {dtype!r}: use auto, {', '.join(named)}")
    return named[dtype], "asked for by name"
