"""Which API a body is meant for, where nobody says so."""

from typing import Any

import msgspec

from gateway import errors

_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_HOW = f"say which API it is for (--api, ?api=): {', '.join(_PATHS)} or a path such as /v1/embeddings"
# Fields that only the Messages API has, and kinds of content that no other API takes.
_MESSAGES_FIELDS = frozenset(("system", "anthropic_version", "anthropic_beta", "stop_sequences", "thinking"))
_MESSAGES_CONTENT = frozenset(
    ("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document", "server_tool_use")
)


class _Message(msgspec.Struct):
    content: Any = None


class _Fields(msgspec.Struct):
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def api_path(given: str, body: bytes) -> str:
    """The path of `given`, an API's path or its name; of the API that the body's fields show where it is "".

    Raises errors.InvalidRequest: no such API, or the body shows none. A body that is no JSON object goes as
    chat, whose reader says what is wrong with it.
    """
    if given:
        path = _PATHS.get(given, given)
        if not path.startswith("/"):
            raise errors.InvalidRequest(f"no API is called {given[:100]!r}: {_HOW}", param="api")
        return path
    try:
        names = frozenset(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _PATHS["chat"]
    if fields.messages is not msgspec.UNSET:
        marked = names & _MESSAGES_FIELDS or _anthropic_tools(fields) or _anthropic_content(fields.messages)
        return _PATHS["messages" if marked else "chat"]
    if fields.prompt is not msgspec.UNSET:
        return _PATHS["completions"]
    if fields.input is not msgspec.UNSET or "previous_response_id" in names:
        return _PATHS["responses"]
    raise errors.InvalidRequest(f"the body has no messages, prompt or input: {_HOW}", param="api")


def _anthropic_tools(fields: _Fields) -> bool:
    if fields.tools is msgspec.UNSET:
        return False
    try:
        tools = msgspec.json.decode(fields.tools, type=list[dict[str, msgspec.Raw]])
    except msgspec.MsgspecError:
        return False
    return any("input_schema" in tool for tool in tools)


def _anthropic_content(messages: msgspec.Raw) -> bool:
    try:
        read = msgspec.json.decode(messages, type=list[_Message])
    except msgspec.MsgspecError:
        return False
    return any(
        isinstance(block, dict) and block.get("type") in _MESSAGES_CONTENT  # pyright: ignore
        for message in read
        if isinstance(message.content, list)
        for block in message.content  # pyright: ignore
    )
