"""The ceiling of a replay: what is recorded of a forward, how budgets are filled, and the command with its plot."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch

from opticnerve_server import cli
from opticnerve_server.bench import ceiling
from opticnerve_server.bench.build import Built, build
from opticnerve_server.bench.recorder import Attend, Product, Recorder, attention_runs, products_run, record
from opticnerve_server.buffers import Packing
from opticnerve_server.models import registry
from opticnerve_server.models.base import ImageItem
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.layers import INNER_ALIGNMENT
from opticnerve_server.selftest import write_batch
from opticnerve_server.types import Capacity, ItemPlan

PATH = "default"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint("qwen2_5_vl", directory)
    return str(directory)


def built_from(checkpoint: str) -> Built:
    return build(Namespace(model=checkpoint, device="cpu", dtype="float32", attention_backend="auto", kernels="auto"))


def recorded(built: Built, parts: list[ItemPlan], capacity: Capacity) -> tuple[list[Product], list[Attend]]:
    packing = Packing.of(built.tower.buffers(PATH, capacity))
    block = torch.empty(packing.size, dtype=torch.uint8)
    with torch.inference_mode():
        buffers = write_batch(built.tower, PATH, parts, packing, block, seed=0)
        return record(built.tower, built.attention, PATH, buffers, capacity)


def test_products_are_those_of_the_configuration_over_the_rows_of_the_capacity(checkpoint: str) -> None:
    built = built_from(checkpoint)
    config = built.source.config["vision_config"]
    width, inner, depth = config["hidden_size"], config["intermediate_size"], config["depth"]
    plan = built.tower.planner.plan(ImageItem(168, 112))  # 6 x 4 tokens
    products, _ = recorded(built, [plan], Capacity(units=40, items=1, segments=3, longest=96))
    aligned, rows, patch = -(-inner // INNER_ALIGNMENT) * INNER_ALIGNMENT, 4 * 40, 3 * 2 * 14 * 14
    block = [(width, 3 * width), (width, width), (width, 2 * aligned), (aligned, width)]
    merger = [(4 * width, 4 * width), (4 * width, config["out_hidden_size"])]
    shapes = [(rows, patch, width), *[(rows, *shape) for _ in range(depth) for shape in block]]
    shapes += [(rows // 4, *shape) for shape in merger]
    assert [(product.rows, *product.weight.shape) for product in products] == shapes
    assert sum(product.flops for product in products) == sum(2 * m * k * n for m, k, n in shapes)
    # What joins the stream is added to it instead.
    assert [product.bias is None for product in products] == [True, *[False, True] * (2 * depth), False, False]
    stored = {block.mlp.down.weight.data_ptr() for block in built.tower.blocks}  # type: ignore[attr-defined]
    assert sum(product.weight.data_ptr() in stored for product in products) == depth
    with torch.inference_mode():
        products_run(products, torch.device("cpu"))()


def test_products_are_known_by_whatever_name_torch_has_for_them() -> None:
    weight, bias, x = torch.rand(5, 7), torch.rand(7), torch.rand(3, 5)  # [inputs, outputs]
    with torch.inference_mode(), Recorder() as recorder:
        torch.mm(x, weight)
        torch.addmm(bias, x, weight)
        torch._addmm_activation(bias, x, weight, use_gelu=True)
        torch.nn.functional.linear(x[None, :2], weight.t(), bias)
        torch.nn.functional.linear(x, weight.t())
        torch.bmm(x[None], x.t()[None])  # attention's own, no weight is in it
    assert [product.rows for product in recorder.products] == [3, 3, 3, 2, 3]
    assert [product.bias is bias for product in recorder.products] == [False, True, True, True, False]
    assert all(torch.equal(product.weight, weight) for product in recorder.products)


def test_attention_is_that_of_every_layer_over_the_segments_that_are_there(checkpoint: str) -> None:
    built = built_from(checkpoint)
    plans = [built.tower.planner.plan(ImageItem(*size)) for size in ((168, 112), (112, 112))]
    _, attends = recorded(built, plans, Capacity(units=60, items=4, segments=9, longest=240))
    # Windows are 4 x 4 tokens of 4 rows: of 6 x 4 tokens one and a half, of 4 x 4 one. Full layers: 1 and 3 of 4.
    full = Attend((96, 64), (96, 64), 4, 24, torch.float32)
    windows = Attend((64, 32, 64), (64, 32, 64), 4, 24, torch.float32)
    assert Counter(attends) == {full: 2, windows: 2}
    assert attends == [windows, full, windows, full]
    assert not full.uniform
    assert Attend((64, 64), (9, 9), 4, 24, torch.float32).uniform
    runs, missing = attention_runs(full, 2, torch.device("cpu"))
    assert set(runs) == {"sdpa"}
    assert set(missing) == {"torch_varlen", "flash_attn", "flashinfer"}
    assert "CUDA" in missing["flash_attn"]
    runs["sdpa"]()


def test_what_is_not_recorded_runs_as_before(checkpoint: str) -> None:
    built = built_from(checkpoint)
    plan = built.tower.planner.plan(ImageItem(112, 112))
    _, first = recorded(built, [plan], Capacity(16, 1, 1, 64))
    built.attention.attend(*torch.ones(3, 4, 4, 24), *[torch.tensor([0, 4])] * 2, 4, 4, 4)
    assert len(first) == 4
    assert len(recorded(built, [plan], Capacity(16, 1, 1, 64))[1]) == 4


@pytest.mark.parametrize("model", ["preset:qwen3-vl-8b", "preset:qwen2.5-vl-7b"])
def test_budgets_are_filled_by_images_of_441_tokens_and_by_one(model: str) -> None:
    planner = registry.build_planner(registry.open_model(model, "dummy"))
    found = {
        units: {name: [part.tokens for part in batches[0]] for name, batches in ceiling.fillings(planner, units)}  # type: ignore[arg-type]
        for units in (64, 640, 1024, 5120)
    }
    assert found[64] == {ceiling.ONE: [64]}
    assert found[640][ceiling.MANY] == [441, 198]  # 11 x 18
    assert found[1024][ceiling.MANY] == [441, 441, 140]
    assert found[5120][ceiling.MANY][:11] == [441] * 11
    for units, ways in found.items():
        for tokens in ways.values():
            assert 0.97 * units <= sum(tokens) <= units


def test_the_crossing_is_where_no_larger_budget_replays_faster() -> None:
    def row(budget: int, replay: float, eager: float) -> ceiling.Row:
        return ceiling.Row(budget, ceiling.ONE, 1, budget, replay, 1.0, 1.0, 2.0, "", 1.0, eager)

    rows = [row(64, 1, 9), row(128, 3, 2), row(256, 4, 9), row(512, 9, 8), row(1024, 20, 20)]
    assert ceiling.crossing(rows) == 512
    assert ceiling.crossing([*rows, row(512, 7.9, 8)]) == 512  # as good as equal
    assert ceiling.crossing([*rows, row(512, 7, 8)]) == 1024
    assert ceiling.crossing([*rows, row(1024, 19, 20)]) is None


def test_a_model_of_tiles_is_told_where_its_bench_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint("internvl", tmp_path / "tiles")
    assert cli.main(["bench", "ceiling", "--model", str(tmp_path / "tiles"), "--device", "cpu"]) == 2
    assert "tiles cuts images into tiles: `bench paths` measures its paths" in capsys.readouterr().err


def test_the_command_measures_every_budget_and_draws_it(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceiling, "IMAGE_TOKENS", 100)
    figures, drawn = tmp_path / "ceiling.json", tmp_path / "ceiling.svg"
    model = ["--model", checkpoint, "--device", "cpu", "--dtype", "float32"]
    command = ["bench", "ceiling", *model, "--budgets", "16", "128", "--repeats", "1", "--json", str(figures)]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["budget"], row["filling"], row["images"]) for row in rows] == [
        (16, ceiling.ONE, 1),
        (128, ceiling.MANY, 2),
        (128, ceiling.ONE, 1),
    ]
    for row in rows:
        assert row["ceiling_ms"] == pytest.approx(row["products_ms"] + row["attention_ms"])
        assert f"| {row['replay_ms'] / row['ceiling_ms']:.3f} | {row['eager_ms']:.3f} |" in table
    assert rows[1]["attention"].startswith("2 x sdpa (")  # windows, then whole images
    assert cli.main(["bench", "ceiling", "--from", str(figures), "--plot", str(drawn)]) == 0
    assert capsys.readouterr().out in table
    svg = drawn.read_text()
    for said in ("tokens of the batch", "replay / ceiling", "milliseconds a batch", "eager, host and device"):
        assert f">{said}</text>" in svg


def test_a_budget_below_one_unit_is_an_error_for_people(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "ceiling", "--model", checkpoint, "--device", "cpu", "--dtype", "float32", "--budgets", "0"]
    assert cli.main(command) == 2
    assert "a token budget is 0" in capsys.readouterr().err
