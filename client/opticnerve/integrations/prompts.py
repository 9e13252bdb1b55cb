"""How the prompt of each family names its media: what stands in for the one placeholder that a chat template writes.

The layouts are those of the processors of transformers 5.24, from the reply's plan instead of pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol, TypeAlias

from opticnerve.tensors import ItemPlan, Span


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def unk_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> str: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...


class Vocabulary:
    """The ids of a decoder's marks: its configuration has some, its tokenizer all."""

    def __init__(self, config: Any, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValueError where none was given."""
        if self._tokenizer is None:
            raise ValueError(
                f"prompts of {self.config.model_type} have words or marks around these media that its configuration "
                "does not name: give its tokenizer"
            )
        return self._tokenizer

    def mark(self, name: str) -> int:
        """The id of a token by its name. Raises ValueError for one that the tokenizer does not have."""
        number = self.tokenizer.convert_tokens_to_ids(name)
        if number is None or number == self.tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no token {name!r}: it is not that of a {self.config.model_type}")
        return number


Piece: TypeAlias = int | str
"""A token, or words that are still to be tokenised."""

Layout: TypeAlias = Callable[[Vocabulary, ItemPlan], Sequence[Piece]]
"""What stands in for the placeholder of an item."""


def tokenised(pieces: Iterable[Piece], words: Vocabulary) -> list[int]:
    """The tokens of a prompt in pieces.

    A tokenizer joins characters over the seam of two texts. So words and the ordinary tokens beside them, up to the
    next special one, are tokenised together, as if the prompt were still text. Raises ValueError where these tokens
    are not those that the tokenizer makes of their text.
    """
    pieces = list(pieces)
    if not any(isinstance(piece, str) for piece in pieces):
        return [piece for piece in pieces if isinstance(piece, int)]
    special = {number for number, token in words.tokenizer.added_tokens_decoder.items() if token.special}
    ids = list[int]()
    for _, run in groupby(pieces, lambda piece: piece in special):
        together = list(run)
        if any(isinstance(piece, str) for piece in together):
            ids += words.tokenizer.encode(_text(together, words.tokenizer), add_special_tokens=False)
        else:
            ids += [piece for piece in together if isinstance(piece, int)]
    return ids


def _text(pieces: Iterable[Piece], tokenizer: Tokenizer) -> str:
    text = ""
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if is_text:
            text += "".join(map(str, run))
            continue
        ids = [int(piece) for piece in run]
        own = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if tokenizer.encode(own, add_special_tokens=False) != ids:
            raise ValueError(
                f"the tokens {ids} beside the media are not those that the tokenizer makes of their text {own!r}: "
                "give the tokens of the prompt's text"
            )
        text += own
    return text


def _timed(plan: ItemPlan) -> tuple[Span, ...]:
    """The groups of a video. Raises ValueError where nobody knows their times."""
    if not plan.timestamps:
        raise ValueError(UNTIMED)
    return plan.spans


UNTIMED = (
    "the model wants the times of a video, which one that was sent as patches does not bring: lay out the prompt where "
    "its frames were chosen, or send the video"
)


# --- what stands in for an item: the layouts


def bare_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """The template has the marks around it."""
    return [words.config.image_token_id] * plan.tokens


def bare_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    return [words.config.video_token_id] * plan.tokens


def qwen2_5_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """The times are no part of the prompt, but of the positions."""
    if not plan.second_per_grid_ts:
        raise ValueError(UNTIMED)
    return bare_video(words, plan)


def qwen3_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """Groups with their times, all of it between the template's own marks."""
    config, pieces = words.config, list[Piece]()
    for span in _timed(plan):
        pieces += [f"<{span.timestamp:.1f} seconds>", config.vision_start_token_id]
        pieces += [*[config.video_token_id] * span.rows, config.vision_end_token_id]
    return pieces


def glm4v_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    return _glm_video(words, plan, lambda seconds: f"{int(seconds)}")


def glm46v_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    return _glm_video(words, plan, lambda seconds: f"{seconds:.1f} seconds")


def _glm_video(words: Vocabulary, plan: ItemPlan, written: Callable[[float], str]) -> Sequence[Piece]:
    """Groups as if they were images, each with its time behind it."""
    config, pieces = words.config, list[Piece]()
    for span in _timed(plan):
        rows = [config.image_token_id] * span.rows
        pieces += [config.image_start_token_id, *rows, config.image_end_token_id, written(span.timestamp)]
    return pieces


def gemma4_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    config = words.config
    return [config.boi_token_id, *[config.image_token_id] * plan.tokens, config.eoi_token_id]


def gemma4_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """Frames behind their minutes and seconds."""
    config, pieces = words.config, list[Piece]()
    for number, span in enumerate(_timed(plan)):
        minutes, seconds = divmod(int(span.timestamp), 60)
        pieces += [f"{' ' if number else ''}{minutes:02d}:{seconds:02d} ", config.boi_token_id]
        pieces += [*[config.video_token_id] * span.rows, config.eoi_token_id]
    return pieces


def gemma3_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """The image, and its crops where pan-and-scan has made some."""
    config = words.config
    views = [
        ["\n\n", config.boi_token_id, *[config.image_token_id] * span.rows, config.eoi_token_id, "\n\n"]
        for span in plan.spans
    ]
    if len(views) == 1:
        return views[0]
    pieces = ["Here is the original image ", *views[0], " and here are some crops to help you see better "]
    for number, view in enumerate(views[1:]):
        pieces += [*([" "] if number else []), *view]
    return pieces


def internvl_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    return [words.mark("<img>"), *[words.config.image_token_id] * plan.tokens, words.mark("</img>")]


def internvl_video(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """Numbered frames, a line each."""
    pieces = list[Piece]()
    for number, span in enumerate(plan.spans):
        line = "\n" if number else ""
        rows = [words.config.image_token_id] * span.rows
        pieces += [f"{line}Frame{number + 1}: ", words.mark("<img>"), *rows, words.mark("</img>")]
    return pieces


def llama4_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """Rows of tiles with separators, and the whole image behind them."""
    *tiles, whole = plan.spans
    last_column = max((span.tile_col for span in tiles), default=0)
    pieces: list[Piece] = [words.mark("<|image_start|>")]
    for span in tiles:
        separator = "<|tile_y_separator|>" if span.tile_col == last_column else "<|tile_x_separator|>"
        pieces += [*[words.config.image_token_id] * span.rows, words.mark(separator)]
    rows = [words.config.image_token_id] * whole.rows
    return [*pieces, words.mark("<|image|>"), *rows, words.mark("<|image_end|>")]


def step3p7_image(words: Vocabulary, plan: ItemPlan) -> Sequence[Piece]:
    """Crops, each row of them but the last with a newline behind it, and the whole image."""
    *crops, whole = plan.spans
    last_row = max((span.tile_row for span in crops), default=0)
    last_column = max((span.tile_col for span in crops), default=0)
    pieces = list[Piece]()
    for span in crops:
        rows = [words.config.image_token_id] * span.rows
        pieces += [words.mark("<patch_start>"), *rows, words.mark("<patch_end>")]
        if span.tile_col == last_column and span.tile_row < last_row:
            pieces.append(words.mark("<patch_newline>"))
    rows = [words.config.image_token_id] * whole.rows
    return [*pieces, words.mark("<im_start>"), *rows, words.mark("<im_end>")]
