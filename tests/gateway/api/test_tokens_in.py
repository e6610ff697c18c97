"""Ids go into a body, and nothing else of it changes."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.tokens_in import MIN_TOKENS, with_tokens

IDS = np.arange(MIN_TOKENS, dtype=np.uint32)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=8,
)
extra = st.dictionaries(
    st.text().filter(lambda k: k not in ("echo", "return_prompt_text", "prompt")), values, max_size=4
)


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@given(more=extra, space=st.sampled_from(["", " ", "\n\t"]))
def test_ids_are_added_and_all_other_bytes_stay(api: str, more: dict[str, Any], space: str) -> None:
    more.pop("kv_transfer_params", None)
    body = (
        json.dumps({"model": "m", **more}, ensure_ascii=False, indent=2 if space else None) + space
    ).encode("utf-8", "surrogatepass")
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    spliced = with_tokens(api, body, IDS, 0)
    assert spliced is not None
    at = body.rindex(b"}")
    assert spliced.startswith(body[:at])
    assert spliced.endswith(body[at:])
    decoded = json.loads(spliced)
    assert decoded.pop("kv_transfer_params") == {"prompt_token_ids": IDS.tolist()}
    assert decoded == json.loads(body)


@given(prompt=st.text(), more=extra)
def test_a_text_prompt_is_exchanged_or_left_alone(prompt: str, more: dict[str, Any]) -> None:
    body = json.dumps({"a": more, "prompt": prompt, "n": 1}).encode()
    spliced = with_tokens("completions", body, IDS, 0)
    assert spliced is not None
    assert json.loads(spliced) == {"a": more, "prompt": IDS.tolist(), "n": 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","echo":true}',
        b'{"model":"m","echo":"yes"}',
        b'{"model":"m","return_prompt_text":true}',
        b'{"model":"m","kv_transfer_params":null}',
        b'{"model":"m","enable_response_messages":true}',
        b'{"model":"m","suffix":"x"}',
        b'{"model":"m"',
        b"[]",
    ],
)
def test_bodies_that_ids_do_not_suit_stay_as_they_are(body: bytes) -> None:
    assert with_tokens("chat", body, IDS, 0) is None


@pytest.mark.parametrize(
    "limit", [b'"max_tokens":9', b'"max_completion_tokens":9', b'"max_output_tokens":9', b'"n":1']
)
def test_prompts_near_the_models_length_go_as_text_so_that_the_engine_words_its_own_error(
    limit: bytes,
) -> None:
    body = b'{"model":"m",' + limit + b"}"
    answer = 1 if limit[1:2] == b"n" else 9
    assert with_tokens("chat", body, IDS, MIN_TOKENS + answer) is not None
    assert with_tokens("chat", body, IDS, MIN_TOKENS + answer - 1) is None


def test_short_prompts_batches_and_doubtful_places_stay_as_they_are() -> None:
    assert with_tokens("chat", b'{"model":"m"}', IDS[:-1], 0) is None
    assert with_tokens("completions", b'{"prompt":["a","b"]}', IDS, 0) is None
    assert with_tokens("completions", b'{"x":{"prompt":"a"},"prompt":"a"}', IDS, 0) is None
    assert with_tokens("completions", b'{"model":"m"}', IDS, 0) is None
    assert with_tokens("other", b'{"model":"m"}', IDS, 0) is None
