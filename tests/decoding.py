"""Decoders of transformers, with their towers and without; replies as a client has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opticnerve import Embedding, ItemPlan, Timings
from opticnerve_server import types
from opticnerve_server.wire import plan_message

NEW_TOKENS = 12
TOWERS = ("visual", "vision_tower", "vision_model", "resampler_model", "embed_vision")
"""What a decoder does without: their names in the models of all families. Llama 4 keeps its projector."""


def reply(plan: types.ItemPlan, rows: torch.Tensor, layout: types.Layout) -> Embedding:
    """Rows [tokens, width] as they arrive at a client."""
    return Embedding(
        array=rows.numpy(),
        hidden=layout.hidden,
        plan=ItemPlan.from_wire(plan_message(plan)),
        digest=b"",
        crc32=0,
        dispatches=(),
        timings=Timings(0, 0, 0, 0, 0, 0),
        store_hit=False,
        instance_id="",
        projector_applied=layout.projector_applied,
    )


def continuation(
    model: Any, *, beams: int = 1, chunk: int | None = None, **inputs: Any
) -> tuple[list[int], torch.Tensor]:
    """The tokens that follow a prompt, and their logits [NEW_TOKENS, vocabulary].

    None comes twice: small models with random weights would say one for ever.
    """
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    ways = {"do_sample": False, "num_beams": beams, "prefill_chunk_size": chunk}
    settings = {**length, **ways, "no_repeat_ngram_size": 1, "pad_token_id": 0}
    found = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
    return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)


@contextmanager
def without_towers(model: Any) -> Iterator[None]:
    """The model without the modules that rows come from."""
    names = TOWERS if model.config.model_type == "llama4" else (*TOWERS, "multi_modal_projector")
    inner = getattr(model, "model", model)
    taken = {name: inner._modules.pop(name) for name in names if name in inner._modules}
    assert taken
    try:
        yield
    finally:
        inner._modules |= taken
