"""Usage and proper ends, read from the last bytes of answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.usage import AnswerTail, Usage, parse_usage


def answer(usage: object, **after: object) -> bytes:
    return json.dumps(
        {"id": "x", "choices": [{"message": {"content": "hi"}}], "usage": usage, **after}
    ).encode()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        ({"prompt_tokens": 9}, Usage(9, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": None}}, Usage(9, None)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": -1}}, Usage(9, None)),
        ({"prompt_tokens": None}, None),
        ({"prompt_tokens": "9"}, None),
        (None, None),
        ([], None),
    ],
)
def test_b072_usage_is_read_and_nonsense_is_not(usage: object, expected: Usage | None) -> None:
    assert parse_usage(answer(usage)) == expected


def test_the_last_usage_of_a_stream_counts() -> None:
    events = [answer(None), answer({"prompt_tokens": 5}), answer({"prompt_tokens": 7})]
    stream = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    assert parse_usage(stream) == Usage(7, None)


def test_text_that_looks_like_usage_is_not_taken_for_it() -> None:
    said = '{"usage": {"prompt_tokens": 1}} "usage":{"prompt_tokens":1}'
    body = json.dumps({"usage": {"prompt_tokens": 3}, "choices": [{"text": said}]}).encode()
    assert parse_usage(body) == Usage(3, None)


def test_what_nests_too_deeply_is_passed_over() -> None:
    assert parse_usage(answer({"prompt_tokens": 5}) + b'"usage":' + b"[" * 5000) == Usage(5, None)


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(tail: bytes) -> None:
    parse_usage(tail)
    parse_usage(tail + b'"usage":' + tail)


@given(st.lists(st.binary(min_size=1, max_size=40_000), max_size=12))
def test_the_tail_is_bounded_and_is_the_end_of_what_was_fed(chunks: list[bytes]) -> None:
    tail = AnswerTail()
    for chunk in chunks:
        tail.feed(chunk)
    whole = b"".join(chunks)
    assert bool(tail) == bool(chunks)
    assert tail.content() == whole[-(1 << 16) :]


@pytest.mark.parametrize(
    "end",
    [
        *(b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]", b"data: [DONE]\n\n: bye\n\n"),
        *(b"data: [DONE]\n\n: data: [DONE] was it\n", b"data: [DONE]\n" + b":" * 60),
    ],
)
def test_b031_the_terminator_is_known_in_every_dialect(end: bytes) -> None:
    tail = AnswerTail()
    for byte in b"data: {}\n\n" + end:
        tail.feed(bytes([byte]))
    assert tail.ends_with_done()


@pytest.mark.parametrize(
    "end",
    [
        *(b"data: {}\n\n", b'data: {"x":"data: [DONE]"}\n\n', b"data: [DONE]\n\ndata: {}\n\n", b""),
        # Colons that could be one comment or many must not be tried in every way.
        b"data: [DONE]\n" + b":" * 60 + b"\nx",
    ],
)
def test_what_is_no_terminator_is_not_taken_for_one(end: bytes) -> None:
    tail = AnswerTail()
    tail.feed(b"data: {}\n\n" + end)
    assert not tail.ends_with_done()


@pytest.mark.parametrize(
    ("stream", "last"),
    [
        (b"event: a\ndata: {}\n\nevent:b\r\ndata: event: c\r\n\r\n", b"b"),
        (b'data: {}\n\ndata: {"x":"event: a"}\n\n', b""),
        (b"event: a\n\ndata: event: b", b"a"),
        (b"", b""),
    ],
)
def test_the_last_named_event_is_one_that_begins_a_line(stream: bytes, last: bytes) -> None:
    tail = AnswerTail()
    tail.feed(stream)
    assert tail.last_event() == last
