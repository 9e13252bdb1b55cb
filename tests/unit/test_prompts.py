"""Expanded prompts are those of transformers' own processors, for every family, from plans alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from official_prompts import OFFICIAL
from opticnerve import Grid, ItemPlan, Span
from opticnerve.integrations.families import FAMILIES
from opticnerve.integrations.transformers import expand_prompt
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.wire import plan_message
from tiny_models import TINY
from tiny_tokenizer import tiny_tokenizer

IMAGES = [ImageItem(100, 230), ImageItem(50, 50)]
"""Of several tiles, and of one."""

VIDEO = VideoItem(80, 8.0, 90, 140)
FOLDED = ItemPlan(Grid(4, 8, 8), 2, 112, 112, 32, (Span("frame", 16, 0, 0, 0.0),) * 2, (0, 4, 8, 12), (0.0,), 0.0)
"""A video of ERNIE, of which checkpoints without its font make none."""


def config_of(model_type: str) -> Any:
    if model_type == "step3p7":
        return hf.Step3p7Config(image_token_id=60)
    build = TINY[model_type].build
    assert build is not None
    with torch.device("meta"):
        return build({}).config


def plans_of(model_type: str, directory: Path) -> list[ItemPlan]:
    """Of two images, and of a video between them where the model takes some."""
    write_checkpoint(model_type, directory)
    planner = registry.build_planner(registry.open_model(str(directory), "safetensors"))
    takes_videos = OFFICIAL[model_type].video and model_type != "ernie4_5_vl_moe"
    items = [IMAGES[0], *([VIDEO] if takes_videos else []), IMAGES[1]]
    plans = [ItemPlan.from_wire(plan_message(planner.plan(item))) for item in items]
    return [*plans, FOLDED] if model_type == "ernie4_5_vl_moe" else plans


def test_every_family_has_an_oracle() -> None:
    assert OFFICIAL.keys() == FAMILIES.keys()


@pytest.mark.parametrize("model_type", OFFICIAL)
def test_prompts_are_those_of_the_official_processor(model_type: str, tmp_path: Path) -> None:
    official, plans, config = OFFICIAL[model_type], plans_of(model_type, tmp_path), config_of(model_type)
    tokenizer = tiny_tokenizer(**official.marks)
    for between in ("\n", " ", "", "compare <eos>"):
        prompt = official.prompt(plans, between)
        expected = official.expanded(prompt, plans, tokenizer)
        inputs = expand_prompt(config, tokenizer.encode(prompt, add_special_tokens=False), plans, tokenizer)
        found = {name: inputs[name].tolist() for name in inputs if name.endswith("_ids")}
        assert found == {name: [ids] for name, ids in expected.items()}
        assert inputs["attention_mask"].tolist() == [[1] * len(expected["input_ids"])]


def image_plan(*rows: int) -> ItemPlan:
    """Of one image in views of so many rows."""
    kinds = ["image"] if len(rows) == 1 else ["global", *["tile"] * (len(rows) - 1)]
    spans = tuple(Span(kind, count, 0, place, 0.0) for place, (kind, count) in enumerate(zip(kinds, rows, strict=True)))
    return ItemPlan(Grid(1, 2, 2 * sum(rows)), 2, 32, 32, sum(rows), spans, (), (), 0.0)


def test_crops_of_gemma3_are_announced() -> None:
    official, plans = OFFICIAL["gemma3"], [image_plan(4, 4, 4), image_plan(4)]
    tokenizer = tiny_tokenizer(**official.marks)
    prompt = official.prompt(plans)
    inputs = expand_prompt(config_of("gemma3"), tokenizer.encode(prompt, add_special_tokens=False), plans, tokenizer)
    assert inputs["input_ids"].tolist() == [official.expanded(prompt, plans, tokenizer)["input_ids"]]


# --- refusals


def test_placeholders_that_are_not_those_of_the_items_are_refused() -> None:
    config, image = config_of("qwen2_5_vl"), image_plan(3)
    for prompt, there in (([7], "nothing"), ([120, 120], "image, image"), ([121], "video")):
        with pytest.raises(ValueError, match=f"placeholders of {there} for image: it must have one for each"):
            expand_prompt(config, prompt, [image])
    with pytest.raises(ValueError, match="placeholders of image for nothing"):
        expand_prompt(config, [120], [])


def test_a_model_that_transformers_gives_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="clip is none of qwen2_vl, "):
        expand_prompt(hf.CLIPConfig(), [7], [])


def test_a_tokenizer_is_asked_for_where_a_prompt_has_words() -> None:
    with pytest.raises(ValueError, match=r"prompts of gemma3 have words .* give its tokenizer"):
        expand_prompt(config_of("gemma3"), [58], [image_plan(4)])
    with pytest.raises(ValueError, match="no token '<img>': it is not that of a internvl"):
        expand_prompt(config_of("internvl"), [60], [image_plan(4)], tiny_tokenizer(IMG_CONTEXT=60, video=61))


def test_a_video_whose_times_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="sent as patches"):
        expand_prompt(config_of("qwen3_vl"), [122, 121, 123], [replace(FOLDED, timestamps=())], tiny_tokenizer(v=121))
    with pytest.raises(ValueError, match="sent as patches"):
        expand_prompt(config_of("qwen2_5_vl"), [122, 121, 123], [FOLDED])


def test_tokens_that_are_not_those_of_their_text_are_refused() -> None:
    tokenizer = tiny_tokenizer(**OFFICIAL["gemma3"].marks)
    newline = tokenizer.convert_tokens_to_ids("\n")
    with pytest.raises(ValueError, match="beside the media are not those that the tokenizer makes of their text"):
        expand_prompt(config_of("gemma3"), [newline, newline, 58], [image_plan(4)], tokenizer)
