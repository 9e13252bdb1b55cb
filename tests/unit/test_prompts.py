"""Expanded prompts are those of transformers' own processors, for every family, from plans alone."""

from __future__ import annotations

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

IMAGES = [ImageItem(100, 230), ImageItem(260, 120)]
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
