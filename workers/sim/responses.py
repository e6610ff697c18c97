"""/v1/responses as vLLM serves it: request fields, the response, its stream, the store of responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgspec

from store.prompt.request import ResponsesPrompt
from workers.sim.bodies import Body, Refused
from workers.sim.calls import ToolCall, forced_call
from workers.sim.forms import Choice, Counts, added_text, span
from workers.sim.vocabulary import Answer

Item = dict[str, Any]
_encode: Final = msgspec.json.encode
# vLLM keeps every response for ever; here the oldest are given up.
_KEPT: Final = 4096


class ResponsesBody(msgspec.Struct):
    """Fields of /v1/responses besides those that make the prompt."""

    model: str | None = None
    background: bool | None = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: Any = None
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Item] = []
    top_p: float | None = None
    user: str | None = None
    seed: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None

    def plain(self) -> Body:
        """As the engine takes it, with tools in chat's form."""
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": cast(Item, choice).get("name")}}
        return Body(
            model=self.model,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stream=self.stream,
            tools=[{"function": tool} for tool in self.tools if tool.get("type") == "function"],
            tool_choice=choice,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            vllm_xargs=self.vllm_xargs,
        )


def not_found(response_id: str) -> Refused:
    return Refused(
        f"Response with id '{response_id}' not found.",
        param="response_id",
        kind="invalid_request_error",
        status=404,
    )


class Response:
    """The answer to one request. `result` is the response object as it stands."""

    def __init__(self, body: ResponsesBody, model: str, room: int) -> None:
        identity = uuid.uuid4().hex[:16]
        self.call: Final[ToolCall | None] = forced_call(body.plain(), identity)
        self._item_id: Final = f"{'msg' if self.call is None else 'fc'}_{uuid.uuid4().hex[:16]}"
        self._sequence = 0
        self._opened = False
        self.result: Item = {
            "id": f"resp_{identity}",
            "created_at": int(time.time()),
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice if body.tools else "none",
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": bool(body.background),
            "max_output_tokens": body.max_output_tokens or room,
            "max_tool_calls": None,
            "previous_response_id": body.previous_response_id,
            "prompt": None,
            "reasoning": body.reasoning,
            "service_tier": "auto",
            "status": "queued" if body.background and not body.stream else "in_progress",
            "text": body.text,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        answer = choices[0].answer
        self._end(self._item("completed", choices[0].text), answer.finish, counts)
        return _encode(self.result)

    def begin(self, counts: Counts) -> Iterator[bytes]:
        yield self._event("response.created", response=self.result)
        yield self._event("response.in_progress", response=self.result)

    def piece(self, index: int, answer: Answer, start: int, end: int, counts: Counts) -> Iterator[bytes]:
        if self.call is None:
            yield from self._text(answer, start, end, counts)
        else:
            yield from self._arguments(self.call, answer, start, end, counts)

    def close(self, counts: Counts) -> Iterator[bytes]:
        yield self._event("response.completed", response=self.result)

    def _text(self, answer: Answer, start: int, end: int, counts: Counts) -> Iterator[bytes]:
        at: Item = {"content_index": 0, "item_id": self._item_id, "output_index": 0}
        if not self._opened:
            self._opened = True
            item: Item = self._item("in_progress", "") | {"content": []}
            yield self._event("response.output_item.added", item=item, output_index=0)
            yield self._event("response.content_part.added", **at, part=_part("", []))
        yield self._event(
            "response.output_text.delta", **at, delta=added_text(answer, start, end), logprobs=[]
        )
        if end == len(answer.ids):
            text = "".join(answer.pieces)
            yield self._event("response.output_text.done", **at, logprobs=[], text=text)
            yield self._event("response.content_part.done", **at, part=_part(text, None))
            yield from self._done(self._item("completed", text), answer, counts)

    def _arguments(
        self, call: ToolCall, answer: Answer, start: int, end: int, counts: Counts
    ) -> Iterator[bytes]:
        at: Item = {"item_id": self._item_id, "output_index": 0}
        added = call.delta(*span(answer, start, end))
        if added is not None and added.begins:
            item = self._item("in_progress", "") | {"arguments": ""}
            yield self._event("response.output_item.added", item=item, output_index=0)
        if added is not None and added.arguments:
            yield self._event("response.function_call_arguments.delta", **at, delta=added.arguments)
        if end == len(answer.ids):
            told = {"arguments": call.arguments, "name": call.name}
            yield self._event("response.function_call_arguments.done", **at, **told)
            yield from self._done(self._item("completed", ""), answer, counts)

    def _done(self, item: Item, answer: Answer, counts: Counts) -> Iterator[bytes]:
        yield self._event("response.output_item.done", item=item, output_index=0)
        self._end(item, answer.finish, counts)

    def _end(self, item: Item, finish: str, counts: Counts) -> None:
        cut = finish == "length"
        read: Item = {"cached_tokens": counts.cached, "cache_write_tokens": counts.created}
        turns: Item = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        self.result = self.result | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item],
            "status": "incomplete" if cut else "completed",
            "usage": {
                "input_tokens": counts.prompt,
                "input_tokens_details": read | turns,
                "output_tokens": counts.output,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": counts.prompt + counts.output,
            },
        }

    def _item(self, status: Literal["in_progress", "completed"], text: str) -> Item:
        if self.call is None:
            item: Item = {"id": self._item_id, "content": [_part(text, None)], "role": "assistant"}
            return {**item, "status": status, "type": "message", "phase": None}
        call = {"arguments": self.call.arguments, "call_id": self.call.id, "name": self.call.name}
        return {
            **call,
            "type": "function_call",
            "id": self._item_id,
            "async": None,
            "caller": None,
            "namespace": None,
            "status": status,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        fields |= {"sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encode(fields))


def _part(text: str, logprobs: list[Any] | None) -> Item:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


@dataclass(slots=True)
class Stored:
    """A response with the items it answers. task: what still works on it."""

    response: Response
    items: list[Item]
    task: asyncio.Task[None] | None = None


class ResponseStore:
    """The responses of one life, as vLLM keeps them with VLLM_ENABLE_RESPONSES_API_STORE=1."""

    def __init__(self) -> None:
        self._stored: Final[OrderedDict[str, Stored]] = OrderedDict()

    def put(self, response: Response, items: list[Item]) -> Stored:
        stored = self._stored[response.result["id"]] = Stored(response, items)
        while len(self._stored) > _KEPT:
            self._stored.popitem(last=False)
        return stored

    def get(self, response_id: str) -> Stored:
        """Raises Refused."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise not_found(response_id)
        return stored

    def cancel(self, response_id: str) -> Item:
        """Ends a background response. Raises Refused for any other, as for one that has ended."""
        stored = self.get(response_id)
        if stored.task is None or stored.task.done():
            words = "Cannot cancel a synchronous response."
            raise Refused(words, param="response_id", kind="invalid_request_error")
        stored.task.cancel()
        stored.response.result = stored.response.result | {"status": "cancelled"}
        return stored.response.result

    def delete(self, response_id: str) -> Item:
        """As OpenAI has it; vLLM serves no DELETE."""
        self.get(response_id)
        del self._stored[response_id]
        return {"id": response_id, "object": "response", "deleted": True}

    def input_items(self, response_id: str) -> Item:
        """As OpenAI has it, newest first; vLLM serves no such path."""
        suffix = response_id.removeprefix("resp_")
        given = enumerate(self.get(response_id).items)
        items = [_identified(item, f"{suffix}{place:04x}") for place, item in given][::-1]
        ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
        return {"object": "list", "data": items, **ends, "has_more": False}

    def history(self, prompt: ResponsesPrompt) -> list[Item]:
        """What the prompt is made of, earlier responses included. Raises Refused."""
        own = _items(prompt.input)
        if prompt.previous_response_id is None:
            return own
        before = self.get(prompt.previous_response_id)
        return [*before.items, *before.response.result["output"], *own]

    def close(self) -> None:
        for stored in self._stored.values():
            if stored.task is not None:
                stored.task.cancel()


def _items(given: str | list[Any]) -> list[Item]:
    """Raises Refused."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not all(isinstance(item, dict) for item in given):
        raise Refused("an input item must be an object", param="input")
    return cast("list[Item]", given)


def _identified(item: Item, suffix: str) -> Item:
    """An input item as it is listed: with an id, and text as a part."""
    kind = item.get("type", "message")
    found: Item = {"id": f"{'msg' if kind == 'message' else kind}_{suffix}", "type": kind, **item}
    if kind == "message" and isinstance(item.get("content"), str) and item.get("role") != "assistant":
        found |= {"content": [{"type": "input_text", "text": item["content"]}], "status": "completed"}
    return found
