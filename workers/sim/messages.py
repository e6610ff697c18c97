"""/v1/messages as vLLM serves it: request fields, the message, its stream, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from workers.sim.bodies import Body, Refused
from workers.sim.calls import ToolCall, forced_call
from workers.sim.forms import Choice, Counts, added_text, span
from workers.sim.vocabulary import Answer

_encode: Final = msgspec.json.encode
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesBody(msgspec.Struct):
    """Fields of /v1/messages besides those that make the prompt."""

    model: str
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    tool_choice: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    def plain(self) -> Body:
        """As the engine takes it, with tools in chat's form. Raises Refused."""
        if self.max_tokens <= 0:
            raise Refused(
                "1 validation error:\n  max_tokens must be positive",
                param="body.max_tokens",
                kind="Bad Request",
            )
        choice = self.tool_choice or {}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        return Body(
            model=self.model,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            tools=[
                {"function": {"name": tool.get("name"), "parameters": tool.get("input_schema")}}
                for tool in self.tools or ()
            ],
            tool_choice={"any": "required", "tool": named}.get(choice.get("type", "")),
            cache_salt=self.cache_salt,
            kv_transfer_params=self.kv_transfer_params,
            vllm_xargs=self.vllm_xargs,
        )


class CountBody(msgspec.Struct):
    """Fields of /v1/messages/count_tokens besides those that make the prompt."""

    model: str


def counted(tokens: int) -> bytes:
    return _encode({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


def error(refused: Refused) -> bytes:
    """An objection in Anthropic's shape; a body that it can't read vLLM refuses in OpenAI's."""
    if refused.kind == "Bad Request":
        return refused.body()
    return _encode({"type": "error", "error": {"type": refused.kind, "message": str(refused)}})


class Message:
    """The answer to one request."""

    def __init__(self, body: Body, model: str, identity: str) -> None:
        self.call: Final[ToolCall | None] = forced_call(body, identity)
        self._opened = False
        self._finish = ""
        self._head: Final = {"id": f"chatcmpl-{identity}", "type": "message", "role": "assistant"}
        self._model: Final = model

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        answer = choices[0].answer
        block: dict[str, Any] = {"type": "text", "text": choices[0].text}
        if self.call is not None:
            block = {**self._tool_use(self.call), "input": json.loads(self.call.arguments)}
        end = {"stop_reason": _REASONS[answer.finish], "usage": _usage(counts)}
        return _encode({**self._head, "content": [block], "model": self._model, **end})

    def begin(self, counts: Counts) -> Iterator[bytes]:
        usage = {"input_tokens": counts.prompt, "output_tokens": 0}
        end = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message={**self._head, "content": [], "model": self._model, **end})

    def piece(self, index: int, answer: Answer, start: int, end: int, counts: Counts) -> Iterator[bytes]:
        delta: dict[str, Any] | None
        if self.call is None:
            block: dict[str, Any] = {"type": "text", "text": ""}
            begins = not self._opened
            delta = {"type": "text_delta", "text": added_text(answer, start, end)}
        else:
            added = self.call.delta(*span(answer, start, end))
            block = {**self._tool_use(self.call), "input": {}}
            begins = added is not None and added.begins
            part = added.arguments if added is not None else ""
            delta = {"type": "input_json_delta", "partial_json": part} if part else None
        if begins:
            self._opened = True
            yield _event("content_block_start", content_block=block, index=0)
        if delta is not None:
            yield _event("content_block_delta", delta=delta, index=0)
        if end == len(answer.ids):
            self._finish = answer.finish

    def close(self, counts: Counts) -> Iterator[bytes]:
        if self._opened:
            yield _event("content_block_stop", index=0)
        delta = {"stop_reason": _REASONS[self._finish], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(counts))
        yield _event("message_stop")

    @staticmethod
    def _tool_use(call: ToolCall) -> dict[str, Any]:
        return {"type": "tool_use", "id": call.id, "name": call.name}


def _usage(counts: Counts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt - counts.cached - counts.created,
        "output_tokens": counts.output,
        "cache_creation_input_tokens": counts.created,
        "cache_read_input_tokens": counts.cached,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
