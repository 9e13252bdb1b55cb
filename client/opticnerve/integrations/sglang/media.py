"""SGLang's media items as those of our client: the bytes that came with the request, and nothing else.

URLs are not fetched and files are not opened: an encoder that did so would do it for whoever reaches it, from inside
the operator's network.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from opticnerve.errors import RequestInvalidError
from opticnerve.integrations.sglang.frame import Modality
from opticnerve.media import Video

_KNOWN = {"url", "content_hash"}
"""Keys of an item that say nothing of how it is encoded: the hash is the decoder's name of the media."""


def to_sources(items: Sequence[object], modality: Modality) -> list[bytes | Video]:
    """What each item is: a data URL or plain Base64, or a mapping with one under "url". Raises RequestInvalidError."""
    files = [_file(item, f"item {index}") for index, item in enumerate(items)]
    return [file if modality is Modality.IMAGE else Video(file) for file in files]


def _file(item: object, name: str) -> bytes:
    if isinstance(item, dict):
        if unknown := item.keys() - _KNOWN:
            raise _invalid(f"{name} has options that would be ignored: {', '.join(sorted(map(str, unknown)))}")
        item = item.get("url")
    if not isinstance(item, str):
        raise _invalid(f"{name} is {type(item).__name__}: send a data URL")
    head, comma, data = item.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise _invalid(f"{name} is neither a data URL in Base64 nor Base64: media are sent, not fetched")
    try:
        return base64.b64decode(data if comma else item, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _invalid(f"{name} is neither a data URL nor Base64, media are sent, not fetched: {error}") from error


def _invalid(message: str) -> RequestInvalidError:
    return RequestInvalidError(message, code="INVALID_ARGUMENT")
