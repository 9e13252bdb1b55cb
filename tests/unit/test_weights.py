"""What the loader reads, what it never opens, and what stops it by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from opticnerve_server.models import registry
from opticnerve_server.models.checkpoint import write_checkpoint
from opticnerve_server.models.registry import ModelError
from opticnerve_server.models.weights import DummyTensors
from oracles import media_for, save_model
from towers import load_tower, run_tower

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v", "ernie4_5_vl_moe", "gemma4")
"""An architecture of every tower class."""


def load(directory: Path, load_format: str = "safetensors", dtype: str = "float32") -> registry.LoadedTower:
    source = registry.open_model(str(directory), load_format)
    planner = registry.build_planner(source)
    return registry.build_tower(
        source, planner, load_format=load_format, device="cpu", dtype=dtype, attention_backend="auto", kernels="auto"
    )


def of_tower(architecture: str, stored: str) -> bool:
    prefixes = registry.tower_class(architecture).prefixes
    return stored.removeprefix("model.").startswith(tuple(prefixes))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture(params=FAMILIES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(architecture: str, tmp_path: Path) -> Path:
    write_checkpoint(architecture, tmp_path / "model", seed=1)
    return tmp_path / "model"


@pytest.mark.parametrize("spoil", ["deleted", "garbage"])
def test_shards_of_the_language_model_are_never_opened(architecture: str, spoil: str, tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_model(architecture, whole)
    save_model(architecture, sharded, shard="9KB")
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    used = {file for name, file in weight_map.items() if of_tower(architecture, name)}
    unused = set(weight_map.values()) - used
    assert len(used) > 2
    assert unused
    for file in unused:
        (sharded / file).unlink()
        if spoil == "garbage":
            (sharded / file).write_bytes(b"\xff" * 64)
    media = [media_for(architecture, 1, 6, 12, seed=0)]
    assert torch.equal(run_tower(load_tower(sharded), media), run_tower(load_tower(whole), media))
    assert load(sharded).weights_digest == load(whole).weights_digest


def test_without_an_index_every_file_is_looked_into(checkpoint: Path) -> None:
    digest = load(checkpoint).weights_digest
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, checkpoint / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, checkpoint / "b.safetensors")
    assert load(checkpoint).weights_digest == digest


@pytest.mark.parametrize("prefix", ["", "model."])
def test_both_prefixes_are_accepted(checkpoint: Path, architecture: str, prefix: str) -> None:
    digest = load(checkpoint).weights_digest

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if of_tower(architecture, name)]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    rewrite(checkpoint, rename)
    assert load(checkpoint).weights_digest == digest


def matrix(architecture: str, tensors: dict[str, torch.Tensor]) -> str:
    """Some tensor of the tower with two axes."""
    return next(name for name in sorted(tensors) if of_tower(architecture, name) and tensors[name].ndim == 2)


def test_both_prefixes_at_once_are_refused(checkpoint: Path, architecture: str) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        name = matrix(architecture, tensors)
        bare = name.removeprefix("model.")
        tensors[bare], tensors[f"model.{bare}"] = tensors[name].clone(), tensors[name].clone()

    rewrite(checkpoint, double)
    with pytest.raises(ModelError, match=r"both .*\.weight and .*\.weight are there"):
        load(checkpoint)


def named(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in tensors if name.endswith(ending))


def test_a_missing_tensor_stops_by_name(checkpoint: Path, architecture: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = matrix(architecture, tensors)
    shape = list(tensors.pop(name).shape)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(
        ModelError, match=re.escape(f"{name.removeprefix('model.')} is missing, expected shape {shape}")
    ):
        load(checkpoint)


def test_a_surplus_tensor_stops_by_name(checkpoint: Path, architecture: str) -> None:
    surplus = [*registry.tower_class(architecture).prefixes][-1] + "blocks.9.norm1.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({surplus: torch.ones(96)}))
    with pytest.raises(ModelError, match=re.escape(f"{surplus} is not part of the tower")):
        load(checkpoint)


def test_a_misshapen_tensor_stops_by_name_with_both_shapes(checkpoint: Path, architecture: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = matrix(architecture, tensors)
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, checkpoint / "model.safetensors")
    message = f"{name} has shape {[rows, columns - 1]}, expected {[rows, columns]}"
    with pytest.raises(ModelError, match=re.escape(message)):
        load(checkpoint)


def test_a_quantised_tensor_stops_by_name(checkpoint: Path, architecture: str) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        name = matrix(architecture, tensors)
        tensors[name] = tensors[name].to(torch.int8)

    rewrite(checkpoint, quantise)
    with pytest.raises(ModelError, match=r"\.weight is torch\.int8.*quantised"):
        load(checkpoint)


def test_a_checkpoint_without_a_tower_is_refused(checkpoint: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, checkpoint / "model.safetensors")
    with pytest.raises(ModelError, match="there is no vision tower"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ("{", "cannot read weight_map"),
        ("{}", "cannot read weight_map"),
        ('{"weight_map": {"TOWER.some.weight": "gone.safetensors"}}', r"\.weight is missing"),
    ],
)
def test_a_broken_index_is_refused(checkpoint: Path, architecture: str, index: str, match: str) -> None:
    prefix = [*registry.tower_class(architecture).prefixes][-1]
    (checkpoint / "model.safetensors.index.json").write_text(index.replace("TOWER.", prefix))
    with pytest.raises(ModelError, match=match):
        load(checkpoint)


def test_a_missing_shard_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    save_model(architecture, tmp_path, shard="60KB")
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = next(file for name, file in weight_map.items() if of_tower(architecture, name))
    (tmp_path / shard).unlink()
    with pytest.raises(ModelError, match=rf"{shard}: cannot open"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00garbage", None])
def test_an_unreadable_file_is_refused_by_name(checkpoint: Path, content: bytes | None) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot open"):
        load(checkpoint)


def test_no_weights_at_all_name_the_remedy(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="--load-format dummy"):
        load(checkpoint)
    assert load(checkpoint, "dummy").tower.planner.architecture


def test_the_digest_is_of_the_towers_stored_bytes(checkpoint: Path, architecture: str) -> None:
    digest = load(checkpoint).weights_digest
    assert load(checkpoint, dtype="bfloat16").weights_digest == digest
    rewrite(checkpoint, lambda tensors: tensors[named(tensors, "embed_tokens.weight")].add_(1))
    assert load(checkpoint).weights_digest == digest
    rewrite(checkpoint, lambda tensors: tensors[matrix(architecture, tensors)][:1].neg_())
    assert load(checkpoint).weights_digest != digest


def test_weights_do_not_change_with_the_file_once_loaded(checkpoint: Path, architecture: str) -> None:
    tower = load_tower(checkpoint, "bfloat16")
    media = [media_for(architecture, 1, 6, 12, seed=0)]
    before = run_tower(tower, media)
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as weights:
        weights.seek(file.stat().st_size // 2)
        weights.write(b"\x00" * (file.stat().st_size // 2))
    assert torch.equal(run_tower(tower, media), before)


def test_dummy_weights_repeat_and_keep_a_deep_tower_finite(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(architecture, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    depth = registry.tower_class(architecture).config_class.key("depth").removeprefix("vision_config.")
    config["vision_config"][depth] = 32
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = load(tmp_path, "dummy", "bfloat16"), load(tmp_path, "dummy", "bfloat16")
    assert first.weights_digest == second.weights_digest
    media = [media_for(architecture, 1, 18, 12, seed=0)]
    rows = run_tower(first.tower, media)
    assert torch.equal(rows, run_tower(second.tower, media))
    assert 0.05 < float(rows.float().std()) < 20


def test_dummy_digests_differ_with_seed_dtype_and_shape() -> None:
    digests = set()
    for seed, dtype, width in ((0, "float32", 4), (1, "float32", 4), (0, "bfloat16", 4), (0, "float32", 5)):
        tensors = DummyTensors(torch.device("cpu"), getattr(torch, dtype), seed)
        tensors.take("blocks.0.norm1.weight", width)
        digests.add(tensors.finish())
    assert len(digests) == 4
