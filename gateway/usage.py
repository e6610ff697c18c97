"""What an answer says about itself: usage and the proper end of a stream, read from its last bytes."""

import json
from dataclasses import dataclass
from typing import Any, cast

# Enough for the closing events of every API and for the tail of a JSON answer that carries usage.
_TAIL_BYTES = 1 << 16
_USAGE = b'"usage":'
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the engine counted them; cached_tokens is None where the worker does not report it."""

    prompt_tokens: int
    cached_tokens: int | None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def parse_usage(tail: bytes) -> Usage | None:
    """The last usage object in `tail`, of the OpenAI kind. None if there is none that makes sense.

    A quoted `"usage":` inside generated text is escaped there, so it can't be taken for the field.
    """
    end = len(tail)
    while (at := tail.rfind(_USAGE, 0, end)) >= 0:
        end = at
        text = tail[at + len(_USAGE) :].decode("utf-8", "replace").lstrip()
        try:
            found, _ = _decoder.raw_decode(text)
        except ValueError:
            continue
        if not isinstance(found, dict):
            continue
        usage = cast(dict[str, Any], found)
        prompt = _count(usage.get("prompt_tokens"))
        if prompt is None:
            continue
        details = usage.get("prompt_tokens_details")
        cached = (
            _count(cast(dict[str, Any], details).get("cached_tokens")) if isinstance(details, dict) else None
        )
        return Usage(prompt, cached)
    return None


class AnswerTail:
    """Keeps the last bytes of an answer as it streams by."""

    __slots__ = ("_chunks", "_size", "total")

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._size = 0
        self.total = 0

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        self.total += len(chunk)
        if self._size > 2 * _TAIL_BYTES:
            self._chunks = [b"".join(self._chunks)[-_TAIL_BYTES:]]
            self._size = _TAIL_BYTES

    def bytes(self) -> bytes:
        return b"".join(self._chunks)[-_TAIL_BYTES:]

    def ends_with_done(self) -> bool:
        """Whether an OpenAI event stream was closed by its terminator."""
        return self.bytes().rstrip().endswith(b"data: [DONE]") or self.bytes().rstrip().endswith(
            b"data:[DONE]"
        )
