"""What vLLM does to a chat body before its template sees it, as pure functions over decoded JSON.

Nothing given in is modified. A body that vLLM refuses, or whose prompt only the engine can know, raises
`Unrenderable`. Accepting what vLLM refuses costs nothing while the worker gets the text, and answers 400; but
sent the ids, it looks at the text no more.
Order of keys matters throughout, because templates print objects as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, TypeAlias, cast

from store.prompt.environment import Printed
from store.prompt.kept import each_once
from store.prompt.media import MediaPart
from store.prompt.request import ChatPrompt, Unrenderable
from store.prompt.template import ContentFormat, TemplateFacts

Message: TypeAlias = dict[str, Any]
_role = itemgetter("role")

BILLING_HEADER: Final = "x-anthropic-billing-header"

_TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
_STRICT: Final = frozenset(("system", "user", "assistant"))
# Keys vLLM's part types declare; others (cache_control, say) stay with the part in the "openai" format.
_PART_KEYS: Final = frozenset(
    (
        *("type", "text", "refusal", "thinking", "name", "uuid", "data", "file", "closed"),
        *("image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_cache_breakpoint"),
    )
)
# What it is given by name already.
_TAKEN: Final = frozenset(("self", "conversation"))


def conversation(messages: Sequence[Any], facts: TemplateFacts) -> list[Message]:
    """The messages as the template gets them."""
    form = facts.content_format
    found: list[Message] = each_once(messages, form, lambda given: _message(given, form))
    if "developer" in map(_role, found):
        if not facts.knows_developer:
            return _merge_system([_as_system(message) for message in found])
        if any(message.get("tools") for message in found):
            raise Unrenderable("developer_tools")
    return found


def tools(given: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tool definitions as vLLM dumps them: fixed keys in fixed order, absent ones null."""
    if given is None:
        return None
    return each_once(given, "tool", lambda tool: Printed(_tool(tool)))


def template_keywords(request: ChatPrompt, facts: TemplateFacts) -> dict[str, Any]:
    """Keywords for the template besides messages: the request's own, filtered to what the template reads.

    A value of None or "auto" counts as not given. `tools` is included when there are any.
    """
    given = request.chat_template_kwargs or {}
    if given.get("chat_template") is not None:
        raise Unrenderable("request_template")
    if given.keys() & _TAKEN or given.get("documents") in (False, ""):
        raise Unrenderable("invalid", "keywords that transformers' apply_chat_template can't be given")
    found: dict[str, Any] = {"tools": tools(request.tools), **_set(given)}
    found["add_generation_prompt"] = request.add_generation_prompt
    found["continue_final_message"] = request.continue_final_message
    if request.documents is not None:
        found["documents"] = request.documents
    effort = request.reasoning_effort
    if effort is not None:
        if effort != "auto":
            found["reasoning_effort"] = effort
        if "enable_thinking" not in given:
            found["enable_thinking"] = effort != "none"
    return {key: value for key, value in found.items() if value is not None and key in facts.keywords}


def _set(keywords: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if value is not None and value != "auto"}


def _message(given: Any, content_format: ContentFormat) -> Message:
    if not isinstance(given, dict):
        raise Unrenderable("invalid", "a message must be an object")
    source = cast("dict[str, Any]", given)
    role = source.get("role")
    if not isinstance(role, str):
        raise Unrenderable("invalid", "a message needs a role")
    content = source.get("content")
    if isinstance(content, str) and role != "system":  # most messages: the short way to the same
        content = [{"type": "text", "text": content}] if content_format == "openai" else content
        return _with_fields({"role": role, "content": content}, role, source)
    parts = _parts(content)
    if role in _STRICT and parts and isinstance(parts[0], str):
        raise Unrenderable("invalid", "vLLM takes bare strings only among parts of other kinds")
    if role == "system":
        parts = _without_billing_header(parts)
    content = _content(parts, content_format)
    return _with_fields({"role": role, "content": content}, role, source)


def _with_fields(message: Message, role: str, source: dict[str, Any]) -> Message:
    """What comes with the content, by role."""
    content = message["content"]
    if role == "assistant":
        _add_assistant_fields(message, source)
    elif role == "tool":
        if "tool_call_id" in source:
            message["tool_call_id"] = source["tool_call_id"]
        if isinstance(content, list):
            message["content"] = _tool_content(cast(list[dict[str, Any]], content))
    for key in ("name", "task"):
        if isinstance(source.get(key), str):
            message[key] = source[key]
    if role == "developer":
        message["tools"] = source.get("tools")
    return message


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return cast(list[Any], content)
    raise Unrenderable("invalid", "content must be text or a list of parts")


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """Claude Code's attribution line changes with every request; vLLM takes it out of system texts."""
    kept: list[Any] = []
    for part in parts:
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
        text = cast(object, fields.get("text") if fields.get("type") == "text" else part)
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(fields | {"text": rest} if fields else rest)
    return kept


def _content(parts: list[Any], content_format: ContentFormat) -> str | list[dict[str, Any]]:
    if content_format == "openai":
        return [_wrapped(part) for part in parts]
    # vLLM leaves empty texts out, so they bring no line break.
    return "\n".join(text for part in parts if (text := _text_of(part)))


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    kind = fields.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None or fields.get("uuid") is not None:
        raise Unrenderable("multimodal")
    text = fields.get(key)
    if not isinstance(text, str):
        raise Unrenderable("invalid", f"a {kind} part needs its text")
    return text


def _wrapped(part: Any) -> dict[str, Any]:
    if isinstance(part, MediaPart):
        return {"type": part.kind}
    text = _text_of(part)
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": text}
    return {"type": "text", "text": text} | {k: v for k, v in part.items() if k not in _PART_KEYS}


def _tool_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _add_assistant_fields(message: Message, source: dict[str, Any]) -> None:
    calls = source.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Unrenderable("invalid", "tool_calls must be a list")
        message["tool_calls"] = [_tool_call(call) for call in cast(list[Any], calls)]
    reasoning = source.get("reasoning")
    if reasoning is None:
        reasoning = source.get("reasoning_content")
    if reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reasoning


def _tool_call(given: Any) -> dict[str, Any]:
    call = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise Unrenderable("invalid", "tool_calls must be of type function")
    function = cast(dict[str, Any], function)
    if isinstance(function.get("arguments"), dict):  # parsed and in order already: not from a chat body
        return call
    # The keys of the declared types come first, as pydantic leaves them.
    parsed: dict[str, Any] = {"arguments": arguments_object(function.get("arguments"))}
    parsed.update((key, value) for key, value in function.items() if key != "arguments")
    ordered: dict[str, Any] = {"id": call["id"]} if "id" in call else {}
    ordered["function"] = parsed
    ordered.update((key, value) for key, value in call.items() if key not in {"id", "function"})
    return ordered


def arguments_object(given: Any) -> dict[str, Any]:
    """Arguments as an object; what is no JSON object becomes an empty one."""
    if isinstance(given, str) and given:
        return _parsed(given) if len(given) <= _LONGEST_KEPT else _parsed.__wrapped__(given)
    return cast(dict[str, Any], given) if isinstance(given, dict) else {}


# Every turn of a session brings all its calls again: at most 4 MB of text and what it parses to.
_LONGEST_KEPT: Final = 4096


@lru_cache(maxsize=1024)
def _parsed(arguments: str) -> Printed:
    try:
        found: Any = json.loads(arguments)
    except json.JSONDecodeError:
        found = None
    return Printed(cast(dict[str, Any], found) if isinstance(found, dict) else {})


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {k: v for k, v in message.items() if k != "tools"} | {"role": "system"}


def _merge_system(messages: list[Message]) -> list[Message]:
    """All system messages as one in front, unless the only one stands there already."""
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts: list[str] = []
    for place in places:
        content = messages[place]["content"]
        if isinstance(content, list):
            parts = cast(list[dict[str, Any]], content)
            content = "\n".join(part["text"] for part in parts if "text" in part)
        if content:
            texts.append(content)
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _tool(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Unrenderable("invalid", "a tool must be an object")
    tool = cast(dict[str, Any], given)
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise Unrenderable("invalid", "a tool must be a function")
    source = cast(dict[str, Any], function)
    name, description, parameters = source.get("name"), source.get("description"), source.get("parameters")
    if (
        not isinstance(name, str)
        or not isinstance(description, str | None)
        or not isinstance(parameters, dict | None)
    ):
        raise Unrenderable("invalid", "a function needs a name, a text as description and a schema")
    outer = _flag(tool, "defer_loading")
    inner = _flag(source, "defer_loading")
    strict = _flag(source, "strict")
    dumped: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if strict is not None:
        dumped["strict"] = strict
    if (deferred := outer if inner is None else inner) is not None:
        dumped["defer_loading"] = deferred
    found: dict[str, Any] = {"type": "function", "function": dumped}
    return found if outer is None else found | {"defer_loading": outer}


def _flag(given: dict[str, Any], key: str) -> bool | None:
    value = given.get(key)
    if not isinstance(value, bool | None):
        raise Unrenderable("invalid", f"{key} must be true or false")
    return value
