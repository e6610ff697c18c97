"""Which API a body is meant for, where nobody says so."""

from typing import Any

import msgspec

from gateway import errors
from gateway.api.parse import API_OF

_PATHS = {api: path for path, api in API_OF.items()}
_HOW = f"say which API it is for (--api, ?api=): {', '.join(_PATHS)} or a path such as /v1/embeddings"
# Fields that only the Messages API has, and kinds of content that no other API takes.
_MESSAGES_FIELDS = frozenset(("system", "anthropic_version", "anthropic_beta", "stop_sequences", "thinking"))
_MESSAGES_CONTENT = frozenset(
    ("tool_use", "tool_result", "thinking", "redacted_thinking", "image", "document", "server_tool_use")
)


class _Message(msgspec.Struct):
    content: Any = None


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
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _PATHS["chat"]
    if "messages" in fields:
        marked = (
            fields.keys() & _MESSAGES_FIELDS
            or ("tools" in fields and _anthropic_tools(fields["tools"]))
            or _anthropic_content(fields["messages"])
        )
        return _PATHS["messages" if marked else "chat"]
    if "prompt" in fields:
        return _PATHS["completions"]
    if "input" in fields or "previous_response_id" in fields:
        return _PATHS["responses"]
    raise errors.InvalidRequest(f"the body has no messages, prompt or input: {_HOW}", param="api")


def _anthropic_tools(tools: msgspec.Raw) -> bool:
    try:
        read = msgspec.json.decode(tools, type=list[dict[str, msgspec.Raw]])
    except msgspec.MsgspecError:
        return False
    return any("input_schema" in tool for tool in read)


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
