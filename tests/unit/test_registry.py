"""From `--model` to planner and tower: presets, configuration files old and new, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open

from opticnerve_server.attention import AttentionError
from opticnerve_server.attention.sdpa import Sdpa
from opticnerve_server.graphs import GraphManager, plan_capacities
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PlanError, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.config import read_grid_config
from opticnerve_server.models.ernie4_5_vl import Ernie45VLConfig
from opticnerve_server.models.gemma4 import Gemma4Config
from opticnerve_server.models.glm4v import Glm4vConfig
from opticnerve_server.models.presets import PRESETS, PROCESSORS, VIDEO_PROCESSORS
from opticnerve_server.models.qwen2_5_vl import Qwen25VLConfig
from opticnerve_server.models.qwen2_vl import Qwen2VLConfig
from opticnerve_server.models.qwen3_vl import Qwen3VLConfig, Qwen35Config
from opticnerve_server.models.registry import ModelError
from opticnerve_server.types import Launch, Layout

# name: (depth, hidden, intermediate, output, levels), from the published config.json files.
PUBLISHED = {
    "qwen3-vl-2b": (24, 1024, 4096, 2048, 3),
    "qwen3-vl-4b": (24, 1024, 4096, 2560, 3),
    "qwen3-vl-8b": (27, 1152, 4304, 4096, 3),
    "qwen3-vl-32b": (27, 1152, 4304, 5120, 3),
    "qwen3-vl-30b-a3b": (27, 1152, 4304, 2048, 3),
    "qwen3.5-0.8b": (12, 768, 3072, 1024, 0),
    "qwen3.5-4b": (24, 1024, 4096, 2560, 0),
    "qwen3.5-27b": (27, 1152, 4304, 5120, 0),
    "qwen3.5-35b-a3b": (27, 1152, 4304, 2048, 0),
    "qwen3.6-27b": (27, 1152, 4304, 5120, 0),
    "qwen3.6-35b-a3b": (27, 1152, 4304, 2048, 0),
    "qwen2-vl-2b": (32, 1280, 5120, 1536, 0),
    "qwen2.5-vl-3b": (32, 1280, 3420, 2048, 0),
    "qwen2.5-vl-7b": (32, 1280, 3420, 3584, 0),
    "qwen2.5-vl-32b": (32, 1280, 3456, 5120, 0),
    "glm-4.1v-9b": (24, 1536, 13696, 4096, 0),
    "glm-4.5v": (24, 1536, 10944, 4096, 0),
    "ernie-4.5-vl-28b-a3b": (32, 1280, 5120, 2560, 0),
    "gemma-4-e2b": (16, 768, 3072, 1536, 0),
    "gemma-4-e4b": (16, 768, 3072, 2560, 0),
    "gemma-4-26b-a4b": (27, 1152, 4304, 2816, 0),
    "gemma-4-31b": (27, 1152, 4304, 5376, 0),
    "gemma-3-4b": (27, 1152, 4304, 2560, 0),
    "gemma-3-12b": (27, 1152, 4304, 3840, 0),
    "gemma-3-27b": (27, 1152, 4304, 5376, 0),
    "llama-4-scout": (34, 1408, 5632, 5120, 0),
    "llama-4-maverick": (34, 1408, 5632, 5120, 0),
    "kimi-vl-a3b": (27, 1152, 4304, 2048, 0),
}
# architecture: (tokens of the largest item, of 336 x 336 pixels, of 32 x 32), from preprocessor_config.json.
LIMITS = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), (16384, 100, 64)),
    "qwen2_5_vl": (16384, 144, 4),
    "qwen2_vl": (1280, 144, 4),
    "glm4v": (6144, 144, 9),
    "glm4v_moe": (7500, 144, 9),
    "ernie4_5_vl_moe": (6177, 144, 4),
    "gemma4": (2240, 256, 256),  # a video of 32 frames
    "gemma3": (1, 256, 256),
    "internvl": (13, 256, 256),
    "llama4": (17, 144, 144),
    "kimi_vl": (1530, 144, 4),
}


def edit(directory: Path, file: str, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = {**json.loads((directory / file).read_text()), **changes}
    (directory / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint("qwen3_vl", tmp_path / "tiny-model")
    return tmp_path / "tiny-model"


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, opticnerve_server.models.registry; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_preset_of_two_paths_is_the_published_configuration() -> None:
    source = registry.open_model("preset:deepseek-ocr", "dummy")
    config = registry.tower_class(source.architecture).read_config(source.config)
    assert (config.sam_layers, config.sam_width, config.sam_heads, config.sam_global) == (12, 768, 12, (2, 5, 8, 11))
    assert (config.clip_layers, config.clip_width, config.clip_heads, config.clip_side) == (24, 1024, 16, 16)
    planner = registry.build_planner(source)
    assert planner.layout.width == 1280
    tokens = {name: (spec.tokens_per_unit, spec.rows_per_unit) for name, spec in planner.paths.items()}
    assert tokens == {"global": (272, 4096), "local": (100, 1600)}


def test_the_preset_of_a_perception_encoder_is_the_published_configuration() -> None:
    source = registry.open_model("preset:step-3.7-flash", "dummy")
    config = registry.tower_class(source.architecture).read_config(source.config)
    assert (config.depth, config.hidden_size, config.head_dim, config.intermediate_size) == (47, 1536, 96, 8960)
    planner = registry.build_planner(source)
    assert planner.layout.width == 4096
    tokens = {name: (spec.tokens_per_unit, spec.rows_per_unit) for name, spec in planner.paths.items()}
    assert tokens == {"global": (169, 2704), "local": (81, 1296)}


def test_every_preset_is_the_published_configuration() -> None:
    assert PRESETS.keys() - {"deepseek-ocr", "step-3.7-flash"} == PUBLISHED.keys()
    for name, (depth, hidden, intermediate, output, levels) in PUBLISHED.items():
        source = registry.open_model(f"preset:{name}", "dummy")
        config = registry.tower_class(source.architecture).read_config(source.config)
        assert (config.depth, config.hidden_size, config.intermediate_size) == (depth, hidden, intermediate)
        planner = registry.build_planner(source)
        assert planner.layout == Layout(output, levels)
        assert planner.architecture == source.architecture
        largest, usual, small = LIMITS[source.architecture]
        assert planner.paths["default"].max_units == largest
        assert planner.plan(ImageItem(336, 336)).tokens == usual
        assert planner.plan(ImageItem(32, 32)).tokens == small


@pytest.mark.parametrize(
    ("model", "load_format", "match"),
    [
        ("preset:qwen9", "dummy", r"unknown preset 'qwen9'.*qwen3-vl-2b"),
        ("preset:qwen3-vl-2b", "safetensors", "has no weights: use --load-format dummy"),
        ("/nowhere", "safetensors", r"/nowhere: no config\.json.*preset:NAME"),
    ],
)
def test_models_that_cannot_be_opened(model: str, load_format: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        registry.open_model(model, load_format)


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_rows_before_the_projector_are_refused_where_no_decoder_takes_them(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path / "tiny")
    if architecture == "llama4":
        source = registry.open_model(str(tmp_path / "tiny"), "safetensors", projector=False)
        assert registry.build_planner(source).layout == Layout(80, 0, projector_applied=False)
        return
    with pytest.raises(ModelError, match=rf"--no-projector is for llama4: rows of {architecture} \(tiny\) have one"):
        registry.open_model(str(tmp_path / "tiny"), "safetensors", projector=False)


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_a_written_checkpoint_loads_and_repeats(architecture: str, tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(architecture, tmp_path / name, seed)
        source = registry.open_model(str(tmp_path / name), "safetensors")
        assert (source.name, source.architecture) == (name, architecture)
        loaded = registry.build_tower(
            source,
            registry.build_planner(source),
            load_format="safetensors",
            device="cpu",
            dtype="auto",
            attention_backend="auto",
            kernels="auto",
        )
        digests.append(loaded.weights_digest)
        assert loaded.tower.dtype == torch.float32
        assert loaded.attention_backend == "sdpa"
        assert loaded.reasons.keys() == {"device", "dtype", "attention_backend", "kernels"}
        assert all(loaded.reasons.values())
        with safe_open(tmp_path / name / "model.safetensors", framework="pt") as file:
            assert any("embed_tokens" in stored for stored in file.keys())  # noqa: SIM118
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("architecture", [name for name in registry.ARCHITECTURES if name in VIDEO_PROCESSORS])
def test_a_written_checkpoint_sees_videos_as_published(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path)
    source = registry.open_model(str(tmp_path), "safetensors")
    planner = registry.build_planner(source)
    video = VideoItem(64, 24.0, 480, 640)
    if architecture == "ernie4_5_vl_moe":
        with pytest.raises(PlanError, match=r"font 'Roboto-Regular.ttf' is no font file beside it"):
            planner.plan(video)
        return
    plan = planner.plan(video)
    assert (plan.kind, plan.tokens > 0) == ("video", True)
    if architecture == "internvl":
        return  # its tiles are made smaller
    published = dataclasses.replace(source, video_processor=VIDEO_PROCESSORS[architecture])
    assert plan == registry.build_planner(published).plan(video)


def test_an_unknown_architecture_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown architecture 'llava'.*qwen3_vl"):
        write_checkpoint("llava", tmp_path)


def test_the_architecture_is_that_of_the_class_or_of_the_model_type(checkpoint: Path) -> None:
    edit(checkpoint, "config.json", model_type="something")
    assert registry.open_model(str(checkpoint), "safetensors").architecture == "qwen3_vl"
    edit(checkpoint, "config.json", architectures=None, model_type="qwen3_vl_moe")
    assert registry.open_model(str(checkpoint), "safetensors").architecture == "qwen3_vl_moe"
    edit(checkpoint, "config.json", architectures=["LlavaForConditionalGeneration"])
    with pytest.raises(ModelError, match=r"unsupported architecture \['Llava.*Qwen2_5_VLForConditionalGeneration"):
        registry.open_model(str(checkpoint), "safetensors")


def test_processor_files_old_and_new(checkpoint: Path) -> None:
    older = checkpoint / "preprocessor_config.json"
    settings = json.loads(older.read_text())
    assert registry.open_model(str(checkpoint), "safetensors").processor == settings
    nested = {**settings, "size": {"shortest_edge": 4096, "longest_edge": 8192}}
    (checkpoint / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    assert registry.open_model(str(checkpoint), "safetensors").processor == nested
    (checkpoint / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
    assert registry.open_model(str(checkpoint), "safetensors").processor == settings
    older.unlink()
    with pytest.raises(ModelError, match="save the model's image processor there"):
        registry.open_model(str(checkpoint), "safetensors")
    assert registry.open_model(str(checkpoint), "dummy").processor == PROCESSORS["qwen3_vl"]


@pytest.mark.parametrize(("file", "content"), [("config.json", "{"), ("config.json", "[]"), ("config.json", "\x00")])
def test_unreadable_json_is_refused_by_name(checkpoint: Path, file: str, content: str) -> None:
    (checkpoint / file).write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: .*JSON"):
        registry.open_model(str(checkpoint), "safetensors")


def test_a_processor_that_does_not_fit_the_tower_is_refused(checkpoint: Path) -> None:
    edit(checkpoint, "preprocessor_config.json", patch_size=14)
    with pytest.raises(ModelError, match=r"image processor of tiny-model: patch_size is 14, must be 16"):
        registry.build_planner(registry.open_model(str(checkpoint), "safetensors"))


def test_class_defaults_and_old_keys() -> None:
    old = {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_5_vl", "depth": None}
    assert read_grid_config(Qwen25VLConfig, {"vision_config": old}) == Qwen25VLConfig(hidden_size=1280)
    default = read_grid_config(Qwen3VLConfig, {"vision_config": {}})
    assert (default.depth, default.head_dim, default.deepstack_visual_indexes) == (27, 72, (8, 16, 24))
    for rope_type in ("axial", "default"):
        rope = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500}}
        assert read_grid_config(Qwen3VLConfig, {"vision_config": rope}).rope_theta == 500.0


# Class, its counterpart in transformers, and the fields that this has not.
CONFIGS = [
    (Qwen3VLConfig, hf.Qwen3VLVisionConfig, ()),
    (Qwen35Config, hf.Qwen3_5VisionConfig, ("deepstack_visual_indexes",)),
    (Qwen2VLConfig, hf.Qwen2VLVisionConfig, ()),
    (Qwen25VLConfig, hf.Qwen2_5_VLVisionConfig, ()),
    (Glm4vConfig, hf.Glm4vVisionConfig, ()),
    (Ernie45VLConfig, hf.Ernie4_5_VLMoeVisionConfig, ("temporal_patch_size",)),
    (Gemma4Config, hf.Gemma4VisionConfig, ("temporal_patch_size", "in_channels")),
]


@pytest.mark.parametrize(("config", "official", "absent"), CONFIGS, ids=lambda value: getattr(value, "__name__", ""))
def test_class_defaults_are_those_of_transformers(config: Any, official: Any, absent: tuple[str, ...]) -> None:
    parsed, reference = read_grid_config(config, {"vision_config": {}, "text_config": {"hidden_size": 64}}), official()
    for field in dataclasses.fields(config):
        section, _, key = config.key(field.name).partition(".")
        if field.name in absent or section == "text_config":
            continue
        expected = reference.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(reference, key)
        assert getattr(parsed, field.name) == expected, key


def test_keys_of_other_names_and_sections() -> None:
    file = {"vision_config": {"embed_dim": 64, "hidden_size": 96, "num_heads": 4, "in_chans": 3, "mlp_ratio": 2}}
    read = read_grid_config(Qwen2VLConfig, file)
    assert (read.hidden_size, read.out_hidden_size, read.intermediate_size, read.head_dim) == (64, 96, 128, 16)
    with pytest.raises(ModelError, match=r"vision_config\.embed_dim 60 over num_heads 16"):
        read_grid_config(Qwen2VLConfig, {"vision_config": {"embed_dim": 60}})
    with pytest.raises(ModelError, match=r"no text_config\.hidden_size"):
        read_grid_config(Gemma4Config, {"vision_config": {}, "text_config": {}})
    with pytest.raises(ModelError, match=r"text_config\.rms_norm_eps is 'small', must be float"):
        read_grid_config(Ernie45VLConfig, {"vision_config": {}, "rms_norm_eps": "small"})


@pytest.mark.parametrize(
    ("config", "vision", "match"),
    [
        (Qwen35Config, {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes is \[1\], this family has none"),
        (Glm4vConfig, {"image_size": 13}, r"image_size 13 is below a patch of 14"),
        (Glm4vConfig, {"attention_bias": 1}, r"attention_bias is 1, must be bool"),
        (Ernie45VLConfig, {"temporal_merge_size": 4}, r"temporal_merge_size is 4, this family's is 2"),
        (Ernie45VLConfig, {"temporal_patch_size": 2}, r"temporal_patch_size is 2, this family's is 1"),
        (
            Gemma4Config,
            {"num_key_value_heads": 4},
            r"num_key_value_heads is 4, only that of num_attention_heads \(12\)",
        ),
        (Gemma4Config, {"head_dim": 66}, r"head_dim is 66, must be a multiple of 4"),
        (Gemma4Config, {"hidden_activation": "relu"}, r"hidden_activation is 'relu'"),
        (Gemma4Config, {"num_hidden_layers": 0}, r"num_hidden_layers is 0, must be at least 1"),
        (Gemma4Config, {"temporal_patch_size": 2}, r"temporal_patch_size is 2, this family's is 1"),
    ],
)
def test_configurations_that_no_tower_of_a_family_has(config: Any, vision: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_grid_config(config, {"vision_config": vision, "text_config": {"hidden_size": 64}})


@pytest.mark.parametrize(
    ("vision", "match"),
    [
        ({"depth": "27"}, r"vision_config\.depth is '27', must be int"),
        ({"depth": True}, r"vision_config\.depth is True, must be int"),
        ({"depth": 0}, r"vision_config\.depth is 0, must be at least 1"),
        ({"in_chans": 1}, r"in_channels is 1, only RGB"),
        ({"num_heads": 7}, r"hidden_size 1152 over num_heads 7"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu', this family's is 'gelu_pytorch_tanh'"),
        ({"num_position_embeddings": 2300}, r"2300, must be a square"),
        ({"deepstack_visual_indexes": [8, 27]}, r"\[8, 27\], must be different layers below depth 27"),
        ({"deepstack_visual_indexes": [8, 8]}, r"\[8, 8\], must be different layers"),
        ({"deepstack_visual_indexes": "8"}, r"deepstack_visual_indexes is '8'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_type is 'yarn'"),
    ],
)
def test_configurations_that_no_tower_has(vision: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_grid_config(Qwen3VLConfig, {"vision_config": vision})


def test_a_configuration_without_a_vision_part_is_refused() -> None:
    with pytest.raises(ModelError, match=r"config\.json: there is no vision_config, .*; take the one"):
        read_grid_config(Qwen3VLConfig, {"hidden_size": 4096})


def test_a_window_smaller_than_a_token_is_refused() -> None:
    with pytest.raises(ModelError, match=r"window_size 20 is below a token"):
        read_grid_config(Qwen25VLConfig, {"vision_config": {"window_size": 20}})


def test_an_unknown_dtype_or_load_format_is_refused(checkpoint: Path) -> None:
    source = registry.open_model(str(checkpoint), "safetensors")
    planner = registry.build_planner(source)
    for change, match in (({"dtype": "int8"}, "unknown dtype 'int8'"), ({"load_format": "pt"}, "unknown load format")):
        choices = {
            "load_format": "safetensors",
            "device": "cpu",
            "dtype": "auto",
            "attention_backend": "auto",
            "kernels": "auto",
            **change,
        }
        with pytest.raises(ModelError, match=match):
            registry.build_tower(source, planner, **choices)


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_a_backend_is_said_to_run_where_it_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(architecture, tmp_path)
    source = registry.open_model(str(tmp_path), "safetensors")
    planner = registry.build_planner(source)

    def build(backend: str) -> registry.LoadedTower:
        return registry.build_tower(
            source,
            planner,
            load_format="safetensors",
            device="cpu",
            dtype="float32",
            attention_backend=backend,
            kernels="auto",
        )

    ran = []
    attend = Sdpa.attend
    monkeypatch.setattr(Sdpa, "attend", lambda *arguments: ran.append(1) or attend(*arguments))
    tower = build("sdpa").tower
    capacities = plan_capacities(planner.paths, explicit={}, cap=256, max_items=1, launch=Launch.ROWS)
    with torch.inference_mode():
        GraphManager(tower, capacities).estimate()
    dense = architecture in registry.DENSE
    assert dense is not bool(ran)
    match = f"nothing to do in {architecture}, .* use auto or sdpa" if dense else "cannot run here"
    with pytest.raises(AttentionError, match=match):
        build("torch_varlen")
