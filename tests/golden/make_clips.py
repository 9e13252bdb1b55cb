"""Writes clips.json for `test_clips.py`: what the official video processors make of videos.

They need torchvision, which continuous integration has not. To run this again, in an environment of its own:
    python -m venv clips && clips/bin/pip install torch torchvision "transformers==5.24.*"
    clips/bin/python tests/golden/make_clips.py
"""

from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_name("clips.json")

PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    },
    "qwen2_vl": {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": True, "fps": 2},
    "qwen3_vl": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    },
    "glm4v": {"video_processor_type": "Glm4vVideoProcessor"},
    "glm46v": {"video_processor_type": "Glm46VVideoProcessor"},
    "ernie4_5_vl_moe": {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor", "draw_on_frames": False},
    "gemma4": {"video_processor_type": "Gemma4VideoProcessor"},
}
"""By architecture; values that are not given are class defaults."""

OVERRIDES: dict[str, list[dict[str, Any]]] = {
    "qwen2_5_vl": [{"fps": 2}, {"fps": 0.7, "max_frames": 31}, {"num_frames": 7}, {"num_frames": 64}],
    "qwen2_vl": [{"fps": 1.5}, {"num_frames": 1}, {"num_frames": 30}, {"min_frames": 9}, {"max_frames": 3}],
    "qwen3_vl": [{"fps": 4}, {"num_frames": 2}, {"num_frames": 33}, {"fps": 1, "min_frames": 11, "max_frames": 50}],
    "glm4v": [{"fps": 1}, {"fps": 7.5}],
    "glm46v": [],
    "ernie4_5_vl_moe": [{"fps": 0.9}, {"num_frames": 16}, {"num_frames": 8}, {"fps": 2, "max_frames": 333}],
    "gemma4": [{"num_frames": 5}, {"num_frames": 90}],
}

PIXELS = [(1, 3.0, 40, 60), (2, 1.0, 64, 48), (3, 2.0, 84, 112), (5, 5.0, 90, 61), (7, 2.0, 61, 150)]
"""Clips of which pixels are compared: frames, rate, height, width."""

FRAMES = 100_000


def videos(seed: int) -> Iterator[tuple[int, float, int, int]]:
    """500 random videos, then short ones: frames, frames per second, height, width."""
    random = np.random.default_rng(seed)
    rates = (1.0, 5.0, 10.0, 12.5, 15.0, 24.0, 24000 / 1001, 25.0, 30.0, 30000 / 1001, 50.0, 60.0, 60000 / 1001, 120.0)
    for _ in range(500):
        frames = int(np.exp2(random.uniform(0, np.log2(FRAMES if random.random() < 0.3 else 3000))))
        fps = float(random.choice(rates)) if random.random() < 0.7 else round(float(random.uniform(0.1, 144)), 3)
        height, width = (int(side) for side in np.exp2(random.uniform(3, 12, 2)))
        yield frames, fps, height, width
    for frames in (1, 2, 3, 5, 7):
        for fps in (0.5, 2.0, 25.0):
            yield frames, fps, 360, 640


def synthetic_frames(frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Slopes and hashed noise [frames, height, width, 3] in integers alone, other ones in every frame."""
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    slopes = np.abs((y * (3 + c) + x * (7 - 2 * c) + 90 * c + 40 * t) % 510 - 255)
    noise = ((y * 73856093 ^ x * 19349663 ^ c * 83492791 ^ t * 19) * 2654435761 >> 16) % 96 - 48
    return np.clip(slopes + noise, 0, 255).astype(np.uint8)


def checksum(values: Iterable[float]) -> int:
    """CRC-32 of numbers, of every digit of theirs."""
    return zlib.crc32(",".join(repr(value) for value in values).encode())


def describe(pixel_values: npt.NDArray[np.float32]) -> str:
    """SHA-256 of float32 values, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(pixel_values, "<f4").tobytes()).hexdigest()


def official_indices(processor: Any, metadata: Any, sampling: dict[str, Any]) -> list[int]:
    """What the processor samples; equal steps may reach the frame behind the last, which loaders of files pass over.

    The limits are set on a copy of the processor: some read them there alone.
    """
    limits = {key: value for key, value in sampling.items() if key in ("min_frames", "max_frames")}
    processor = copy.copy(processor)
    vars(processor).update(limits)
    if sampling or processor.do_sample_frames:
        indices = [int(index) for index in processor.sample_frames(metadata, **sampling)]
    else:
        indices = list(range(metadata.total_num_frames))
    return [index for index in indices if index < metadata.total_num_frames]


def official_times(architecture: str, metadata: Any) -> list[float]:
    """Seconds of each temporal group, as the prompts of the model give them."""
    if architecture == "qwen3_vl":
        from transformers import Qwen3VLProcessor

        return list(Qwen3VLProcessor._calculate_timestamps(None, list(metadata.frames_indices), metadata.fps, 2))
    return list(metadata.timestamps if architecture == "gemma4" else metadata.timestamps[::2])


def official_plan(
    architecture: str, processor: Any, video: tuple[int, float, int, int], sampling: dict[str, Any]
) -> list[Any]:
    """Number and checksum of the frames, grid, checksum of the times, seconds per grid. Raises what it raises."""
    import torch
    from transformers.video_utils import VideoMetadata

    frames, fps, height, width = video
    metadata = VideoMetadata(total_num_frames=frames, fps=fps, duration=frames / fps)
    metadata.frames_indices = official_indices(processor, metadata, sampling)
    clip = torch.empty((len(metadata.frames_indices), 3, height, width), dtype=torch.uint8, device="meta")
    output = processor(videos=[clip], do_sample_frames=False, input_data_format="channels_first", return_tensors="pt")
    if architecture == "gemma4":
        count, each = output.num_frames_per_video.item(), output.num_soft_tokens_per_video.item()
        grid = [count, each]
    else:
        grid = output.video_grid_thw[0].tolist()
    stored = list(dict.fromkeys(metadata.frames_indices))
    seconds = processor.temporal_patch_size / metadata.sampled_fps if architecture == "qwen2_5_vl" else 0.0
    return [len(stored), checksum(stored), grid, checksum(official_times(architecture, metadata)), seconds]


def official_pixels(architecture: str, processor: Any, video: tuple[int, float, int, int]) -> dict[str, Any]:
    """Of all frames, with times drawn onto them where the model has that: shape and checksum."""
    import torch
    from transformers.video_utils import VideoMetadata

    frames, fps, height, width = video
    if frames == 1 and architecture not in ("qwen2_5_vl", "ernie4_5_vl_moe", "gemma4"):
        frames = 2
    metadata = VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)))
    clip = torch.from_numpy(synthetic_frames(frames, height, width)).permute(0, 3, 1, 2)
    options = {"draw_on_frames": True} if architecture == "ernie4_5_vl_moe" else {}
    output = processor(
        videos=[clip],
        video_metadata=[metadata],
        do_sample_frames=False,
        input_data_format="channels_first",
        return_tensors="pt",
        **options,
    )
    values = output.pixel_values_videos.numpy()
    return {"architecture": architecture, "video": [frames, fps, height, width], "sha256": describe(values)}


def main() -> None:
    import PIL
    import torch
    import torchvision
    import transformers
    from PIL import ImageFont

    font = Path(FILE.with_name("font.tmp"))
    font.write_bytes(ImageFont.load_default(10).font_bytes)  # type: ignore[union-attr]
    plans, pixels = [], []
    for seed, (architecture, settings) in enumerate(PROCESSORS.items()):
        given = {key: value for key, value in settings.items() if key != "video_processor_type"}
        if architecture == "ernie4_5_vl_moe":
            given["font"] = str(font)
        processor = getattr(transformers, settings["video_processor_type"])(**given)
        cases = [(video, {}) for video in videos(seed)]
        cases += [
            (video, sampling) for sampling in OVERRIDES[architecture] for video in list(videos(100 + seed))[10:510:21]
        ]
        for video, sampling in cases:
            if architecture == "qwen3_vl" and sampling.get("num_frames", 0) > video[0]:
                continue  # it repeats frames, which is refused here
            try:
                result = official_plan(architecture, processor, video, sampling)
            except (ValueError, ZeroDivisionError) as error:
                result = [type(error).__name__]
            plans.append([architecture, *video, sampling, *result])
        pixels += [official_pixels(architecture, processor, video) for video in PIXELS]
    font.unlink()
    made_with = {module.__name__: module.__version__ for module in (torch, torchvision, transformers, PIL)}
    tables = [f'  "{name}": [\n{lines(cases)}\n  ]' for name, cases in (("plans", plans), ("pixels", pixels))]
    FILE.write_text("{\n" + ",\n".join([f'  "made_with": {json.dumps(made_with)}', *tables]) + "\n}\n")


def lines(cases: list[Any]) -> str:
    return ",\n".join(f"    {json.dumps(case, separators=(',', ':'))}" for case in cases)


if __name__ == "__main__":
    main()
