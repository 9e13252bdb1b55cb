"""The planners of tiles against the official image processors: tiling, order, pixels, spans, parts, settings."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2

from golden.make_pixels import synthetic_image
from image_sizes import sizes
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem, PathSpec, PlanError, VideoItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from opticnerve_server.models.tiles import PATH, TilePlanner
from opticnerve_server.types import ItemPlan, PathPlan, Span
from tiny_models import TILES, TINY

PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@pytest.fixture
def planner_of(tmp_path: Path) -> Any:
    """The planner of a small checkpoint whose processor file is changed."""

    def build(architecture: str, **changes: Any) -> TilePlanner:
        directory = Path(tempfile.mkdtemp(dir=tmp_path)) if any(tmp_path.iterdir()) else tmp_path
        write_checkpoint(architecture, directory)
        in_config = architecture in registry.IN_CONFIG
        file = directory / ("config.json" if in_config else "preprocessor_config.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        planner = registry.build_planner(registry.open_model(str(directory), "safetensors"))
        assert isinstance(planner, TilePlanner)
        return planner

    return build


def official_of(planner: TilePlanner, **changes: Any) -> Any:
    size = {"height": planner.side, "width": planner.side}
    if planner.architecture.startswith("internvl"):
        changes["crop_to_patches"] = True
    return TINY[planner.architecture].processor(size=size, image_mean=planner.mean, image_std=planner.std, **changes)


def assert_consistent(planner: TilePlanner, plan: ItemPlan, tiles: int) -> None:
    """Whatever the family: a plan of so many tiles."""
    spec = planner.paths[PATH]
    assert plan.tokens == tiles * spec.tokens_per_unit == sum(span.rows for span in plan.spans)
    assert plan.paths == {PATH: PathPlan(tiles, tiles, spec.rows_per_unit, tiles * planner.side**2 * 3)}
    assert tiles <= spec.max_units
    assert (plan.height, plan.width) == (plan.grid[1] * planner.patch, plan.grid[2] * planner.patch)
    assert [span.kind for span in plan.spans] == ["image"] or len(plan.spans) == tiles > 1


PUBLISHED = {"gemma-3-4b": (1, 4096, 256), "llama-4-scout": (17, 577, 144)}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_path_of_published_models(preset: str) -> None:
    tiles, rows, tokens = PUBLISHED[preset]
    planner = registry.build_planner(registry.open_model(f"preset:{preset}", "dummy"))
    assert planner.paths == {PATH: PathSpec(1, tiles, rows, fixed_units=True, tokens_per_unit=tokens)}


def test_gemma3_is_one_tile_for_every_size(planner_of: Any) -> None:
    planner = planner_of("gemma3")
    for height, width in sizes(14):
        plan = planner.plan(ImageItem(height, width))
        assert_consistent(planner, plan, 1)
        assert plan.spans == (Span("image", 4),)
        assert plan.grid == (1, 8, 8)


def test_pan_and_scan_is_the_official_one_for_every_size(planner_of: Any) -> None:
    planner = planner_of("gemma3", **PAN_AND_SCAN)
    official = official_of(planner)
    numbers = list(PAN_AND_SCAN.values())[1:]
    seen = set()
    ties = [(side, round(side * k / 2) + more) for side in (256, 300, 512) for k in range(2, 11) for more in (-1, 0, 1)]
    for height, width in [*sizes(14), *ties, *[(width, height) for height, width in ties]]:
        # A view of one byte: the crops' sizes follow from the shape alone.
        image = np.broadcast_to(np.zeros(1, np.uint8), (3, height, width))
        crops = official.pan_and_scan(image, *numbers)
        views = planner.rule(height, width)
        assert (views[0].height, views[0].width) == (height, width)
        shapes = [(min(view.height, height - view.top), min(view.width, width - view.left)) for view in views[1:]]
        assert shapes == [crop.shape[1:] for crop in crops]
        plan = planner.plan(ImageItem(height, width))
        assert_consistent(planner, plan, 1 + len(crops))
        if crops:
            wide = width >= height
            places = [(0, i) if wide else (i, 0) for i in range(len(crops))]
            assert plan.spans == (Span("global", 4), *(Span("tile", 4, *place) for place in places))
        seen.add((len(crops), width >= height))
    assert seen == {(0, False), (0, True), *((n, wide) for n in (2, 3, 4) for wide in (False, True))}


def shapes_with_ties(side: int) -> list[tuple[int, int]]:
    """Aspects that several grids have, at areas around half of theirs, where the larger one begins to win."""
    shapes = []
    for rows, columns in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2)):
        for scale in range(1, 13):
            half = round(side * scale * math.sqrt(0.5))
            shapes += [((half + more) * rows, (half + more) * columns) for more in range(-2, 3)]
    return shapes


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 2), (1, 6), (1, 12), (1, 24), (2, 12), (5, 6)])
@pytest.mark.parametrize("architecture", ["internvl", "internvl_chat"])
def test_dynamic_tiles_are_the_official_ones_for_every_size(
    architecture: str, least: int, most: int, planner_of: Any
) -> None:
    keys = ("min_patches", "max_patches") if architecture == "internvl" else ("min_dynamic_patch", "max_dynamic_patch")
    planner = planner_of(architecture, **dict(zip(keys, (least, most), strict=True)))
    side, tokens = planner.side, planner.paths[PATH].tokens_per_unit
    seen, ties = set(), 0
    for height, width in [*sizes(side), *shapes_with_ties(side)]:
        columns, rows = got_ocr2.get_optimal_tiled_canvas((height, width), (side, side), least, most)
        tiles = rows * columns + (rows * columns > 1)
        plan = planner.plan(ImageItem(height, width))
        assert_consistent(planner, plan, tiles)
        assert plan.grid == (1, rows * 4, columns * 4)
        if tiles > 1:
            places = [(row, column) for row in range(rows) for column in range(columns)]
            assert plan.spans == (*(Span("tile", tokens, *place) for place in places), Span("global", tokens))
        seen.add((rows, columns))
        ties += math.gcd(rows, columns) > 1
    assert max(rows * columns for rows, columns in seen) == most
    if least == 1 and most >= 6:
        assert ties >= 100  # of grids that are a smaller one, repeated


def test_the_authors_format_can_do_without_tiles_or_thumbnail(planner_of: Any) -> None:
    bare = planner_of("internvl_chat", use_thumbnail=False)
    plan = bare.plan(ImageItem(50, 150))
    assert_consistent(bare, plan, 3)
    assert [span.kind for span in plan.spans] == ["tile"] * 3
    assert bare.paths[PATH].max_units == 12
    still = planner_of("internvl_chat", dynamic_image_size=False)
    assert_consistent(still, still.plan(ImageItem(50, 150)), 1)
    assert still.paths[PATH].max_units == 1


SETTINGS: dict[str, list[dict[str, Any]]] = {"gemma3": [{}, PAN_AND_SCAN], "internvl": [{}], "internvl_chat": [{}]}
EXACT = {"internvl_chat"}
"""Whose official processor is Pillow's, as the one here is."""
RUNS = [(architecture, changes) for architecture, choices in SETTINGS.items() for changes in choices]


@pytest.mark.parametrize(("architecture", "changes"), RUNS)
def test_whole_runs_of_the_official_processor(architecture: str, changes: dict[str, Any], planner_of: Any) -> None:
    planner = planner_of(architecture, **changes)
    official = official_of(planner, **changes)
    for height, width in [(1, 1), (112, 112), (300, 1300), (900, 280), (480, 640), (13, 300)]:
        plan = planner.plan(ImageItem(height, width))
        image = synthetic_image(height, width) // 2 + 64  # no overshoot, which torch and Pillow clip differently
        found = np.empty(plan.pixel_bytes, np.uint8)
        planner.fill_pixels(image, plan, found)
        output = official(image, input_data_format="channels_last", return_tensors="np").pixel_values
        levels = output.transpose(0, 2, 3, 1) * np.array(planner.std) + np.array(planner.mean)
        tiles: npt.NDArray[np.uint8] = found.reshape(-1, planner.side, planner.side, 3)
        assert tiles.shape == levels.shape
        difference = np.abs(tiles - levels * 255).round()
        assert difference.max() <= (0 if architecture in EXACT else 2)
        assert (difference > 1).mean() <= 1e-3


@pytest.mark.parametrize("architecture", ["gemma3", "internvl"])
def test_files_that_transformers_saves(architecture: str, planner_of: Any, tmp_path: Path) -> None:
    changes = SETTINGS[architecture][-1]
    planner = planner_of(architecture, **changes)
    official_of(planner, **changes).save_pretrained(tmp_path)
    saved = registry.build_planner(registry.open_model(str(tmp_path), "safetensors"))
    for size in ((1, 1), (480, 640), (3000, 1000)):
        assert saved.plan(ImageItem(*size)) == planner.plan(ImageItem(*size))


@pytest.mark.parametrize("architecture", TILES)
def test_what_has_no_plan(architecture: str, planner_of: Any) -> None:
    planner = planner_of(architecture)
    for size in ((0, 5), (5, 0)):
        with pytest.raises(PlanError, match="both sides must be at least 1"):
            planner.plan(ImageItem(*size))
    if "video" not in planner.modalities:
        with pytest.raises(PlanError, match="takes no videos: send their frames as images"):
            planner.plan(VideoItem(8, 2.0, 100, 100))


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_parts_are_full_and_cover_the_item_in_order(most: int, planner_of: Any) -> None:
    planner = planner_of("gemma3", **PAN_AND_SCAN)
    whole = planner.plan(ImageItem(300, 1200))
    assert whole.paths[PATH].units == 5
    parts = planner.split(whole, lambda part: part.paths[PATH].units <= most)
    units = [part.paths[PATH].units for part in parts]
    assert units == [min(most, 5 - begin) for begin in range(0, 5, most)]
    for part in parts:
        assert_consistent(planner, part, part.paths[PATH].units) if len(part.spans) > 1 else None
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum((part.spans for part in parts), ()) == whole.spans


def test_a_tile_that_fits_nowhere_stays_whole(planner_of: Any) -> None:
    planner = planner_of("gemma3", **PAN_AND_SCAN)
    whole = planner.plan(ImageItem(300, 1200))
    assert planner.split(whole, lambda part: False) == [whole]


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("gemma3", "image_processor_type", "SiglipImageProcessor"),
        ("gemma3", "size", {"height": 896, "width": 896}),
        ("gemma3", "size", {"height": 112, "width": 56}),
        ("gemma3", "resample", 3),
        ("gemma3", "do_normalize", False),
        ("gemma3", "do_resize", False),
        ("gemma3", "crop_to_patches", True),
        ("internvl", "resample", 2),
        ("internvl", "size", {"height": 448, "width": 448}),
        ("internvl", "min_patches", 0),
        ("internvl", "min_patches", 13),
        ("internvl", "max_patches", "12"),
        ("internvl", "do_pan_and_scan", True),
        ("internvl_chat", "use_thumbnail", "yes"),
        ("llama4", "max_patches", 0),
        ("llama4", "resize_to_max_canvas", "no"),
        ("llama4", "resample", 3),
        ("llama4", "size", {"height": 336, "width": 336}),
        ("llama4", "image_processor_type", "GotOcr2ImageProcessor"),
        ("internvl_chat", "min_dynamic_patch", 13),
    ],
)
def test_settings_that_are_refused_by_name(architecture: str, key: str, value: object, planner_of: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} is "):
        planner_of(architecture, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pan_and_scan_min_crop_size", 0),
        ("pan_and_scan_min_crop_size", 1.5),
        ("pan_and_scan_max_num_crops", "4"),
        ("pan_and_scan_min_ratio_to_activate", 0.5),
    ],
)
def test_pan_and_scan_that_makes_no_sense_is_refused(key: str, value: object, planner_of: Any) -> None:
    with pytest.raises(ModelError, match=f"{key} is "):
        planner_of("gemma3", **{**PAN_AND_SCAN, key: value})
