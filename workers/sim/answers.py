"""vLLM's response bodies for chat and text completions, field by field in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from workers.sim.bodies import Body
from workers.sim.calls import CallDelta, ToolCall, forced_call
from workers.sim.forms import Choice, Counts, added_text, span
from workers.sim.vocabulary import Answer

Api = Literal["chat", "completions"]
FINGERPRINT: Final = "vllm-0.32.0-sim"
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.encode


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


class Answers:
    """The answers to one request to /v1/chat/completions or /v1/completions."""

    def __init__(self, api: Api, body: Body, model: str, identity: str, created: int) -> None:
        self._api: Final = api
        self._body: Final = body
        self.call: Final[ToolCall | None] = forced_call(body, identity) if api == "chat" else None
        self._opened: Final[set[int]] = set()
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

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        answer: dict[str, Any] = {
            **self._base,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {**self._usage(counts), "completion_tokens_details": None},
        }
        if self._api == "chat":
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return _encode({**answer, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None})

    def begin(self, counts: Counts) -> Iterator[bytes]:
        yield from ()

    def piece(self, index: int, answer: Answer, start: int, end: int, counts: Counts) -> Iterator[bytes]:
        if self._api == "chat" and index not in self._opened:
            self._opened.add(index)
            yield self._opening(index)
        finish = answer.finish if end == len(answer.ids) else None
        delta: str | dict[str, Any] | None = added_text(answer, start, end)
        if self.call is not None:
            added = self.call.delta(*span(answer, start, end))
            delta = None if added is None else _tool_delta(self.call, added)
        if delta is None and finish is None:
            return
        options = self._body.stream_options
        usage = self._usage(counts) if options is not None and options.continuous_usage_stats else None
        yield self._chunk(index, delta or "", finish, answer.ids[start:end], usage)

    def close(self, counts: Counts) -> Iterator[bytes]:
        options = self._body.stream_options
        if options is not None and options.include_usage:
            last: dict[str, Any] = {
                "choices": [],
                "usage": self._usage(counts),
                "system_fingerprint": FINGERPRINT,
            }
            yield event({**self._chunk_base, **last})
        yield DONE

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        called = self.call if answer.finish == "tool_calls" else None
        end = {
            "logprobs": None,
            "finish_reason": answer.finish,
            "stop_reason": None,
            "token_ids": list(answer.ids) if self._body.return_token_ids else None,
        }
        if self._api == "chat":
            message = _message(choice.text) if called is None else _calling(called)
            return {"index": index, "message": message, **end, "routed_experts": None}
        more = {
            "prompt_logprobs": choice.prompt_logprobs,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
        return {"index": index, "text": choice.text, **end, **more}

    def _opening(self, index: int) -> bytes:
        """The chunk with the role, before a chat answer's first text."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return event({**self._chunk_base, "choices": [choice], "prompt_token_ids": None, "prompt_text": None})

    def _chunk(
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

    def _usage(self, counts: Counts) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": counts.cached}
        if self._api == "chat":
            details["created_cache_tokens"] = counts.created
        elif not self._body.stream:
            details["created_cache_tokens"] = None
        if not self._body.stream:
            details["multimodal_tokens"] = None
        return {
            "prompt_tokens": counts.prompt,
            "total_tokens": counts.prompt + counts.output,
            "completion_tokens": counts.output,
            "prompt_tokens_details": details,
        }


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


def _calling(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {**_message(None), "tool_calls": [{"id": call.id, "type": "function", "function": function}]}


def _tool_delta(call: ToolCall, added: CallDelta) -> dict[str, Any]:
    calls: dict[str, Any] = {"index": 0}
    if added.begins:
        calls = {"id": call.id, "type": "function", "index": 0, "function": {"name": call.name}}
    if added.arguments:
        calls.setdefault("function", {})["arguments"] = added.arguments
    return {"content": None, "tool_calls": [calls]}
