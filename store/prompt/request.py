"""What shapes a prompt, taken from a request body; and what comes out: token ids and their hash chain."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from store.hashing import Chain

Side: TypeAlias = Literal["left", "right"]

Reason: TypeAlias = Literal[
    "invalid",  # the engine will refuse this body
    "multimodal",  # image, audio, video or embeddings: only the engine's processor knows the tokens
    "no_template",  # the tokenizer has no chat template
    "request_template",  # the request brings its own template
    "template_error",  # the template itself refused the conversation, or failed
    "previous_response",  # /v1/responses with history that only the worker keeps
    "tool_changes",  # /v1/messages that add or remove tools on the way
    "developer_tools",  # tools inside a developer message, for a template that reads them
    "truncate_to_model_length",  # truncate_prompt_tokens -1 needs the worker's max_model_len
    "tokenizer_unavailable",  # nothing loadable at this path
    "too_long",  # far beyond what the model takes: not worth tokenizing
    "tokenizer_unsupported",  # the engine renders this model in a way of its own, or at random
    "hash_seed_unknown",  # xxhash without a fixed seed
]


class Unrenderable(Exception):
    """This prompt cannot be reproduced locally. `reason` is one of `Reason`, fit for a metric's label."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: str = reason


class ChatPrompt(msgspec.Struct, kw_only=True, weakref=True):
    """The fields of a /v1/chat/completions body that decide its prompt, with vLLM's defaults.

    Field names are those of the body, so a body decodes into it as it is. Never modified once made: the
    prompt cache knows it again.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    tool_choice: Any = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    cache_salt: str | None = None


class TextPrompt(msgspec.Struct, kw_only=True, weakref=True):
    """One text prompt of a /v1/completions body."""

    text: str
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    cache_salt: str | None = None


class TokensPrompt(msgspec.Struct, kw_only=True):
    """One prompt of a /v1/completions body that is token ids already."""

    ids: list[int]
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None
    cache_salt: str | None = None


class MessagesPrompt(msgspec.Struct, kw_only=True, weakref=True):
    """The fields of a /v1/messages body that decide its prompt."""

    messages: list[dict[str, Any]]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class ResponsesPrompt(msgspec.Struct, kw_only=True, weakref=True):
    """The fields of a /v1/responses body that decide its prompt."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] = []
    reasoning: dict[str, Any] | None = None
    truncation: str | None = "disabled"
    previous_response_id: str | None = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


PromptRequest: TypeAlias = ChatPrompt | TextPrompt | TokensPrompt | MessagesPrompt | ResponsesPrompt
Ids: TypeAlias = npt.NDArray[np.uint32]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as its engine sees it. `tokens` has shape (n,); `chain` covers its full blocks.

    source: `ids` (the client sent them), `local` (rendered here) or `remote` (a worker rendered it).
    partial: only the beginning is known, up to some place before the first image (or other media).
    """

    tokens: Ids
    chain: Chain
    source: Literal["local", "remote", "ids"]
    partial: bool = False

    @property
    def size(self) -> int:
        """Its tokens; of a partial prompt the least it can have."""
        return len(self.tokens) + self.partial
