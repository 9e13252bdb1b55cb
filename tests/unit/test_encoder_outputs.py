"""What a decoder of transformers would take without a word, or fail at, is refused before; the rest is handed over."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opticnerve import Embedding, Grid, ItemPlan, Span, Timings
from opticnerve.integrations.transformers import encoder_outputs, expand_prompt
from tiny_models import TINY

HIDDEN, LEVELS = 48, 3
"""Of the tiny Qwen3-VL."""


def plan_of(rows: int, *, frames: int = 0) -> ItemPlan:
    """An image of `rows` tokens in one line, or a video of so many frames of them."""
    spans = tuple(Span("frame" if frames else "image", rows, 0, 0, float(time)) for time in range(frames or 1))
    times = tuple(span.timestamp for span in spans if frames)
    tokens = rows * len(spans)
    return ItemPlan(Grid(len(spans), 2, 2 * rows), 2, 32, 32 * rows, tokens, spans, (), times, 0.5 if frames else 0.0)


def embedding(plan: ItemPlan, hidden: int = HIDDEN, levels: int = LEVELS, *, projected: bool = True) -> Embedding:
    rows = np.random.default_rng(plan.tokens).standard_normal((plan.tokens, hidden * (1 + levels)), np.float32)
    return Embedding(rows, hidden, plan, b"", 0, (), Timings(0, 0, 0, 0, 0, 0), False, "", projected)


def tiny(architecture: str) -> Any:
    build = TINY[architecture].build
    assert build is not None
    return build({}).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen3_vl")


MEDIA = [embedding(plan_of(3)), embedding(plan_of(5))]


def inputs_for(model: Any, media: list[Embedding]) -> Any:
    prompt = [7, *(token for _ in media for token in (122, 120, 123, 9))]
    return expand_prompt(model.config, prompt, [item.plan for item in media])


def test_rows_go_to_their_items_and_levels(model: Any) -> None:
    output = encoder_outputs(model, inputs_for(model, MEDIA), MEDIA)["image"]
    for number, item in enumerate(MEDIA):
        levels = [output.pooler_output[number], *(level[number] for level in output.deepstack_features)]
        for found, expected in zip(levels, [item.main, *item.deepstack], strict=True):
            np.testing.assert_array_equal(found.numpy(), expected)


def test_prompts_may_come_as_a_padded_batch(model: Any) -> None:
    """Padding on the left, items of one prompt after those of the other."""
    alone = [inputs_for(model, [item]) for item in MEDIA]
    short, long = (inputs["input_ids"].shape[1] for inputs in alone)
    pad = torch.nn.functional.pad
    batch = {
        name: torch.cat([pad(alone[0][name], (long - short, 0)), alone[1][name]])
        for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    batch["image_grid_thw"] = torch.cat([inputs["image_grid_thw"] for inputs in alone])
    outputs = encoder_outputs(model, batch, MEDIA)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found = model.generate(**batch, mm_encoder_outputs=outputs, **settings, return_dict_in_generate=True)
    for row, (inputs, item) in enumerate(zip(alone, MEDIA, strict=True)):
        own = encoder_outputs(model, inputs, [item])
        expected = model.generate(**inputs, mm_encoder_outputs=own, **settings, return_dict_in_generate=True)
        torch.testing.assert_close(found.logits[0][row], expected.logits[0][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mm_token_type_ids", "image_grid_thw"])
def test_what_the_model_does_not_miss_is_missed(model: Any, name: str) -> None:
    inputs = inputs_for(model, MEDIA)
    del inputs[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        encoder_outputs(model, inputs, MEDIA)


def test_type_ids_of_text_alone_are_refused(model: Any) -> None:
    inputs = inputs_for(model, MEDIA)
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["mm_token_type_ids"])
    with pytest.raises(ValueError, match="mm_token_type_ids is not that of these items"):
        encoder_outputs(model, inputs, MEDIA)


def test_grids_of_other_items_are_refused(model: Any) -> None:
    inputs = inputs_for(model, MEDIA)
    for other in (inputs["image_grid_thw"].flip(1), inputs["image_grid_thw"][:1]):
        with pytest.raises(ValueError, match="image_grid_thw is not that of these items"):
            encoder_outputs(model, {**inputs, "image_grid_thw": other}, MEDIA)


def test_token_types_of_gemma3_are_missed() -> None:
    gemma, item = tiny("gemma3"), embedding(plan_of(4), hidden=24, levels=0)
    ids = torch.tensor([[7, 58, 60, 60, 60, 60, 59, 9]])
    types = (ids == 60).long()
    output = encoder_outputs(gemma, {"input_ids": ids, "token_type_ids": types}, [item])["image"]
    assert output.pooler_output.shape == (1, 4, 24)
    with pytest.raises(ValueError, match="token_type_ids is missing"):
        encoder_outputs(gemma, {"input_ids": ids}, [item])


def test_rows_and_placeholders_must_be_as_many(model: Any) -> None:
    inputs, (first, second) = inputs_for(model, MEDIA), MEDIA
    short = embedding(plan_of(4))
    for media, message in (
        ([first, short], "item 1, image of 4 rows, needs 4 more placeholders .* has 5 of token 120"),
        ([second, first], "item 0, image of 5 rows, needs 2 more placeholders .* has 5 of token 120"),
        ([first], "has 5 more placeholders than the 1 items"),
        ([first, second, first], "item 2, image of 3 rows, needs 3 more placeholders .* has no more"),
        ([first, embedding(plan_of(5, frames=1))], "item 1, video of 5 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder_outputs(model, inputs, media)


def test_placeholders_of_one_item_in_two_places_are_refused(model: Any) -> None:
    inputs = inputs_for(model, MEDIA)
    with pytest.raises(
        ValueError, match=r"item 0: its 8 placeholders are in runs of \[3, 5\], its spans have \[8\] rows"
    ):
        encoder_outputs(model, inputs, [embedding(plan_of(8))])
    film = embedding(plan_of(4, frames=2))
    apart = {"input_ids": torch.tensor([[121] * 4, [121] * 4])}
    with pytest.raises(ValueError, match="item 0: its 8 placeholders"):
        encoder_outputs(model, apart, [film])


def test_placeholders_of_two_items_that_touch_are_refused(model: Any) -> None:
    """M-RoPE would take them for one item."""
    with pytest.raises(ValueError, match="item 0, image of 3 rows"):
        expand_prompt(model.config, [7, 120, 120, 9], [item.plan for item in MEDIA])


def test_rows_of_another_width_are_refused(model: Any) -> None:
    inputs = inputs_for(model, MEDIA)
    for wrong in (embedding(plan_of(5), levels=0), embedding(plan_of(5), hidden=24), embedding(plan_of(5), levels=4)):
        with pytest.raises(
            ValueError, match=r"item 1: the rows are \d+ wide, \d+ a level; this decoder takes 4 levels of 48"
        ):
            encoder_outputs(model, inputs, [MEDIA[0], wrong])


def test_rows_of_the_wrong_side_of_the_projector_are_refused(model: Any) -> None:
    """Also where both have one width."""
    unprojected = [replace(item, projector_applied=False) for item in MEDIA]
    with pytest.raises(ValueError, match=r"before the projector.* start the server without --no-projector"):
        encoder_outputs(model, inputs_for(model, MEDIA), unprojected)
    llama = SimpleNamespace(config=tiny("llama4").config, forward=model.forward)
    for width in (20, 24):
        with pytest.raises(ValueError, match=r"behind the projector.* start the server with --no-projector"):
            encoder_outputs(llama, {}, [embedding(plan_of(4), hidden=width, levels=0)])


def test_a_video_of_qwen2_5_has_its_seconds() -> None:
    """Those of a video that was sent as patches are its caller's."""
    qwen, film = tiny("qwen2_5_vl"), embedding(plan_of(4, frames=2), levels=0)
    inputs = expand_prompt(qwen.config, [122, 121, 123], [film.plan])
    assert inputs["second_per_grid_ts"].tolist() == [0.5]
    for seconds, message in (
        ([0.25], "is not that of these"),
        ([0.5, 0.5], "is not that of these"),
        (None, "is missing"),
    ):
        with pytest.raises(ValueError, match=f"second_per_grid_ts {message}"):
            encoder_outputs(qwen, {**inputs, "second_per_grid_ts": seconds}, [film])
    patches = replace(film, plan=replace(film.plan, second_per_grid_ts=0.0))
    assert encoder_outputs(qwen, {**inputs, "second_per_grid_ts": [0.25]}, [patches])["video"].pooler_output[
        0
    ].shape == (8, 48)


def test_images_beside_videos_are_refused_where_transformers_fails_at_them() -> None:
    glm, media = tiny("glm4v"), [embedding(plan_of(3), levels=0), embedding(plan_of(4, frames=2), levels=0)]
    with pytest.raises(ValueError, match="glm4v of transformers takes no images and videos at once: use two prompts"):
        encoder_outputs(glm, {}, media)


def test_a_transformers_without_the_argument_is_named(model: Any) -> None:
    old = SimpleNamespace(config=model.config, forward=lambda input_ids: None)
    with pytest.raises(ImportError, match=r"install 5\.18 or newer"):
        encoder_outputs(old, inputs_for(model, MEDIA), MEDIA)
