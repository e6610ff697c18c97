"""Conversations with images, audio or video: what of their text is known without the engine's processor.

Only the engine knows the tokens that stand for an item. What comes before the first item is known, if it does
not depend on the item: so the conversation is rendered with a mark where that item begins, once with its
media and once without any, and the text is known up to the mark or to where the two differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from store.prompt.request import Unrenderable
from store.prompt.template import ContentFormat

# Characters for private use: nothing trims them. If a client writes them, too, less is known.
MARK: Final = "\ue00b\ue00a\ue00d"

_KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image_url", "image_pil", "image_embeds", "input_image"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio_embeds"), "audio"),
    **dict.fromkeys(("video_url", "video_embeds"), "video"),
}


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Stands for a media part; no body holds such an object."""

    kind: str


def variants(messages: Sequence[Any], content_format: ContentFormat) -> tuple[list[Any], list[Any]]:
    """The messages with all media and without any, both with the mark. Raises Unrenderable if there are none.

    In the "string" format vLLM writes what stands for the items in front of the message's own text, else the
    template writes it where it likes.
    """
    shown: list[Any] = []
    bare: list[Any] = []
    marked = False
    for message in messages:
        parts = _parts(message)
        if not any(isinstance(part, MediaPart) for part in parts):
            shown.append(message)
            bare.append(message)
            continue
        if not marked:
            first = next(place for place, part in enumerate(parts) if isinstance(part, MediaPart))
            parts.insert(first if content_format == "openai" else 0, {"type": "text", "text": MARK})
            marked = True
        texts = [part for part in parts if not isinstance(part, MediaPart)]
        shown.append(message | {"content": parts if content_format == "openai" else texts})
        bare.append(message | {"content": texts})
    if not marked:
        raise Unrenderable("multimodal")
    return shown, bare


def known_text(shown: str, bare: str) -> str:
    """What both renderings have before the mark. Raises Unrenderable where a template dropped the mark."""
    if MARK not in shown or MARK not in bare:
        raise Unrenderable("multimodal")
    shown, bare = shown.partition(MARK)[0], bare.partition(MARK)[0]
    ends = range(1, min(len(shown), len(bare)) + 1)
    return shown[: bisect_left(ends, True, key=lambda end: not shown.startswith(bare[:end]))]


def _parts(message: Any) -> list[Any]:
    """The content parts of a message, media made out; none for other contents, which are no concern here."""
    content = cast(dict[str, Any], message).get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return []
    return [_part(part) for part in cast(list[Any], content)]


def _part(part: Any) -> Any:
    kind = cast(dict[str, Any], part).get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _KINDS:
        return MediaPart(_KINDS[kind])
    return cast(object, part)
