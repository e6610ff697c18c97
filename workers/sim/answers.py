"""vLLM's response bodies, field by field in its order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec

from workers.sim.bodies import Body

Api = Literal["chat", "completions"]
FINGERPRINT: Final = "vllm-0.32.0-sim"
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.encode


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class Answers:
    """The answers to one request. `prompt_tokens` is the sum over its prompts."""

    def __init__(self, api: Api, body: Body, model: str, identity: str, created: int) -> None:
        self._api: Final = api
        self._body: Final = body
        self._base: Final = {
            "id": f"{'chatcmpl' if api == 'chat' else 'cmpl'}-{identity}",
            "object": "chat.completion" if api == "chat" else "text_completion",
            "created": created,
            "model": model,
        }
        self._chunk_base: Final = {
            **self._base,
            "object": "chat.completion.chunk" if api == "chat" else "text_completion",
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        """The response that is not streamed."""
        answer: dict[str, Any] = {
            **self._base,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**usage, "completion_tokens_details": None},
        }
        if self._api == "chat":
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return _encode({**answer, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})

    def text_choice(
        self,
        index: int,
        text: str,
        finish: str,
        ids: Sequence[int],
        prompt_logprobs: Sequence[dict[str, Any] | None] | None,
    ) -> dict[str, Any]:
        end = {
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": list(ids) if self._body.return_token_ids else None,
        }
        if self._api == "chat":
            return {"index": index, "message": _message(text), **end, "routed_experts": None}
        more = {"prompt_logprobs": prompt_logprobs, "prompt_token_ids": None, "routed_experts": None}
        return {"index": index, "text": text, **end, **more}

    def tool_choice(self, index: int, call: ToolCall, ids: Sequence[int]) -> dict[str, Any]:
        message = {**_message(None), "tool_calls": [call.whole()]}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "token_ids": list(ids) if self._body.return_token_ids else None,
            "routed_experts": None,
        }

    def opening(self, index: int) -> bytes:
        """The chunk with the role, before a chat answer's first text."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return event({**self._chunk_base, "choices": [choice], "prompt_token_ids": None, "prompt_text": None})

    def chunk(
        self,
        index: int,
        delta: str | dict[str, Any],
        finish: str | None,
        ids: Sequence[int],
        usage: dict[str, Any] | None,
    ) -> bytes:
        """`delta`: text, or a chat delta. `usage`: of the answer so far, when each chunk is to have it."""
        token_ids = list(ids) if self._body.return_token_ids else None
        choice: dict[str, Any]
        if self._api == "chat":
            content = {"content": delta} if isinstance(delta, str) else delta
            choice = {"index": index, "delta": content, "logprobs": None, "finish_reason": finish}
            choice |= (
                {"token_ids": token_ids} if finish is None else {"stop_reason": None, "token_ids": token_ids}
            )
        else:
            choice = {
                "index": index,
                "text": delta,
                "logprobs": None,
                "finish_reason": finish,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": token_ids,
            }
        answer: dict[str, Any] = {**self._chunk_base, "choices": [choice]}
        if usage is not None:
            answer["usage"] = usage
        options = self._body.stream_options
        if finish is not None and not (options and options.include_usage):
            answer["system_fingerprint"] = FINGERPRINT
        return event(answer)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return event({**self._chunk_base, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})

    def usage(self, prompt: int, output: int, cached: int | None, created: int | None) -> dict[str, Any]:
        """`cached` is of one of the prompts; `created`: tokens of blocks that were newly cached."""
        details: dict[str, Any] = {"cached_tokens": cached or 0}
        if self._api == "chat":
            details["created_cache_tokens"] = created
        elif not self._body.stream:
            details["created_cache_tokens"] = None
        if not self._body.stream:
            details["multimodal_tokens"] = None
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": details,
        }


class ToolCall:
    """A call that a model forced to call would have made, in the words of hermes' format."""

    def __init__(self, name: str, arguments: dict[str, Any], identity: str) -> None:
        self.name: Final = name
        self.arguments: Final = json.dumps(arguments, ensure_ascii=False)
        head = f'<tool_call>\n{{"name": {_encode(name).decode()}, "arguments": '
        self.text: Final = f"{head}{self.arguments}}}\n</tool_call>"
        self._span: Final = (len(head), len(head) + len(self.arguments))
        digest = hashlib.sha256(f"{identity}{self.text}".encode()).hexdigest()[:16]
        self._id: Final = f"chatcmpl-tool-{digest}"

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self._id, "type": "function", "function": function}

    def delta(self, start: int, end: int) -> dict[str, Any] | None:
        """What characters `start` to `end - 1` of the text add to the call, None when nothing."""
        first, last = self._span
        calls: dict[str, Any] = {"index": 0}
        if start < first <= end:
            calls = {"id": self._id, "type": "function", "index": 0, "function": {"name": self.name}}
        if part := self.text[max(start, first) : min(end, last)]:
            calls.setdefault("function", {})["arguments"] = part
        return {"content": None, "tool_calls": [calls]} if "function" in calls else None


def forced_call(body: Body, identity: str) -> ToolCall | None:
    """The call of a request that demands one: with the first tool or the named one, and plain arguments."""
    name: object = None
    if isinstance(body.tool_choice, dict):
        name = _function(cast("dict[str, Any]", body.tool_choice)).get("name")
    elif body.tool_choice != "required":
        return None
    for tool in body.tools or ():
        function = _function(tool)
        if name in (None, function.get("name")):
            return ToolCall(str(function.get("name")), _arguments(function.get("parameters") or {}), identity)
    return None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function") or {}


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Values that fit the schema's required properties."""
    properties: dict[str, Any] = schema.get("properties") or {}
    return {name: _value(name, properties.get(name) or {}) for name in schema.get("required") or properties}


def _value(name: str, schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "integer":
            return int(schema.get("minimum", 1))
        case "number":
            return float(schema.get("minimum", 1.0))
        case "boolean":
            return True
        case "array":
            return []
        case "object":
            return _arguments(schema)
        case "null":
            return None
        case _:
            return name


def _message(content: str | None) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
