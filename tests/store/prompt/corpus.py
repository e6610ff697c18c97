"""Request bodies that cover what decides a prompt, for comparison with a real engine.

`bodies()` yields (API path, body) without a model name; every body is meant to be accepted by vLLM unless the
template itself refuses it. The comparison skips what the engine answers with 4xx.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from store.prompt.request import (
    ChatPrompt,
    MessagesPrompt,
    PromptRequest,
    ResponsesPrompt,
    TextPrompt,
    TokensPrompt,
)
from tests.store.prompt.anthropic_messages import anthropic_messages
from tests.store.prompt.chats import chats, random_chats
from tests.store.prompt.openai_responses import openai_responses
from tests.store.prompt.pieces import BOS, FRAGMENTS, Body, user

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def bodies() -> Iterator[tuple[str, Body]]:
    """All of them, in the same order in every run."""
    yield from ((CHAT, body) for body in chats())
    yield from ((TEXT, body) for body in _completions())
    yield from ((CHAT, body) for body in random_chats(120))
    yield from ((MESSAGES, {"max_tokens": 4, **body}) for body in anthropic_messages())
    yield from ((RESPONSES, body) for body in openai_responses())
    yield from _begun()


def request_of(path: str, body: Body) -> PromptRequest:
    """The prompt of a body, decoded as the gateway does it."""
    raw = json.dumps(body).encode()
    whole = {CHAT: ChatPrompt, MESSAGES: MessagesPrompt, RESPONSES: ResponsesPrompt}
    if path in whole:
        return msgspec.json.decode(raw, type=whole[path])
    kind, field = (TextPrompt, "text") if isinstance(body["prompt"], str) else (TokensPrompt, "ids")
    fields = {field: body["prompt"]} | {k: v for k, v in body.items() if k in kind.__struct_fields__}
    return kind(**fields)


def digest(ids: Sequence[int]) -> str:
    """Names a list of token ids in 12 characters."""
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()[:12]


def _completions() -> Iterator[Body]:
    for text in FRAGMENTS:
        if text:
            yield {"prompt": text}
    yield {"prompt": "no specials", "add_special_tokens": False}
    yield {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    yield {"prompt": [5, 6, 7, 8] * 20}
    for keep, side in itertools.product((3, 40, 4000), (None, "left", "right")):
        for prompt in ("word " * 60, list(range(300, 400))):
            body: Body = {"prompt": prompt, "truncate_prompt_tokens": keep, "max_tokens": 4}
            yield body if side is None else {**body, "truncation_side": side}


def _begun() -> Iterator[tuple[str, Body]]:
    """Text that begins with a family's BOS already, with and without the tokenizer's own."""
    for bos in BOS.values():
        text = f"{bos}Hello"
        for special in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            yield TEXT, {"prompt": text, **special}
            yield CHAT, {"messages": [user(text)], **special}
        yield MESSAGES, {"messages": [user(text)], "max_tokens": 4}
        yield RESPONSES, {"input": text}
