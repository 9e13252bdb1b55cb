"""Between the wire's messages and the server's own structs. Pure functions, no decisions."""

from __future__ import annotations

from collections.abc import Iterable

from opticnerve.v1 import encoder_pb2 as pb

from .errors import to_duration
from .types import Dispatched, ItemPlan, Layout, Outcome, Phase

DTYPES: dict[int, str] = {
    pb.DTYPE_UNSPECIFIED: "bfloat16",
    pb.DTYPE_BFLOAT16: "bfloat16",
    pb.DTYPE_FLOAT16: "float16",
    pb.DTYPE_FLOAT32: "float32",
}
"""Names of the row formats by their numbers; a number that is not here is from a newer contract."""

_DTYPE_NUMBERS = {
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
    "float32": pb.DTYPE_FLOAT32,
}
_OUTCOMES = {Outcome.HIT: pb.OUTCOME_REPLAY, Outcome.MISS: pb.OUTCOME_EAGER}
_SPAN_KINDS = {
    "image": pb.Span.KIND_IMAGE,
    "tile": pb.Span.KIND_TILE,
    "global": pb.Span.KIND_GLOBAL,
    "frame": pb.Span.KIND_FRAME,
}
PHASES = {
    Phase.LOADING: pb.PHASE_LOADING,
    Phase.CAPTURING: pb.PHASE_CAPTURING,
    Phase.READY: pb.PHASE_READY,
    Phase.UNHEALTHY: pb.PHASE_UNHEALTHY,
    Phase.DRAINING: pb.PHASE_DRAINING,
    Phase.FAILED: pb.PHASE_FAILED,
}


def plan_message(plan: ItemPlan) -> pb.ItemPlan:
    """A plan as callers see it."""
    t, h, w = plan.grid
    return pb.ItemPlan(
        grid_thw=pb.GridThw(t=t, h=h, w=w),
        merge_size=plan.merge,
        processed_height=plan.height,
        processed_width=plan.width,
        tokens=plan.tokens,
        frame_indices=plan.frame_indices,
        timestamps=plan.timestamps,
        second_per_grid_ts=plan.second_per_grid_ts,
        spans=[
            pb.Span(
                kind=_SPAN_KINDS[span.kind],
                rows=span.rows,
                tile_row=span.tile_row,
                tile_col=span.tile_col,
                timestamp=span.timestamp,
            )
            for span in plan.spans
        ],
    )


def layout_message(layout: Layout, dtype: str, rows: int = 0) -> pb.Layout:
    """The layout of `rows` embedding rows in `dtype`, a name of DTYPES."""
    return pb.Layout(
        dtype=_DTYPE_NUMBERS[dtype],
        rows=rows,
        hidden=layout.hidden,
        deepstack_levels=layout.deepstack_levels,
        projector_applied=layout.projector_applied,
    )


def finished_message(
    dispatches: Iterable[Dispatched], crc32: int, seconds: dict[str, float], store_hit: bool
) -> pb.ItemFinished:
    """The end of an item that succeeds. `seconds` is by the names of StageDurations."""
    return pb.ItemFinished(
        crc32=crc32,
        durations=pb.StageDurations(**{stage: to_duration(value) for stage, value in seconds.items()}),
        dispatches=[
            pb.PathDispatch(
                path=dispatched.path,
                outcome=_OUTCOMES[dispatched.outcome],
                budget=dispatched.budget,
                units=dispatched.units,
                batch_items=dispatched.batch_items,
                batch_units=dispatched.batch_units,
            )
            for dispatched in dispatches
        ],
        store_hit=store_hit,
    )
