"""A /v1/messages body as the chat that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from store.prompt.kept import Kept, once
from store.prompt.normalise import BILLING_HEADER, Message
from store.prompt.request import ChatPrompt, MessagesPrompt, Unrenderable

DisabledEffort: TypeAlias = Literal["none", "low"]
Block: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MessagesFacts:
    """What vLLM tries out on the template once: whether system messages must be merged into the first, and
    the reasoning effort that stands for `thinking: disabled`."""

    merge_system: bool
    disabled_effort: DisabledEffort


def chat_of_messages(request: MessagesPrompt, facts: MessagesFacts) -> ChatPrompt:
    """Raises Unrenderable for what cannot be known here (tools that change on the way).

    Images leave a part that says no more than that there is one.
    """
    messages: list[Message] = []
    # Of the top-level string vLLM takes nothing here: as in any chat, its first line goes later.
    top = request.system
    system = [top] if isinstance(top, str) and top else list(_texts_of_system(top))
    given = [_object(message, "a message") for message in request.messages]
    if facts.merge_system:
        for message in given:
            if message.get("role") == "system":
                system += _texts_of_system(message.get("content"))
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for message in given:
        if message.get("role") == "system":
            text = "".join(_texts_of_system(message.get("content")))
            if text and not facts.merge_system:
                messages.append({"role": "system", "content": text})
        else:
            messages += once(message, "chat", _kept_messages)
    return ChatPrompt(
        messages=messages,
        tools=None if request.tools is None else [once(tool, "chat", _kept_tool) for tool in request.tools],
        reasoning_effort=_effort(request, facts),
        chat_template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt,
    )


def _texts_of_system(content: Any) -> Iterator[str]:
    """Its texts without the attribution block of Claude Code, which changes with every request."""
    blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    for block in _blocks(blocks):
        text = block.get("text")
        if block["type"] == "text" and text and not text.startswith(BILLING_HEADER):
            yield text


def _kept_messages(source: Message) -> list[Kept]:
    return [Kept(message, 0) for message in _messages(source)]


def _kept_tool(given: Any) -> Kept:
    return Kept(_tool(given), 0)


def _messages(source: Message) -> Iterator[Message]:
    """The message of `source`, after those its tool results become."""
    role, content = source.get("role"), source.get("content")
    message: Message = {"role": role}
    if isinstance(content, str):
        yield message | {"content": content}
        return
    parts: list[Block] = []
    calls: list[Block] = []
    thoughts: list[str] = []
    for block in _blocks(content):
        kind = block["type"]
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            parts.append({"type": "image_url"})
        elif kind == "thinking" and block.get("thinking") is not None:
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "tool_result" and role == "user":
            yield from _tool_result(block)
        elif kind == "tool_result":
            result = block.get("content")
            parts.append({"type": "text", "text": f"Tool result: {result or ''}"})
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        single = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if single else parts
    if role != "user" or parts:
        yield message


def _tool_call(block: Block) -> Block:
    """With the keys in the order of vLLM's types, and the arguments as an object already."""
    if not block.get("id"):
        raise Unrenderable("invalid", "a tool_use block needs an id: vLLM makes one up from its clock")
    function: Block = {"arguments": block.get("input") or {}, "name": block.get("name") or ""}
    return {"id": block["id"], "function": function, "type": "function"}


def _tool_result(block: Block) -> Iterator[Message]:
    identity, content = block.get("tool_use_id") or "", block.get("content")
    texts: list[str] = [content] if isinstance(content, str) else []
    references: list[Block] = []
    images: list[Block] = []
    for item in _objects(cast(list[Any], content) if isinstance(content, list) else []):
        kind = item.get("type")
        if kind == "text":
            texts.append(item.get("text", ""))
        elif kind == "image":
            images.append({"type": "image_url"})
        elif kind == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
            references.append({"type": "tool_reference", "name": name})
    yield {"role": "tool", "tool_call_id": identity, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references:
        yield {"role": "tool", "tool_call_id": identity, "content": references}


def _tool(given: Any) -> Block:
    tool = _object(given, "a tool")
    schema = _object(tool.get("input_schema"), "input_schema")
    function: Block = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else schema | {"type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _effort(request: MessagesPrompt, facts: MessagesFacts) -> str | None:
    if (request.thinking or {}).get("type") == "disabled":
        return facts.disabled_effort
    return (request.output_config or {}).get("effort")


def _blocks(content: Any) -> Iterator[Block]:
    if not isinstance(content, list):
        raise Unrenderable("invalid", "content must be text or a list of blocks")
    for block in _objects(cast(list[Any], content)):
        if block.get("type") in {"tool_addition", "tool_removal"}:
            raise Unrenderable("tool_changes")
        if not isinstance(block.get("type"), str):
            raise Unrenderable("invalid", "a block needs a type")
        yield block


def _objects(items: Iterable[Any]) -> Iterator[Block]:
    return (cast(Block, item) for item in items if isinstance(item, dict))


def _object(given: Any, what: str) -> Block:
    if not isinstance(given, dict):
        raise Unrenderable("invalid", f"{what} must be an object")
    return cast(Block, given)
