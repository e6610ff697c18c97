"""Which API a body is taken for where nobody says."""

import json
from typing import Any

import pytest

from gateway import errors
from gateway.admin.body_api import api_path

_TURN = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [_TURN]}, "/v1/chat/completions"),
        ({"messages": [_TURN], "max_tokens": 9, "prompt": "x"}, "/v1/chat/completions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{}]},
            "/v1/chat/completions",
        ),
        ({"messages": [_TURN], "system": "be brief"}, "/v1/messages"),
        ({"messages": [_TURN], "anthropic_version": "2023-06-01"}, "/v1/messages"),
        ({"messages": [_TURN], "tools": [{"name": "f", "input_schema": {}}]}, "/v1/messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "/v1/messages"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"input": "x"}, "/v1/responses"),
    ],
)
def test_fields_show_the_api(body: dict[str, Any], path: str) -> None:
    assert api_path("", json.dumps({"model": "m"} | body).encode()) == path


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'"x"'])
def test_what_is_no_object_is_left_to_the_reader_of_chat(body: bytes) -> None:
    assert api_path("", body) == "/v1/chat/completions"


@pytest.mark.parametrize("messages", ["x", {}, [1], [[1]]])
def test_messages_of_any_form_are_no_fault_here(messages: Any) -> None:
    assert api_path("", json.dumps({"messages": messages, "tools": [1]}).encode()) == "/v1/chat/completions"


def test_an_unclear_body_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="no messages, prompt or input"):
        api_path("", b'{"model": "m"}')
