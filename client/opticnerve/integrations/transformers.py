"""Rows of a server into `generate` of an unmodified transformers model, whose vision tower is then not needed.

    media = list(client.encode(["cat.jpg", opticnerve.Video("clip.mp4")]))
    inputs = expand_prompt(model.config, prompt, [item.plan for item in media], tokenizer).to(model.device)
    model.generate(**inputs, mm_encoder_outputs=encoder_outputs(model, inputs, media))

It needs transformers 5.18, the first with `mm_encoder_outputs`. Importing this module loads neither it nor torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from opticnerve.integrations.families import Family, family_of
from opticnerve.integrations.prompts import Piece, Tokenizer, Vocabulary, tokenised
from opticnerve.tensors import Embedding, ItemPlan

Kind: TypeAlias = Literal["image", "video"]

TYPES: dict[Kind, int] = {"image": 1, "video": 2}
"""Of token type ids; that of text is 0."""


def expand_prompt(
    config: Any, prompt: Sequence[int], plans: Sequence[ItemPlan], tokenizer: Tokenizer | None = None
) -> Any:
    """A tokenised prompt as the model takes it: the one placeholder of each item, as the chat template writes it,
    becomes one for each row, with the marks and words that the model's processor writes around them.

    `config` is the decoder's, `plans` those of its items in the order of the prompt, from `Embedding.plan`, `Held.plan`
    or `Client.plan`. The tokenizer is needed where a prompt has words or marks that the configuration does not name.

    Returns a transformers.BatchFeature of tensors [1, n]: `input_ids`, `attention_mask` and the token type ids of the
    model; for M-RoPE `image_grid_thw` and `video_grid_thw` int64 [items, 3], and `second_per_grid_ts` [videos].

    Raises ValueError for a model that is not supported, for placeholders that are not those of the items, and for
    videos whose times nobody knows.
    """
    from transformers import BatchFeature

    family, words = family_of(config), Vocabulary(config, tokenizer)
    slots = {family.image_slot(words): "image"}
    if family.video is not None:
        slots[family.video_slot(words)] = "video"
    asked, given = [slots[token] for token in prompt if token in slots], [_kind(plan) for plan in plans]
    if asked != given:
        raise ValueError(
            f"the prompt has placeholders of {', '.join(asked) or 'nothing'} for {', '.join(given) or 'nothing'}: it "
            "must have one for each item, in their order, as the chat template writes it"
        )
    layouts, remaining = {"image": family.image, "video": family.video}, iter(plans)
    pieces = list[Piece]()
    for token in prompt:
        layout = layouts[slots[token]] if token in slots else None
        pieces += layout(words, next(remaining)) if layout else [token]
    ids = tokenised(pieces, words)
    inputs = {"input_ids": [ids], "attention_mask": [[1] * len(ids)], **_described(config, [ids], plans)}
    return BatchFeature(inputs, tensor_type="pt")


def encoder_outputs(model: Any, inputs: Mapping[str, Any], media: Sequence[Embedding]) -> dict[Kind, Any]:
    """What `generate` takes as `mm_encoder_outputs`: the outputs of the towers that the model then does without.

    `inputs` are the other arguments of `generate`, from `expand_prompt` or from the model's own processor, of one
    prompt or a padded batch; `media` the items of all its prompts in their order. The tensors are rows on the device
    of the model, in its dtype. They are for one call of `generate`, which repeats them for its beams in place.

    Raises ValueError for what a model takes without a word and then says something else, or fails at: token type ids
    or grids that are missing or those of other items, more or fewer placeholders than rows, rows of another width,
    without their deepstack levels, or on the wrong side of the projector. Raises ImportError for a transformers that
    is too old.
    """
    config, family = model.config, family_of(model.config)
    kinds = {_kind(item.plan) for item in media}
    if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
        raise ImportError("this transformers has no `mm_encoder_outputs`: install 5.18 or newer")
    if len(kinds) > 1 and family.frames_are_images and not family.one_output:
        raise ValueError(f"{config.model_type} of transformers takes no images and videos at once: use two prompts")
    for number, item in enumerate(media):
        _check_layout(config, number, item)
    described = _described(config, inputs["input_ids"].tolist(), [item.plan for item in media])
    for name, expected in described.items():
        _check_input(name, inputs.get(name), expected)
    grouped: dict[Kind, list[Embedding]] = {"image": list(media)}
    if not family.one_output:
        grouped = {kind: [item for item in media if _kind(item.plan) == kind] for kind in TYPES}
    return {kind: _output(family, items, model) for kind, items in grouped.items() if items}


def _kind(plan: ItemPlan) -> Kind:
    return "video" if plan.spans[0].kind == "frame" else "image"


# --- what the model wants beside ids and rows


def _described(config: Any, ids: list[list[int]], plans: Sequence[ItemPlan]) -> dict[str, list[Any]]:
    """The token type ids and the grids of a batch, by the names of the model's arguments."""
    family = family_of(config)
    types = _types(config, ids, plans)
    found: dict[str, list[Any]] = dict.fromkeys(family.types, types)
    if "moe_mm_token_type_ids" in found:
        found["moe_mm_token_type_ids"] = _with_marks(config, ids, types)
    for kind in TYPES:
        of_kind = [plan for plan in plans if _kind(plan) == kind]
        if family.grids and of_kind:
            found[f"{kind}_grid_thw"] = [list(plan.grid) for plan in of_kind]
        if family.seconds and of_kind and kind == "video":
            found["second_per_grid_ts"] = [plan.second_per_grid_ts for plan in of_kind]
    return found


class _Run(NamedTuple):
    """Placeholders of one token beside each other in one prompt of a batch."""

    row: int
    start: int
    length: int
    token: int


def _runs(ids: list[list[int]], tokens: set[int]) -> Iterator[_Run]:
    for row, line in enumerate(ids):
        start = 0
        for token, same in groupby(line):
            length = len(list(same))
            if token in tokens:
                yield _Run(row, start, length, token)
            start += length


def _types(config: Any, ids: list[list[int]], plans: Sequence[ItemPlan]) -> list[list[int]]:
    """Token type ids. Raises ValueError unless each item in its turn has a placeholder for each of its rows."""
    family = family_of(config)
    tokens: dict[Kind, int] = {"image": config.image_token_id}
    if family.video is not None:
        tokens["video"] = config.image_token_id if family.frames_are_images else config.video_token_id
    runs = _runs(ids, set(tokens.values()))
    types = [[0] * len(line) for line in ids]
    for number, plan in enumerate(plans):
        for run in _runs_of(number, plan, runs, tokens.get(_kind(plan))):
            types[run.row][run.start : run.start + run.length] = [TYPES[_kind(plan)]] * run.length
    for run in runs:
        raise ValueError(f"the prompt has {run.length} more placeholders than the {len(plans)} items have rows")
    return types


def _runs_of(number: int, plan: ItemPlan, runs: Iterator[_Run], token: int | None) -> list[_Run]:
    """The placeholders of an item: all of its rows beside each other, or those of each of its spans."""
    taken, missing = list[_Run](), plan.tokens
    while missing:
        run = next(runs, None)
        if run is None or run.token != token or run.length > missing:
            there = f"{run.length} of token {run.token} in a row" if run else "no more"
            raise ValueError(
                f"item {number}, {_kind(plan)} of {plan.tokens} rows, needs {missing} more placeholders where the "
                f"prompt has {there}: expand the prompt by the plans of these very items"
            )
        taken.append(run)
        missing -= run.length
    lengths, spans = [run.length for run in taken], [span.rows for span in plan.spans]
    if lengths not in ([plan.tokens], spans) or len({run.row for run in taken}) > 1:
        raise ValueError(
            f"item {number}: its {plan.tokens} placeholders are in runs of {lengths}, its spans have {spans} rows: "
            "expand the prompt by the plans of these very items"
        )
    return taken


def _with_marks(config: Any, ids: list[list[int]], types: list[list[int]]) -> list[list[int]]:
    """Experts of a kind see the marks around its rows too."""
    marks = {
        getattr(config, f"{kind}_{end}_token_id"): number for kind, number in TYPES.items() for end in ("start", "end")
    }
    return [
        [marks.get(token, own) for token, own in zip(*lines, strict=True)] for lines in zip(ids, types, strict=True)
    ]


# --- what would be wrong without a word


def _check_input(name: str, given: Any, expected: list[Any]) -> None:
    import torch

    if given is None:
        raise ValueError(
            f"{name} is missing: the model would place its images wrongly without a word; expand_prompt has it"
        )
    found, wanted = torch.as_tensor(given).cpu(), torch.tensor(expected)
    unknown = wanted == 0 if name == "second_per_grid_ts" else False  # of videos that were sent as patches
    same = found.shape == wanted.shape and bool((torch.isclose(found.double(), wanted.double()) | unknown).all())
    if not same:
        raise ValueError(f"{name} is not that of these items in this order: expand the prompt by their plans")


def _check_layout(config: Any, number: int, item: Embedding) -> None:
    """Raises ValueError for rows that are not what this decoder takes."""
    family = family_of(config)
    if item.projector_applied == family.projects:
        side, remedy = ("behind", "with") if family.projects else ("before", "without")
        raise ValueError(
            f"item {number}: the rows are those {side} the projector, which {config.model_type} does not take: start "
            f"the server {remedy} --no-projector"
        )
    hidden = config.vision_config.vision_output_dim if family.projects else config.get_text_config().hidden_size
    levels = len(config.vision_config.deepstack_visual_indexes) if family.deepstack else 0
    if (item.hidden, item.width) != (hidden, hidden * (1 + levels)):
        raise ValueError(
            f"item {number}: the rows are {item.width} wide, {item.hidden} a level; this decoder takes {1 + levels} "
            f"levels of {hidden}: the server has another model"
        )


# --- rows


def _output(family: Family, items: Sequence[Embedding], model: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    fields: dict[str, Any]
    rows = [item.torch().to(model.device, model.dtype) for item in items]
    if family.tiles:
        import torch

        tiles = torch.cat(rows).unflatten(0, (-1, items[0].plan.spans[0].rows))
        fields = {"last_hidden_state" if family.projects else "pooler_output": tiles}
        return BaseModelOutputWithPooling(**fields)
    levels = zip(*(own.split(items[0].hidden, dim=1) for own in rows), strict=True)
    main, *deepstack = (list(level) for level in levels)
    fields = {"pooler_output": main}
    if not family.deepstack:
        return BaseModelOutputWithPooling(**fields)
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    fields["deepstack_features"] = deepstack
    return BaseModelOutputWithDeepstackFeatures(**fields)
