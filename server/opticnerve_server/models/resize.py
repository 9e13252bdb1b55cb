"""Resizes of uint8 pictures, each bit-equal to what the official processors call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

Resize = Callable[[Pixels, Pixels], None]
"""From RGB [height, width, 3], which may be read-only or a view, into all of another array of that kind.

A picture that has the target's size already is copied as it is. Thread-safe.
"""


def torch_bicubic(media: Pixels, target: Pixels) -> None:
    """torchvision's antialiased bicubic resize. See Resize."""
    _torch("_upsample_bicubic2d_aa", media, target)


def torch_bilinear(media: Pixels, target: Pixels) -> None:
    """torchvision's antialiased bilinear resize. See Resize."""
    _torch("_upsample_bilinear2d_aa", media, target)


def pillow_bicubic(media: Pixels, target: Pixels) -> None:
    """Pillow's bicubic resize, which differs from torch's by a level or two. See Resize."""
    _pillow("BICUBIC", media, target)


def pillow_bilinear(media: Pixels, target: Pixels) -> None:
    """Pillow's bilinear resize. See Resize."""
    _pillow("BILINEAR", media, target)


def _pillow(filter: str, media: Pixels, target: Pixels) -> None:
    if media.shape == target.shape:
        np.copyto(target, media)
        return
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(media))
    np.copyto(target, np.asarray(image.resize((target.shape[1], target.shape[0]), Image.Resampling[filter])))


def _torch(operator: str, media: Pixels, target: Pixels) -> None:
    if media.shape == target.shape:
        np.copyto(target, media)
        return
    # A front-end binds its port before it can afford the seconds of this import.
    import torch
    from torch.utils.dlpack import from_dlpack

    # DLPack takes read-only memory without a copy or a warning. Views of HWC memory are also the fastest layout.
    source_1chw = from_dlpack(media).permute(2, 0, 1).unsqueeze(0)
    target_1chw = from_dlpack(target).permute(2, 0, 1).unsqueeze(0)
    # What `interpolate(antialias=True)` runs, in the form that writes where it is told: a third of its time goes into a
    # result of its own and the copy from there.
    resize: Any = getattr(torch.ops.aten, operator).out
    resize(source_1chw, target.shape[:2], False, None, None, out=target_1chw)
