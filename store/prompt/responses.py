"""A /v1/responses body as the chat that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias, cast

from store.prompt.normalise import Message, arguments_object
from store.prompt.request import ChatPrompt, ResponsesPrompt, Unrenderable

Item: TypeAlias = dict[str, Any]

_UNFINISHED: Final = frozenset(("in_progress", "incomplete"))
# The one parameter vLLM gives a custom tool, whose input is free text.
_CUSTOM_SCHEMA: Final[Item] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of_responses(request: ResponsesPrompt) -> ChatPrompt:
    """Raises Unrenderable for what only the worker knows: earlier responses, how much it can take."""
    if request.previous_response_id is not None or request.prompt is not None:
        raise Unrenderable("previous_response")
    if request.truncation != "disabled":
        raise Unrenderable("truncate_to_model_length")
    messages: list[Message] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
        unfinished = False
    else:
        items = [_item(item) for item in request.input]
        messages += _messages(items)
        unfinished = bool(items) and _is_unfinished(items[-1])
    return ChatPrompt(
        messages=messages,
        tools=[_function(tool) for tool in _function_tools(request.tools)] if request.tools else None,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        # Unlike the chat API, this one leaves the tokenizer's default on.
        add_special_tokens=True,
        cache_salt=request.cache_salt,
    )


def _item(given: Any) -> Item:
    if not isinstance(given, dict):
        raise Unrenderable("invalid", "an input item must be an object")
    return cast(Item, given)


def _is_unfinished(item: Item) -> bool:
    """Whether the model is to go on with this last item instead of answering it."""
    return item.get("type", "message") in {"message", "reasoning"} and item.get("status") in _UNFINISHED


def _messages(items: list[Item]) -> list[Message]:
    """Items of one assistant turn (reasoning, text, calls) share a message as long as there is room."""
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        kind = item.get("type", "message")
        if kind in {"function_call", "custom_tool_call"}:
            call = _tool_call(item)
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                last.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            _add(messages, last, "reasoning", _reasoning(item))
        elif kind in {"function_call_output", "custom_tool_call_output"}:
            messages.append(
                {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
            )
        elif item.get("role") == "assistant":
            _add(messages, last, "content", _output_text(item))
        elif "role" in item:
            messages.append(item)
        else:
            raise Unrenderable("invalid", f"input item of type {kind}")
    return messages


def _add(messages: list[Message], last: Message | None, field: str, text: str) -> None:
    if last is not None and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _output_text(item: Item) -> str:
    """The first text of an assistant's message; vLLM leaves the others out."""
    content = item.get("content")
    if isinstance(content, list) and content:
        first: Any = cast(list[Any], content)[0]
        content = cast(Item, first).get("text") if isinstance(first, dict) else None
    if not isinstance(content, str):
        raise Unrenderable("invalid", "an assistant message needs text")
    return content


def _reasoning(item: Item) -> str:
    if item.get("encrypted_content"):
        raise Unrenderable("invalid", "encrypted reasoning")
    texts: list[str] = []
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field)
        if parts is not None and not isinstance(parts, list):
            raise Unrenderable("invalid", f"the {field} of reasoning must be a list")
        for part in cast(list[Any], parts or []):
            fields = cast(Item, part) if isinstance(part, dict) else {}
            text = fields.get("text")
            if fields.get("type") != kind or not isinstance(text, str):
                raise Unrenderable("invalid", "reasoning needs text")
            texts.append(text)
    return texts[0] if texts else ""


def _tool_call(item: Item) -> Item:
    """With the keys in the order vLLM writes here, and the arguments as an object already."""
    name = item.get("name")
    if not isinstance(name, str) or not isinstance(item.get("call_id"), str):
        raise Unrenderable("invalid", "a call needs a name and a call_id")
    if item["type"] == "custom_tool_call":
        arguments: Item = {"input": item.get("input") or ""}
    else:
        arguments = arguments_object(item.get("arguments"))
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
    return {"id": item["call_id"], "function": {"name": name, "arguments": arguments}, "type": "function"}


def _function_tools(tools: list[Any]) -> Iterator[Item]:
    """The tools a model is shown; those of other types are not."""
    for given in tools:
        tool = _item(given)
        kind = tool.get("type")
        if kind == "function":
            yield tool
        elif kind == "custom":
            yield {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": _CUSTOM_SCHEMA,
            }
        elif kind == "namespace":
            for inner in map(_item, tool.get("tools") or ()):
                if inner.get("type") == "function":
                    yield inner | {"name": f"{tool.get('name')}__{inner.get('name')}"}


def _function(tool: Item) -> Item:
    fields = ("name", "description", "parameters", "strict", "defer_loading")
    return {"type": "function", "function": {field: tool.get(field) for field in fields}}
