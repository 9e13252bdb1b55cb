"""transformers' decoders without their towers, on our rows: the tokens of whole models on pixels. In float32.

Rows come from towers in this process; tests/service/test_decoders.py has the same through servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as hf
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from decoding import continuation, reply, without_towers
from official_prompts import OFFICIAL
from opticnerve import Embedding
from opticnerve.integrations.transformers import encoder_outputs, expand_prompt
from opticnerve_server.models.base import ImageItem, Sampling, VideoItem
from opticnerve_server.models.presets import VIDEO_PROCESSORS
from oracles import Media, llama4_pixels, load_model, media_from, official_patches, planned_media, randomise, save_model
from step3_oracle import VISION, perception, planned_views, write_published
from tiny_models import TINY
from tiny_tokenizer import tiny_tokenizer
from towers import load_tower, run_tower

IMAGE, TALL = ImageItem(252, 224), ImageItem(300, 120)
VIDEO = VideoItem(8, 4.0, 160, 128)
SHORT = VideoItem(8, 4.0, 160, 128, Sampling(num_frames=2))
CASES = {
    "qwen2_vl": [IMAGE, VIDEO],
    "qwen2_5_vl": [IMAGE, TALL],
    "qwen3_vl": [VIDEO, IMAGE],
    "qwen3_vl_moe": [IMAGE, TALL],
    "qwen3_5": [IMAGE, VIDEO],
    "qwen3_5_moe": [TALL],
    "glm4v": [IMAGE, TALL],
    "glm46v": [VIDEO, VIDEO],
    "glm4v_moe": [VIDEO],
    "ernie4_5_vl_moe": [IMAGE, TALL],
    "gemma4": [IMAGE, SHORT],
    "gemma3": [IMAGE, TALL],
    "internvl": [IMAGE, VIDEO, TALL],
    "llama4": [IMAGE, TALL],
}
"""What a prompt has, by model. GLM's of transformers take no images beside videos; ERNIE's videos need its font."""


@pytest.mark.parametrize("architecture", CASES)
def test_tokens_from_rows_are_those_from_pixels(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Llama 4 of transformers 5.24.0 fails without this, at text too.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    model, tower = saved(architecture, tmp_path)
    prompts = [media_of(tower.planner, architecture, shade) for shade in (1, 4)]
    pixels = [pixels_of(architecture, tmp_path, batch) for batch in prompts]
    assert_same_tokens(architecture, model, tower, prompts, pixels)


def saved(architecture: str, directory: Path) -> tuple[Any, Any]:
    """transformers' model and our tower, of one checkpoint."""
    save_model(architecture, directory)
    if architecture in VIDEO_PROCESSORS:
        settings = {**VIDEO_PROCESSORS[architecture], **TINY[architecture].settings}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return load_model(directory), load_tower(directory, projector=architecture != "llama4")


@pytest.mark.parametrize("architecture", ["qwen3_vl", "gemma3"])
def test_beams_and_chunks_say_the_same(architecture: str, tmp_path: Path) -> None:
    model, tower = saved(architecture, tmp_path)
    batch = media_of(tower.planner, architecture, 1)
    replies = replies_of(tower, batch)
    inputs = inputs_of(model, architecture, replies, tiny_tokenizer(**OFFICIAL[architecture].marks))
    pixels = pixels_of(architecture, tmp_path, batch)
    for way in ({"beams": 2}, {"chunk": 8}):
        expected, _ = continuation(model, **way, **inputs, **pixels)
        with without_towers(model):
            outputs = encoder_outputs(model, inputs, replies)
            found, _ = continuation(model, **way, **inputs, mm_encoder_outputs=outputs)
        assert found == expected, way


def test_tokens_of_step3p7(tmp_path: Path) -> None:
    """Its two towers are one with shared weights: whole views and crops."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "share_expert_dim": 16}
    text = {
        "vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 12, "sliding_window": 16, "mlp_layer_types": ["dense", "sparse"],
        **experts,
    }  # fmt: skip
    vision = perception(VISION).config
    model = hf.Step3p7ForConditionalGeneration(
        hf.Step3p7Config(vision_config=vision, text_config=text, image_token_id=60)
    )
    randomise(model.eval(), seed=3)
    projector = model.model.multi_modal_projector.weight.detach()
    write_published(tmp_path, type(model).__name__, model.model.vision_model, projector)
    tower, prompts, pixels = load_tower(tmp_path), [], []
    for seed in (1, 2):
        images = [noise(40, 300, 0), noise(300, 200, seed)]
        prompts.append([media_from(tower.planner, ImageItem(*image.shape[:2]), image) for image in images])
        views = [planned_views(tower.planner, image) for image in images]
        whole, crops = (torch.cat(own) for own in zip(*views, strict=True))
        counts = [len(own) for _, own in views]
        processed = {"pixel_values": whole, "pixel_values_local": crops}
        pixels.append({**processed, "num_local_patches": torch.tensor(counts)})
    assert_same_tokens("step3p7", model, tower, prompts, pixels)


def noise(height: int, width: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def assert_same_tokens(
    architecture: str, model: Any, tower: Any, prompts: list[list[Media]], pixels: list[dict[str, torch.Tensor]]
) -> None:
    """Of two prompts: each has the tokens of its pixels, and others than the other."""
    tokenizer, said = tiny_tokenizer(**OFFICIAL[architecture].marks), []
    for batch, processed in zip(prompts, pixels, strict=True):
        replies = replies_of(tower, batch)
        inputs = inputs_of(model, architecture, replies, tokenizer)
        expected_tokens, expected_logits = continuation(model, **inputs, **processed)
        with without_towers(model):
            outputs = encoder_outputs(model, inputs, replies)
            tokens, logits = continuation(model, **inputs, mm_encoder_outputs=outputs)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
        said.append(tokens)
    assert said[0] != said[1]


def replies_of(tower: Any, batch: list[Media]) -> list[Embedding]:
    rows = run_tower(tower, batch).split([media.plan.tokens for media in batch])
    return [reply(media.plan, own, tower.planner.layout) for media, own in zip(batch, rows, strict=True)]


def media_of(planner: Any, architecture: str, shade: int) -> list[Media]:
    """Noise, that of the last item darkened."""
    side, batch = TINY[architecture].side, []
    for number, item in enumerate(CASES[architecture], 1):
        media = planned_media(planner, item, seed=number)
        frames = media.frames.reshape(-1, side or media.plan.height, side or media.plan.width, 3)
        batch.append(Media(media.plan, frames // shade if number == len(CASES[architecture]) else frames))
    return batch


def inputs_of(model: Any, architecture: str, replies: list[Embedding], tokenizer: Any) -> Any:
    plans = [item.plan for item in replies]
    ids = tokenizer.encode(OFFICIAL[architecture].prompt(plans), add_special_tokens=False)
    return expand_prompt(model.config, ids, plans, tokenizer)


def pixels_of(architecture: str, directory: Path, batch: list[Media]) -> dict[str, torch.Tensor]:
    """What the official processor makes of media that are resized and cut already, by the names of `generate`."""
    if architecture == "llama4":
        return {"pixel_values": llama4_pixels(batch).float()}
    tiny = TINY[architecture]
    if tiny.side:
        processor = tiny.processor.from_pretrained(directory)
        tiles = [tile for media in batch for tile in media.frames]
        return {"pixel_values": processor(tiles, **tiny.as_is, return_tensors="pt").pixel_values}
    if architecture == "gemma4":
        return gemma4_pixels(directory, batch)
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    patches: dict[str, list[torch.Tensor]] = {}
    for media in batch:
        patches.setdefault(names[media.plan.kind], []).append(official_patches(architecture, directory, media))
    return {name: torch.cat(own) for name, own in patches.items()}


def gemma4_pixels(directory: Path, batch: list[Media]) -> dict[str, torch.Tensor]:
    processor, found = TINY["gemma4"].processor.from_pretrained(directory), {}
    for kind, pixels, positions in (
        ("image", "pixel_values", "image_position_ids"), ("video", "pixel_values_videos", "video_position_ids"),
    ):  # fmt: skip
        frames = [frame for media in batch if media.plan.kind == kind for frame in media.frames]
        made = processor(frames, do_resize=False, max_soft_tokens=280, return_tensors="pt")
        found |= {pixels: made["pixel_values"], positions: made["image_position_ids"]}
    counts = [len(media.frames) for media in batch if media.plan.kind == "video"]
    return {**found, "num_frames_per_video": torch.tensor(counts)}
