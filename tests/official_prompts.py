"""Prompts as the processors of transformers write them around media of which our plans tell the sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from transformers.video_utils import VideoMetadata

from opticnerve import ItemPlan


@dataclass(frozen=True)
class Official:
    """Special tokens with the ids that the tiny models have; what a chat template writes for an item; the processor's
    class and what of its attributes the writing of prompts reads."""

    marks: Mapping[str, int]
    image: str
    video: str
    processor: Any
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, plans: Sequence[ItemPlan], between: str = "\n") -> str:
        """A line of the template, the items, and words of a user."""
        items = [self.video if plan.spans[0].kind == "frame" else self.image for plan in plans]
        return "<bos>user\n" + between.join(items) + "\n\nsay what is there"

    def expanded(self, prompt: str, plans: Sequence[ItemPlan], tokenizer: Any) -> dict[str, list[int]]:
        """The ids of the processor, and its token type ids under the names of the model's arguments."""
        processor = self.processor.__new__(self.processor)
        vars(processor).update(self.attributes, **sizes(plans))
        processor.tokenizer = SimpleNamespace(image_token_id=tokenizer.convert_tokens_to_ids("<soft>"))  # Gemma 3's
        for kind in ("image", "video"):
            token = tokenizer.convert_tokens_to_ids(self.attributes.get(f"{kind}_token", ""))
            setattr(processor, f"{kind}_token_id", token)
        images = [plan for plan in plans if plan.spans[0].kind != "frame"]
        videos = [plan for plan in plans if plan.spans[0].kind == "frame"]
        written = [processor.replace_image_token(image_inputs(plan), 0) for plan in images]
        filmed = [processor.replace_video_token(video_inputs(plan), 0) for plan in videos]
        [text], _ = processor.get_text_with_replacements([prompt], written, filmed)
        ids = tokenizer.encode(text, add_special_tokens=False)
        types = {}
        if processor.return_mm_token_type_ids:
            name = "token_type_ids" if self.processor is hf.Gemma3Processor else "mm_token_type_ids"
            types[name] = processor.create_mm_token_type_ids([ids])[0]
        if self.processor is hf.Ernie4_5_VLMoeProcessor:
            types["moe_mm_token_type_ids"] = processor.create_moe_mm_token_type_ids([ids])[0]
        return {"input_ids": ids, **types}


def sizes(plans: Sequence[ItemPlan]) -> dict[str, Any]:
    """What processors of tiles know of all their media: the tokens of a tile, and texts of so many."""
    tile, whole = plans[0].spans[0].rows, plans[0].spans[-1].rows
    return {
        "image_seq_length": tile,
        "full_image_sequence": f"\n\n<boi>{'<soft>' * tile}<eoi>\n\n",
        "patch_feature_placeholder": "<im_patch>" * tile,
        "image_feature_placeholder": "<im_patch>" * whole,
    }


def image_inputs(plan: ItemPlan) -> dict[str, Any]:
    """What the image processors of all families say of an image, for the prompts."""
    tiles = [span for span in plan.spans if span.kind == "tile"]
    rows, columns = (1 + max((getattr(tile, place) for tile in tiles), default=0) for place in ("tile_row", "tile_col"))
    side = plan.processed_height if not tiles else plan.processed_height // rows
    return {
        "image_grid_thw": torch.tensor([plan.grid]),
        "num_patches": [len(plan.spans)],
        "num_crops": [len(plan.spans) - 1],
        "num_soft_tokens_per_image": [plan.tokens],
        "pixel_values": [torch.empty(3, side, side)],
        "aspect_ratios": [(rows, columns)],
        "num_local_patches": [len(tiles)],
        "patch_newline_masks": [[c == columns - 1 and r < rows - 1 for r in range(rows) for c in range(columns)]],
    }


def video_inputs(plan: ItemPlan) -> dict[str, Any]:
    """Likewise of a video of 8 frames a second."""
    metadata = VideoMetadata(total_num_frames=80, fps=8.0, frames_indices=list(plan.frame_indices))
    return {
        "video_grid_thw": torch.tensor([plan.grid]),
        "video_metadata": [metadata],
        "num_soft_tokens_per_video": [plan.spans[0].rows],
        "pixel_values_videos": [torch.empty(len(plan.spans), 1)],
    }


_QWEN_MARKS = {"|vision_start|": 122, "|vision_end|": 123, "|image_pad|": 120, "|video_pad|": 121}
_GLM_MARKS = {
    "|begin_of_image|": 122, "|end_of_image|": 123, "|image|": 120, "|video|": 121,
    "|begin_of_video|": 124, "|end_of_video|": 125,
}  # fmt: skip
_MERGED = {
    "image_processor": SimpleNamespace(merge_size=2),
    "video_processor": SimpleNamespace(merge_size=2, temporal_patch_size=2),
}


def _qwen(processor: Any) -> Official:
    return Official(
        _QWEN_MARKS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|vision_start|><|video_pad|><|vision_end|>",
        processor,
        {
            **_MERGED, "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
        },
    )  # fmt: skip


def _glm(processor: Any) -> Official:
    return Official(
        _GLM_MARKS,
        "<|begin_of_image|><|image|><|end_of_image|>",
        "<|begin_of_video|><|video|><|end_of_video|>",
        processor,
        {
            **_MERGED, "image_token": "<|image|>", "video_token": "<|video|>",
            "video_start_id": 124, "video_end_id": 125,
        },
    )  # fmt: skip


OFFICIAL = {
    "qwen2_vl": _qwen(hf.Qwen2VLProcessor),
    "qwen2_5_vl": _qwen(hf.Qwen2_5_VLProcessor),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen(hf.Qwen3VLProcessor)),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _glm(hf.Glm4vProcessor)),
    "glm46v": _glm(hf.Glm46VProcessor),
    "ernie4_5_vl_moe": Official(
        {"i": 120, "i+": 122, "i-": 123, "v": 121, "v+": 124, "v-": 125},
        "<i+><i><i->",
        "<v+><v><v->",
        hf.Ernie4_5_VLMoeProcessor,
        {
            **_MERGED, "image_token": "<i>", "video_token": "<v>", "image_start_token_id": 122,
            "image_end_token_id": 123, "video_start_token_id": 124, "video_end_token_id": 125,
        },
    ),
    "gemma4": Official(
        {"|image|": 60, "|video|": 61, "boi": 58, "eoi": 59},
        "<|image|>",
        "<|video|>",
        hf.Gemma4Processor,
        {"image_token": "<|image|>", "video_token": "<|video|>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    ),
    "gemma3": Official(
        {"boi": 58, "eoi": 59, "soft": 60}, "<boi>", "", hf.Gemma3Processor, {"image_token": "<boi>"}
    ),
    "internvl": Official(
        {"IMG_CONTEXT": 60, "img": 61, "/img": 62, "video": 63},
        "<IMG_CONTEXT>",
        "<video>",
        hf.InternVLProcessor,
        {
            "image_token": "<IMG_CONTEXT>", "video_token": "<video>",
            "start_image_token": "<img>", "end_image_token": "</img>",
        },
    ),
    "llama4": Official(
        {
            "|tile_x_separator|": 56, "|tile_y_separator|": 57, "|image_start|": 58, "|image_end|": 59, "|patch|": 60,
            "|image|": 61,
        },
        "<|image|>",
        "",
        hf.Llama4Processor,
        {"image_token": "<|image|>", "patch_size": 14, "downsample_ratio": 4},
    ),
    "step3p7": Official(
        {
            "im_patch": 60, "im_start": 61, "im_end": 62, "patch_start": 58, "patch_end": 59, "patch_newline": 57,
        },
        "<im_patch>",
        "",
        hf.Step3p7Processor,
        {"image_token": "<im_patch>"},
    ),
}  # fmt: skip
"""By model_type."""
