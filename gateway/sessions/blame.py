"""Which tool or message of a request a character of its rendered prompt comes from.

The template is a program, so the answer is found by trying: where a message's text begins, a prompt rendered
with another text in its place begins to differ. Whole conversations are rendered, never their heads alone:
templates refuse heads, and write the end of a conversation in their own way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec

from store.prompt.request import ChatPrompt, MessagesPrompt, PromptRequest, ResponsesPrompt

Kind: TypeAlias = Literal["tools", "system", "message", "unknown"]
Render: TypeAlias = Callable[[PromptRequest], str]
Body: TypeAlias = ChatPrompt | MessagesPrompt | ResponsesPrompt
Object: TypeAlias = dict[str, Any]

_SYSTEM: Final = frozenset(("system", "developer"))
# Put in a message's place: a private-use character that no text begins with, or none that is worth a report.
_OTHER: Final = "\ue0a3"


@dataclass(frozen=True, slots=True)
class Cause:
    """`kind` fits a metric's label; `label` says it as a client would find it in its body."""

    kind: Kind
    label: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the conversation. `altered`: the request with another text there; `longer`: with more of it,
    None where something else than text ends it."""

    kind: Kind
    label: str
    altered: Callable[[], Body]
    longer: Callable[[], Body] | None


def has_system(request: PromptRequest) -> bool:
    """Whether the conversation begins with a system prompt of its client's own."""
    if isinstance(request, MessagesPrompt) and request.system:
        return True
    if isinstance(request, ResponsesPrompt) and request.instructions:
        return True
    if not isinstance(request, ChatPrompt | MessagesPrompt | ResponsesPrompt):
        return False
    items = request.input if isinstance(request, ResponsesPrompt) else request.messages
    first: Any = items[0] if items else None
    return isinstance(first, dict) and cast(Object, first).get("role") in _SYSTEM


def blame(
    request: PromptRequest,
    character: int,
    render: Render,
    tools_before: int,
    system_before: bool | None = None,
) -> Cause:
    """What of `request` wrote `character` of its prompt, the first that differs from the previous prompt's.

    tools_before: how many tools the previous prompt had. system_before: whether it had a system prompt of its
    own, None if not known. Raises Unrenderable.
    """
    if not isinstance(request, ChatPrompt | MessagesPrompt | ResponsesPrompt):
        return Cause("unknown", "prompt")
    if isinstance(request, ChatPrompt) and request.truncate_prompt_tokens is not None:
        return Cause("unknown", "unknown")
    text = render(request)
    tools = request.tools or []
    if tools and _in_tools(request, text, character, render):
        return Cause("tools", _tool(request, tools, tools_before, text, character, render))
    parts = _parts(request)
    at = _part_at(parts, text, character, render)
    if tools_before and not tools and (at < 0 or parts[at].kind == "system"):
        return Cause("tools", f"tools: 0 now, {tools_before} before")
    system = has_system(request)
    if system_before is not None and system_before != system and at <= 0:
        # What came or went is in one of both only: the first difference was written by what stands there now.
        if system:
            return Cause("system", f"{parts[0].label}: none before")
        return Cause("system", "system: none now, there was one before")
    if at < 0:
        # Written by the template, or the role of the first message.
        return Cause("unknown", f"before {parts[0].label}" if parts else "unknown")
    return Cause(parts[at].kind, parts[at].label)


def shared_characters(one: str, other: str) -> int:
    """How many leading characters are equal."""
    shorter = min(len(one), len(other))
    return bisect_right(range(1, shorter + 1), False, key=lambda end: one[:end] != other[:end])


def _in_tools(request: Body, text: str, character: int, render: Render) -> bool:
    bare = render(_with_tools(request, []))
    start = shared_characters(text, bare)
    end = len(text) - shared_characters(text[start:][::-1], bare[start:][::-1])
    return start <= character < end


def _tool(
    request: Body, tools: list[Any], tools_before: int, text: str, character: int, render: Render
) -> str:
    """The last tool that begins no later than `character`, by where a prompt without it ends."""

    def start(count: int) -> int:
        return shared_characters(text, render(_with_tools(request, tools[:count])))

    at = bisect_right(range(len(tools)), character, key=start) - 1
    label = "tools" if at < 0 else f"tools[{at}] ({_name(tools[at])})"
    return label if len(tools) == tools_before else f"{label}: {len(tools)} tools now, {tools_before} before"


def _part_at(parts: Sequence[_Part], text: str, character: int, render: Render) -> int:
    """The part that wrote `character`, -1 if it stands before the first."""

    def start(index: int) -> int:
        for part in parts[index:]:
            begins = shared_characters(text, render(part.altered()))
            # A part that the template leaves out begins where the next one does.
            if begins < len(text):
                return begins
        return len(text)

    at = bisect_right(range(len(parts)), character, key=start) - 1
    longer = parts[at].longer if at >= 0 else None
    if longer is not None and at + 1 < len(parts):
        # Beyond its end is what the template writes around the next one: its role, for one.
        end = shared_characters(text, render(longer()))
        at += character > end
    return at


def _parts(request: Body) -> list[_Part]:
    if isinstance(request, ResponsesPrompt):
        parts = [_field("system", "instructions", request)] if request.instructions else []
        if isinstance(request.input, str):
            return [*parts, _field("message", "input", request)]
        return [*parts, *_items("input", request, request.input)]
    parts: list[_Part] = []
    if isinstance(request, MessagesPrompt) and request.system:
        parts.append(_field("system", "system", request))
    return [*parts, *_items("messages", request, request.messages)]


def _field(kind: Kind, field: str, request: Body) -> _Part:
    longer = _longer(getattr(request, field))
    return _Part(
        kind,
        field,
        lambda: msgspec.structs.replace(request, **{field: _OTHER}),
        None if longer is None else lambda: msgspec.structs.replace(request, **{field: longer}),
    )


def _items(field: str, request: Body, items: list[Any]) -> list[_Part]:
    def replaced(index: int, item: Object) -> Body:
        return msgspec.structs.replace(request, **{field: [*items[:index], item, *items[index + 1 :]]})

    def part(index: int, given: Any) -> _Part:
        item = cast(Object, given) if isinstance(given, dict) else {}
        role = item.get("role") or item.get("type") or "?"
        longer = None if item.get("tool_calls") else _longer(item.get("content"))
        return _Part(
            "system" if role in _SYSTEM else "message",
            f"{field}[{index}] ({str(role)[:40]})",
            lambda: replaced(index, _altered(item)),
            None if longer is None else lambda: replaced(index, item | {"content": longer}),
        )

    return [part(index, given) for index, given in enumerate(items)]


def _altered(item: Object) -> Object:
    """With another text where its own begins; items of /v1/responses have theirs in other fields."""
    kind = item.get("type")
    if kind == "reasoning":
        return item | {"content": [{"type": "reasoning_text", "text": _OTHER}]}
    if kind in {"function_call", "custom_tool_call"}:
        return item | {"name": _OTHER}
    if kind in {"function_call_output", "custom_tool_call_output"}:
        return item | {"output": _OTHER}
    if kind == "message" and item.get("role") == "assistant":
        return item | {"content": [{"type": "output_text", "text": _OTHER}]}
    return item | {"content": _OTHER}


def _longer(content: Any) -> Any:
    """Text, or blocks that end with text, and one character more; None for anything else."""
    if isinstance(content, str):
        return content + _OTHER
    if isinstance(content, list) and content:
        blocks = cast(list[Any], content)
        last = cast(Object, blocks[-1]) if isinstance(blocks[-1], dict) else {}
        if isinstance(last.get("text"), str):
            return [*blocks[:-1], last | {"text": last["text"] + _OTHER}]
    return None


def _with_tools(request: Body, tools: list[Any]) -> Body:
    if isinstance(request, ChatPrompt) and not tools:
        return msgspec.structs.replace(request, tools=None, tool_choice=None)
    return msgspec.structs.replace(request, tools=tools)


def _name(tool: Any) -> str:
    fields = cast(Object, tool) if isinstance(tool, dict) else {}
    function = fields.get("function")
    inner = cast(Object, function) if isinstance(function, dict) else fields
    return str(inner.get("name") or "?")[:80]
