"""Embeddings, scores and classes in vLLM's shapes, made of a text's hash: the same text, the same numbers.

A real vLLM worker serves these with a pooling model only, and then none of the generating APIs.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from workers.sim.bodies import Refused

_DIMENSIONS: Final = 32
_encode: Final = msgspec.json.encode


class Embedding(msgspec.Struct):
    """A /v1/embeddings body; `input` is a text, token ids, or a list of either."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Score(msgspec.Struct):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class Rerank(msgspec.Struct):
    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int = 0


class Classify(msgspec.Struct):
    input: str | list[str]
    model: str | None = None


def texts_or_ids(given: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """The inputs one by one. Raises Refused."""
    if isinstance(given, str):
        return [given]
    ids = [part for part in given if isinstance(part, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids or not given:
        raise Refused("input must be text, token ids, or a list of either", param="input")
    return [part for part in given if not isinstance(part, int)]


def embeddings(asked: Embedding, inputs: Sequence[str | list[int]], tokens: int, model: str) -> bytes:
    size = asked.dimensions or _DIMENSIONS
    vectors = [_vector(_encode(each), size) for each in inputs]
    data = [
        {
            "index": index,
            "object": "embedding",
            "embedding": vector
            if asked.encoding_format == "float"
            else base64.b64encode(struct.pack(f"<{size}f", *vector)).decode(),
        }
        for index, vector in enumerate(vectors)
    ]
    return _list("embd", model, data, tokens)


def scores(asked: Score, tokens: int, model: str) -> bytes:
    """One text against many, or many against as many. Raises Refused."""
    first = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    second = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise Refused("Input lengths must be either 1:1, 1:N or N:N")
    data = [
        {"index": index, "object": "score", "score": _likeness(one, two)}
        for index, (one, two) in enumerate(zip(first, second, strict=True))
    ]
    return _list("embd", model, data, tokens)


def texts_of(documents: Sequence[str | dict[str, Any]]) -> list[str]:
    return [text if isinstance(text, str) else str(text.get("text", "")) for text in documents]


def ranking(asked: Rerank, tokens: int, model: str) -> bytes:
    texts = texts_of(asked.documents)
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": text, "multi_modal": None},
            "relevance_score": _likeness(asked.query, text),
        }
        for index, text in enumerate(texts)
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    found = results[: asked.top_n or None]
    return _encode({"id": f"rerank-{uuid.uuid4().hex}", "model": model, "usage": usage, "results": found})


def classes(inputs: Sequence[str], tokens: int, model: str) -> bytes:
    data: list[dict[str, Any]] = []
    for index, text in enumerate(inputs):
        sure = _likeness("LABEL_1", text)
        label = "LABEL_1" if sure > 0.5 else "LABEL_0"
        data.append({"index": index, "label": label, "probs": [1 - sure, sure], "num_classes": 2})
    return _list("classify", model, data, tokens)


def _list(prefix: str, model: str, data: list[dict[str, Any]], tokens: int) -> bytes:
    return _encode(
        {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
    )


def _vector(text: bytes, size: int) -> list[float]:
    """Of length 1."""
    drawn = hashlib.shake_256(text).digest(2 * size)
    values = [int.from_bytes(drawn[2 * at : 2 * at + 2], "big") / 32768 - 1 for at in range(size)]
    norm = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / norm for value in values]


def _likeness(one: str, two: str) -> float:
    """0 to 1: 1 for the same words, and never the same for texts without a common one."""
    words, others = set(one.lower().split()), set(two.lower().split())
    common = len(words & others) / max(1, len(words | others))
    drawn = int.from_bytes(hashlib.sha256(f"{one}\0{two}".encode()).digest()[:4], "big") / 2**32
    return common if common == 1 else 0.9 * common + 0.1 * drawn
