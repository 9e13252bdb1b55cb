"""What is too much, or not wanted here: the limits of one item, from its size and its plan."""

from __future__ import annotations

from .config import Config
from .errors import ServiceError
from .models.base import ImageItem, Planner, VideoItem
from .types import ItemPlan

MAX_SAMPLED_FRAMES = 2048
"""Frames that one video may be sampled to: its plan still fits in a message between the processes."""


def invalid(message: str, **metadata: object) -> ServiceError:
    """The error of an item that cannot be taken as it is."""
    return ServiceError("IMAGE_INVALID", message, metadata=metadata)


def check_modality(kind: str, config: Config) -> None:
    """Raise ServiceError for an "image" or a "video" where the operator has left it out."""
    taken = config.modalities.split(",")
    if kind not in taken:
        raise ServiceError("UNIMPLEMENTED", f"this server takes no {kind}s (modalities {taken[0]}): ask another one")


def plan_image(planner: Planner, config: Config, height: int, width: int) -> ItemPlan:
    """The plan of an image of this size."""
    check_pixels("image", height, width, config)
    return check_plan(planner.plan(ImageItem(height, width)), config)


def plan_video(planner: Planner, config: Config, item: VideoItem) -> ItemPlan:
    """The plan of a video of this many frames, rate and size."""
    check_pixels("video", item.height, item.width, config)
    if item.frames > config.max_video_frames:
        raise invalid(
            f"the video has {item.frames} frames, the limit is {config.max_video_frames} (max_video_frames): send a "
            "shorter one, or one of a lower rate"
        )
    if item.fps > 0 and item.frames / item.fps > config.max_video_seconds:
        raise invalid(
            f"the video lasts {item.frames / item.fps:.1f} s, the limit is {config.max_video_seconds:g} s "
            "(max_video_seconds): send a shorter one"
        )
    return check_plan(planner.plan(item), config)


def check_pixels(kind: str, height: int, width: int, config: Config) -> None:
    """Raise ServiceError for an image, or a frame of a video, of too many pixels."""
    limit = config.max_image_pixels
    if height * width > limit:
        raise invalid(
            f"the {kind} has {height} x {width} pixels, the limit is {limit} in all (max_image_pixels): send a "
            "smaller one",
            max_image_pixels=limit,
        )


def check_plan(plan: ItemPlan, config: Config) -> ItemPlan:
    """The plan, unless it is too large. Raises ServiceError."""
    smaller = "a smaller image" if plan.kind == "image" else "fewer frames, or smaller ones"
    most = config.max_item_tokens
    if most is not None and plan.tokens > most:
        raise ServiceError(
            "ITEM_TOO_LARGE",
            f"the item has {plan.tokens} tokens, the limit is {most} (max_item_tokens): send {smaller}",
            metadata={"tokens": plan.tokens, "max_item_tokens": most},
        )
    frames = max(len(plan.frame_indices), plan.grid[0])
    if frames > MAX_SAMPLED_FRAMES:
        raise ServiceError(
            "ITEM_TOO_LARGE",
            f"{frames} frames of the video would be sampled, the limit is {MAX_SAMPLED_FRAMES}: set sampling.fps or "
            "num_frames, or send a shorter one",
            metadata={"frames": frames, "max_sampled_frames": MAX_SAMPLED_FRAMES},
        )
    return plan
