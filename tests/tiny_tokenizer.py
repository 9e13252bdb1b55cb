"""A tokenizer of single characters and a few joined ones, for models with a vocabulary of 64."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHARACTERS = "\n 0123456789:.<>FHabcdefghijklmnopqrstuvwxyz"
JOINED = (("\n", "\n"), ("\n\n", "\n"), (" ", "<"), (" ", "F"), ("e", "r"))
"""Over the seams of texts, as real tokenizers do."""


def tiny_tokenizer(**marks: int) -> Any:
    """Special tokens <NAME> have the ids that `marks` gives them, tokens of text those from 3 on."""
    names = [*CHARACTERS, *("".join(pair) for pair in JOINED)]
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{name: number for number, name in enumerate(names, 3)}}
    assert len(vocabulary) <= min(marks.values())
    special = {f"<{name}>": number for name, number in marks.items()}
    tokenizer = Tokenizer(BPE({**vocabulary, **special}, list(JOINED)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
