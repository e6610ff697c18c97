"""Other names for models: clients may ask by them, and only the bytes of the name change on the way."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway import errors
from gateway.api.forms import field_span
from gateway.api.parse import ParsedTurn
from gateway.settings import ModelSettings

# Each that is tried costs another reading of the body.
_MOST_PLACES = 16
_PLACE = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


class Aliases:
    """From `models.*.aliases`. A name that is an alias means its model, also where a worker serves another
    model by it."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._models = {alias: model for model, own in models.items() for alias in own.aliases}

    def resolved(self, parsed: ParsedTurn, body: bytes, content_type: bytes) -> tuple[ParsedTurn, bytes]:
        """The turn as one for the model that is meant. Raises InvalidRequest if no name is found."""
        model = self._models.get(parsed.model)
        if model is None:
            return parsed, body
        return replace(parsed, model=model), _renamed(body, content_type, parsed.model, model)

    def entries(self, served: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Entries of /v1/models for the aliases of models that are in `served`."""
        for alias, model in self._models.items():
            if model in served:
                yield alias, served[model] | {"id": alias}


def _renamed(body: bytes, content_type: bytes, alias: str, model: str) -> bytes:
    span = field_span(body, content_type, b"model")
    if span is not None:
        return body[: span[0]] + model.encode() + body[span[1] :]
    name = json.dumps(model, ensure_ascii=False).encode()
    # Nested objects may have a `model` too; of two at the top, parsers take the last.
    places = [place for place in _PLACE.finditer(body) if _text(place[1]) == alias]
    for place in places[: -_MOST_PLACES - 1 : -1]:
        changed = body[: place.start(1)] + name + body[place.end(1) :]
        if _model_of(changed) == model:
            return changed
    raise errors.InvalidRequest("the model's name must stand in the body as plain UTF-8", param="model")


def _text(literal: bytes) -> str:
    try:
        return json.loads(literal)
    except ValueError:
        return ""


class _Head(msgspec.Struct):
    model: Any = None


def _model_of(body: bytes) -> object:
    try:
        return msgspec.json.decode(body, type=_Head).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return json.loads(body)["model"]
