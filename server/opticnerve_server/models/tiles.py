"""The planner of the towers that see an image as square tiles of one size: Gemma 3, InternVL, Llama 4.

A unit is a tile, whatever it shows: each takes as many patches, as many tokens, and one attention segment of its own.
The slot holds the tiles one behind another in the order of their rows, uint8 RGB.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..types import ItemPlan, Layout, PathPlan, Span
from .base import ImageItem, PathSpec, PlanError, VideoItem
from .clip import Clip, ClipRule, NoClips, clip_plan
from .resize import Resize
from .tile_patches import TileFormat

PATH = "default"
"""Name of the one path of these towers."""


NO_VIDEOS = NoClips("this model takes no videos: send their frames as images")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A part of an image, resized and cut into rows x columns tiles."""

    top: int  # of the image as decoded, like the three below
    left: int
    height: int
    width: int
    rows: int = 1
    columns: int = 1
    resized: tuple[int, int] | None = None  # height and width in the upper left of the tiles, None: all of them
    overview: bool = False  # it shows the whole image beside tiles of it


class TileRule(Protocol):
    """From the size of an image to its views, the order of their tiles being that of the rows."""

    def __call__(self, height: int, width: int) -> tuple[View, ...]:
        """For sides of at least 1."""
        ...

    def tiling(self, rows: int, columns: int) -> tuple[View, ...]:
        """The views of an image of so many tiles beside the overview, each of one pixel; none where no image has them.

        For numbers of at least 1.
        """
        ...

    @property
    def max_tiles(self) -> int:
        """No image has more tiles than this."""
        ...


def tiles_of_one_pixel(rows: int, columns: int) -> View:
    """See `TileRule.tiling`."""
    return View(top=0, left=0, height=rows, width=columns, rows=rows, columns=columns)


def with_overview(tiled: View) -> tuple[View, ...]:
    """A view, and where it is of several tiles all of it as one more."""
    if tiled.rows * tiled.columns == 1:
        return (tiled,)
    return (tiled, replace(tiled, rows=1, columns=1, resized=None, overview=True))


@dataclass(frozen=True, slots=True)
class OneTile:
    """Every image is resized to one tile, whatever its aspect."""

    max_tiles: int = 1

    def __call__(self, height: int, width: int) -> tuple[View, ...]:
        return (View(top=0, left=0, height=height, width=width),)

    def tiling(self, rows: int, columns: int) -> tuple[View, ...]:
        return self(1, 1) if rows * columns == 1 else ()


@dataclass(kw_only=True, slots=True, eq=False)
class TilePlanner:
    """Planner of a model of tiles; see `base.Planner`. Immutable by convention, hence thread-safe.

    `side` and `patch` are sides in pixels, `merge` is a token's in patches. `extra_rows` are the rows of a tile beside
    its patches: a class token. `mean` and `std` are of values scaled to 0..1, in RGB order; `bfloat16` means that the
    official processor normalises in it.
    """

    architecture: str
    layout: Layout
    side: int
    patch: int
    merge: int
    rule: TileRule
    resize: Resize
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    bfloat16: bool = False
    extra_rows: int = 0
    clips: ClipRule = NO_VIDEOS
    paths: dict[str, PathSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = {
            PATH: PathSpec(
                min_units=1,
                max_units=self.rule.max_tiles,
                rows_per_unit=self.grid_side**2 + self.extra_rows,
                fixed_units=True,
                tokens_per_unit=(self.grid_side // self.merge) ** 2,
            )
        }

    @property
    def grid_side(self) -> int:
        """Patches along one side of a tile."""
        return self.side // self.patch

    @property
    def modalities(self) -> tuple[str, ...]:
        """See `base.Planner.modalities`."""
        return ("image",) if isinstance(self.clips, NoClips) else ("image", "video")

    def plan(self, item: ImageItem | VideoItem) -> ItemPlan:
        """See `base.Planner.plan`. Size and grid are those of the first view after its resize."""
        if isinstance(item, VideoItem):
            return self._plan_video(item)
        if min(item.height, item.width) < 1:
            raise PlanError(
                f"the image is {item.height} x {item.width} pixels (height x width): both sides must be at least 1; "
                "send an image that has pixels"
            )
        return self._plan_views(self.rule(item.height, item.width))

    def _plan_views(self, views: tuple[View, ...]) -> ItemPlan:
        first, tokens = views[0], self.paths[PATH].tokens_per_unit
        spans = _spans(views, tokens)
        return ItemPlan(
            kind="image",
            height=first.rows * self.side,
            width=first.columns * self.side,
            grid=(1, first.rows * self.grid_side, first.columns * self.grid_side),
            merge=self.merge,
            tokens=len(spans) * tokens,
            paths={PATH: self._tiles(len(spans))},
            spans=spans,
        )

    def _plan_video(self, item: VideoItem) -> ItemPlan:
        """A tile a frame."""
        plan = clip_plan(self.clips(item), path=PATH, patch=self.patch, merge=self.merge)
        return msgspec.structs.replace(plan, paths={PATH: self._tiles(plan.grid[0])})

    def _tiles(self, count: int) -> PathPlan:
        return PathPlan(
            units=count,
            segments=count,
            longest=self.paths[PATH].rows_per_unit,
            pixel_bytes=count * self.side**2 * 3,
        )

    def split(self, plan: ItemPlan, holds: Callable[[ItemPlan], bool]) -> list[ItemPlan]:
        """See `base.Planner.split`. Tiles attend to themselves alone: an item may be cut between any two."""
        tiles = plan.paths[PATH].units
        if tiles <= 1 or holds(plan):
            return [plan]
        size = bisect.bisect_left(range(1, tiles), True, key=lambda count: not holds(self._part(plan, 0, count)))
        if not size:
            return [plan]
        return [self._part(plan, first, min(first + size, tiles)) for first in range(0, tiles, size)]

    def _part(self, plan: ItemPlan, first: int, end: int) -> ItemPlan:
        """The part of an item from tile `first` up to `end`; each has a span of its own."""
        groups = end - first if plan.kind == "video" else 1
        return msgspec.structs.replace(
            plan,
            grid=(groups, *plan.grid[1:]),
            tokens=(end - first) * self.paths[PATH].tokens_per_unit,
            paths={PATH: self._tiles(end - first)},
            spans=plan.spans[first:end],
        )

    def fill_pixels(
        self, media: npt.NDArray[np.uint8] | Iterable[npt.NDArray[np.uint8]], plan: ItemPlan, out: npt.NDArray[np.uint8]
    ) -> None:
        """See `base.Planner.fill_pixels`; arrays may be read-only. Raises ValueError for another number of frames."""
        tiles = out.reshape(-1, self.side, self.side, 3, copy=False)
        if plan.kind == "video":
            for frame, tile in zip(self.clips.prepare(media, plan), tiles, strict=True):
                self.resize(frame, tile)
        else:
            assert isinstance(media, np.ndarray)
            self._fill_still(media, tiles)

    def _fill_still(self, media: npt.NDArray[np.uint8], tiles: npt.NDArray[np.uint8]) -> None:
        side, begin = self.side, 0
        for view in self.rule(*media.shape[:2]):
            end = begin + view.rows * view.columns
            seen = media[view.top : view.top + view.height, view.left : view.left + view.width]
            size = (view.rows * side, view.columns * side, 3)
            whole = tiles[begin] if end - begin == 1 else np.empty(size, np.uint8)
            self._lay(seen, view, whole)
            if end - begin > 1:
                cut = whole.reshape(view.rows, side, view.columns, side, 3).swapaxes(1, 2)
                tiles[begin:end] = cut.reshape(-1, side, side, 3)
            begin = end

    def _lay(self, seen: npt.NDArray[np.uint8], view: View, canvas: npt.NDArray[np.uint8]) -> None:
        """What a view sees, resized onto its canvas; zeros where it does not reach."""
        if view.resized in (None, canvas.shape[:2]):
            self.resize(seen, canvas)
            return
        picture = np.empty((*view.resized, 3), np.uint8)
        self.resize(seen, picture)
        canvas[...] = 0
        canvas[: picture.shape[0], : picture.shape[1]] = picture

    def plan_patches(self, kind: str, grid: tuple[int, int, int], shape: tuple[int, ...]) -> ItemPlan:
        """See `base.Planner.plan_patches`. The grid counts tiles, the overview not among them; a frame is a tile."""
        frames, rows, columns = grid
        if min(grid) < 1 or (kind == "image" and frames != 1) or (kind == "video" and rows * columns != 1):
            raise PlanError(
                f"there are {frames} x {rows} x {columns} tiles (frames, rows, columns): numbers must be positive, an "
                "image has one frame, a frame of a video one tile"
            )
        if kind == "video":
            return self._plan_frames(frames, shape)
        views = self.rule.tiling(rows, columns)
        if not views:
            raise PlanError(
                f"no image has {rows} x {columns} tiles (rows x columns) for this model: send what its own processor "
                "returns for one image"
            )
        plan = self._plan_views(views)
        self._tile_format.check(kind, plan.paths[PATH].units, shape)
        return plan

    def _plan_frames(self, frames: int, shape: tuple[int, ...]) -> ItemPlan:
        """Of a video as tiles of this shape: neither index nor time of its frames is known."""
        if self.clips is NO_VIDEOS:
            raise PlanError(NO_VIDEOS.reason)
        self._tile_format.check("video", frames, shape)
        times = (0.0,) * frames
        clip = Clip(
            frame_indices=tuple(range(frames)), frame_times=times, timestamps=times, height=self.side, width=self.side
        )
        plan = clip_plan(clip, path=PATH, patch=self.patch, merge=self.merge)
        return msgspec.structs.replace(plan, paths={PATH: self._tiles(frames)}, frame_indices=(), timestamps=())

    def fill_patches(self, patches: npt.NDArray[np.generic], plan: ItemPlan, out: npt.NDArray[np.uint8]) -> None:
        """See `base.Planner.fill_patches`."""
        self._tile_format.restore(patches, out)

    @property
    def _tile_format(self) -> TileFormat:
        return TileFormat(side=self.side, mean=self.mean, std=self.std, bfloat16=self.bfloat16)


def _spans(views: tuple[View, ...], tokens: int) -> tuple[Span, ...]:
    """A span a tile: "image" where it is alone, "global" for an overview, else "tile" with its place in its view.

    Views of a single tile that are no overview are crops: their places count on from left to right or downwards.
    """
    if len(views) == 1 and views[0].rows * views[0].columns == 1:
        return (Span(kind="image", rows=tokens),)
    spans = []
    for view in views:
        if view.overview:
            spans.append(Span(kind="global", rows=tokens))
            continue
        row, column = view.top // view.height, view.left // view.width
        spans += [
            Span(kind="tile", rows=tokens, tile_row=row + i, tile_col=column + j)
            for i in range(view.rows)
            for j in range(view.columns)
        ]
    return tuple(spans)
