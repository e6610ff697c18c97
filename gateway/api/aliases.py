"""Which model is meant: by another name, of which only the bytes change on the way, or by no name at all."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from gateway import errors
from gateway.api.forms import field_span
from gateway.api.parse import ParsedTurn
from gateway.settings import ModelSettings

# vLLM answers these with its own model if none is named, messages with an error.
_NEED_NO_NAME = frozenset(("chat", "completions", "responses"))
# Each that is tried costs another reading of the body.
_MOST_PLACES = 16
_PLACE = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


class Aliases:
    """From `models.*.aliases`. A name that is an alias means its model, also where a worker serves another
    model by it. No name means what each worker takes it for, where that is one model: see `unnamed`."""

    def __init__(self, models: Mapping[str, ModelSettings], unnamed: Callable[[], Collection[str]]) -> None:
        """unnamed: the models that workers answer with if none is named."""
        self._unnamed = unnamed
        self._models = {alias: model for model, own in models.items() for alias in own.aliases}

    def resolved(self, parsed: ParsedTurn, body: bytes, content_type: bytes) -> tuple[ParsedTurn, bytes]:
        """The turn as one for the model that is meant.

        Raises InvalidRequest if no name is found in the body, or none is given where several are meant.
        """
        if not parsed.model and parsed.api in _NEED_NO_NAME:
            return self._named(parsed), body
        model = self._models.get(parsed.model)
        if model is None:
            return parsed, body
        return replace(parsed, model=model), _renamed(body, content_type, parsed.model, model)

    def _named(self, parsed: ParsedTurn) -> ParsedTurn:
        if parsed.response_id:
            # Its holder's, whichever that is.
            return parsed
        meant = self._unnamed()
        if len(meant) > 1:
            raise errors.InvalidRequest("no model is named, and several are served", param="model")
        return replace(parsed, model=next(iter(meant), ""))

    def entries(self, served: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Entries of /v1/models for the aliases of models that are in `served`."""
        for alias, model in self._models.items():
            if model in served:
                yield alias, served[model] | {"id": alias}


def alias_of(asked: ParsedTurn, meant: ParsedTurn) -> str:
    """What the client called the model, "" where it named none or used its own name."""
    return asked.model if asked.model != meant.model else ""


def _renamed(body: bytes, content_type: bytes, alias: str, model: str) -> bytes:
    span = field_span(body, content_type, b"model")
    if span is not None:
        return body[: span[0]] + model.encode() + body[span[1] :]
    name = json.dumps(model, ensure_ascii=False).encode()
    place = _place(body)
    if place is not None:
        return body[: place.start] + name + body[place.stop :]
    # What only Python takes for JSON. Nested objects may have a `model` too; of two at the top, parsers take
    # the last.
    places = [place for place in _PLACE.finditer(body) if _text(place[1]) == alias]
    for found in places[: -_MOST_PLACES - 1 : -1]:
        changed = body[: found.start(1)] + name + body[found.end(1) :]
        if json.loads(changed)["model"] == model:
            return changed
    raise errors.InvalidRequest("the model's name must stand in the body as plain UTF-8", param="model")


def _text(literal: bytes) -> str:
    try:
        return json.loads(literal)
    except ValueError:
        return ""


class _Head(msgspec.Struct):
    model: msgspec.Raw


def _place(body: bytes) -> slice | None:
    """Where the value of the body's own `model` stands, None where the body is no strict JSON.

    A raw value is a view of what it was read from, so its address says where it was.
    """
    try:
        raw = msgspec.json.decode(body, type=_Head).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    start = _address(raw) - _address(body)
    return slice(start, start + len(raw)) if body.startswith(raw, max(0, start)) else None


def _address(buffer: bytes | msgspec.Raw) -> int:
    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data
