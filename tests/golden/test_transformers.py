"""transformers' decoders without their towers, on our rows: the tokens of whole models on pixels. In float32.

Rows come from towers in this process; tests/service/test_decoders.py has the same through servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from decoding import continuation, reply, without_towers
from official_prompts import OFFICIAL
from opticnerve import Embedding
from opticnerve.integrations.transformers import encoder_outputs, expand_prompt
from opticnerve_server.models.base import ImageItem, Sampling, VideoItem
from opticnerve_server.models.presets import VIDEO_PROCESSORS
from oracles import Media, llama4_pixels, load_model, official_patches, planned_media, save_model
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
    save_model(architecture, tmp_path)
    if architecture in VIDEO_PROCESSORS:
        settings = {**VIDEO_PROCESSORS[architecture], **TINY[architecture].settings}
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    model, tower = load_model(tmp_path), load_tower(tmp_path, projector=architecture != "llama4")
    prompts = [media_of(tower.planner, architecture, shade) for shade in (1, 4)]
    tokenizer, said = tiny_tokenizer(**OFFICIAL[architecture].marks), []
    for batch in prompts:
        rows = run_tower(tower, batch).split([media.plan.tokens for media in batch])
        replies = [reply(media.plan, own, tower.planner.layout) for media, own in zip(batch, rows, strict=True)]
        inputs = inputs_of(model, architecture, replies, tokenizer)
        expected_tokens, expected_logits = continuation(model, **inputs, **pixels_of(architecture, tmp_path, batch))
        with without_towers(model):
            outputs = encoder_outputs(model, inputs, replies)
            tokens, logits = continuation(model, **inputs, mm_encoder_outputs=outputs)
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-4)
        said.append(tokens)
    assert said[0] != said[1]


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
