"""A checkpoint from the Hugging Face hub, as far as a server reads it: `opticnerve-server download`.

The language model is most of a checkpoint. Where there is an index of its shards, only those with tensors of the tower
are fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from . import registry
from .config import ModelError
from .weights import tower_shards

SMALL_FILES = ("*.json", "*.ttf")
"""What is read beside weights: configurations, processors, the index, a font of time stamps."""


def download(repository: str, revision: str, out: Path) -> list[str]:
    """Fetch what a server needs of a repository's revision into `out`, which is made; the names of the weights' files.

    What is there already, and complete, is not fetched again. Raises ModelError: also for a model that the server does
    not support, before any of its weights are fetched.
    """
    _fetch(repository, revision, out, SMALL_FILES)
    source = registry.open_model(str(out), "safetensors")
    shards = tower_shards(out, registry.tower_class(source.architecture).prefixes)
    _fetch(repository, revision, out, ["*.safetensors"] if shards is None else shards)
    return sorted(path.name for path in out.glob("*.safetensors"))


def _fetch(repository: str, revision: str, out: Path, patterns: Sequence[str]) -> None:
    try:
        snapshot_download(
            repository, revision=revision, local_dir=out, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"cannot download {repository} at {revision}: {' '.join(str(error).split())}; check both names, and for a "
            "gated repository set HF_TOKEN"
        ) from error
