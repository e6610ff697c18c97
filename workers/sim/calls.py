"""Tool calls that a model forced to call would have made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from workers.sim.bodies import Body

_encode: Final = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What some characters of an answer add to its call: its beginning (id and name), arguments, or both."""

    begins: bool
    arguments: str


class ToolCall:
    """A call in the words of hermes' format, and where in them the client's arguments stand."""

    def __init__(self, name: str, arguments: dict[str, Any], identity: str) -> None:
        self.name: Final = name
        self.arguments: Final = json.dumps(arguments, ensure_ascii=False)
        head = f'<tool_call>\n{{"name": {_encode(name).decode()}, "arguments": '
        self.text: Final = f"{head}{self.arguments}}}\n</tool_call>"
        self._span: Final = (len(head), len(head) + len(self.arguments))
        digest = hashlib.sha256(f"{identity}{self.text}".encode()).hexdigest()[:16]
        self.id: Final = f"chatcmpl-tool-{digest}"

    def delta(self, start: int, end: int) -> CallDelta | None:
        """What characters `start` to `end - 1` of the text add to the call, None when nothing."""
        first, last = self._span
        begins = start < first <= end
        part = self.text[max(start, first) : min(end, last)]
        return CallDelta(begins, part) if begins or part else None


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
