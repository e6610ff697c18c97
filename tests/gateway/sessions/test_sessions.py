"""Names of sessions, and the memory of their prompts."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.parse import parse
from gateway.sessions.divergence import common_prefix, repeated_share
from gateway.sessions.sessions import Departure, Seen, Sessions, hint, named_in_body, names, says_it_ends
from store.hashing import HashScheme, chain
from store.prompt.request import ChatPrompt, TextPrompt

SCHEME = HashScheme("sha256_cbor", 4)
UUID = "57a121ec-f78c-48c3-a745-e3036a3ecc33"


def seen(tokens: Sequence[int], session: str = "", opening: str = "", request_id: str = "r") -> Seen:
    ids = np.array(tokens, dtype=np.uint32)
    keys = chain(ids, SCHEME).keys
    request = ChatPrompt(messages=[{"role": "user", "content": opening}]) if opening else TextPrompt(text="")
    found = names("m", 4, session, request, keys)
    return Seen(request_id, found, bool(session), ids, keys, 4, 0)


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, "", ""),
        ({}, "b", "b"),
        ({"x-session-id": "x"}, "b", "x"),
        ({"x-session-id": "x", "session_id": "codex"}, "", "codex"),
        ({"session-id": "codex", "x-claude-code-session-id": "claude"}, "", "claude"),
        ({"conversation_id": "c", "x-opencode-session": "o"}, "", "c"),
        ({"x-claude-code-session-id": "claude", "x-claude-code-agent-id": "sub"}, "", "sub"),
        ({"session_id": "codex", "thread-id": "conversation"}, "", "conversation"),
        ({"x-session-id": "opencode", "x-session-affinity": "the same"}, "", "opencode"),
        ({"x-dynamo-session-id": "d", "x-session-id": "x"}, "", "d"),
        ({"x-litellm-session-id": "l"}, "key", "l"),
        ({"x-correlation-id": "of this request", "traceparent": "00-1-1-00"}, "b", "b"),
        ({"x-session-id": ""}, "b", "b"),
        ({"x-session-id": "y" * 5000}, "", "y" * 200),
    ],
)
def test_a_header_names_a_session_before_its_body_does(
    headers: dict[str, str], body: str, expected: str
) -> None:
    assert hint({name.encode(): value.encode() for name, value in headers.items()}, body) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"prompt_cache_key": "k"}, "k"),
        ({"session_id": "s", "prompt_cache_key": "k"}, "s"),
        ({"metadata": {"session_id": "in"}, "prompt_cache_key": "k"}, "in"),
        ({"litellm_session_id": "l", "prompt_cache_key": "k"}, "l"),
        ({"metadata": {"litellm_session_id": "l"}}, "l"),
        ({"litellm_session_id": ["odd"], "prompt_cache_key": "k"}, "k"),
        ({"metadata": {"user_id": f"user_0a_account__session_{UUID}"}}, UUID),
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, UUID),
        ({"metadata": {"user_id": "somebody"}}, ""),
        ({"metadata": {"user_id": '{"session_id": 5}'}}, ""),
        ({"metadata": {"user_id": "{no json"}}, ""),
        ({"metadata": {"user_id": '{"a":' + "[" * 5000}}, ""),
        ({"metadata": ["odd"], "session_id": 7, "prompt_cache_key": {}}, ""),
    ],
)
def test_a_body_names_its_session_and_is_never_invalid_by_that(
    fields: dict[str, object], expected: str
) -> None:
    fields_ = ("metadata", "session_id", "prompt_cache_key", "litellm_session_id")
    values = (fields.get(name) for name in fields_)
    assert named_in_body(*values) == expected
    for path, rest in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        parsed = parse("POST", path, json.dumps({"model": "m", **rest, **fields}).encode())
        assert parsed.prompt is not None
        assert parsed.session == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"metadata": {"user_id": '{"session_id":"\ud800"}'}}, ""),
        ({"session_id": "half \ud83d"}, "half ?"),
    ],
)
def test_a_name_can_be_written(fields: dict[str, object], expected: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    assert parse("POST", "/v1/chat/completions", json.dumps(body).encode()).session == expected


@pytest.mark.parametrize(
    ("headers", "ends"),
    [
        ({}, False),
        ({"x-session-end": "true"}, True),
        ({"x-session-end": " 1 "}, True),
        ({"x-session-end": "false"}, False),
        ({"x-dynamo-session-final": "true"}, True),
        ({"x-dynamo-session-final": "no"}, False),
    ],
)
def test_a_client_says_that_its_session_ends(headers: dict[str, str], ends: bool) -> None:
    assert says_it_ends({name.encode(): value.encode() for name, value in headers.items()}) is ends


few = st.lists(st.integers(0, 2), max_size=60)


@given(few, few, few)
def test_the_common_prefix_is_what_counting_gives(head: list[int], one: list[int], other: list[int]) -> None:
    left, right = head + one, head + other
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(np.array(left, np.uint32), np.array(right, np.uint32)) == expected


@given(few, few, few)
def test_a_departure_is_where_blocks_cease_to_be_shared(
    head: list[int], one: list[int], other: list[int]
) -> None:
    sessions = Sessions()
    assert sessions.follow(seen(head + one, "s")) is None
    departure = sessions.follow(seen(head + other, "s"))
    left, right = np.array(head + one, np.uint32), np.array(head + other, np.uint32)
    shared = min(common_prefix(left, right) // 4, len(left) // 4, len(right) // 4)
    lost = min(len(left), len(right)) // 4 - shared
    assert (0 if departure is None else departure.lost_tokens) == (lost * 4 if lost >= 2 else 0)


@given(st.lists(st.integers(0, 1 << 31), min_size=64, max_size=400), st.integers(0, 100))
def test_all_that_is_moved_is_repeated(lost: list[int], gap: int) -> None:
    ids = np.array(lost, np.uint32)
    moved = np.concatenate([np.full(gap, 1 << 31, np.uint32), ids])
    # The last run, cut short, is not counted.
    assert repeated_share(ids, moved) == 1.0
    assert repeated_share(ids, np.arange(1 << 30, (1 << 30) + 500, dtype=np.uint32)) < 0.1


def test_short_prompts_repeat_nothing() -> None:
    assert repeated_share(np.zeros(3, np.uint32), np.zeros(900, np.uint32)) == 0.0
    assert repeated_share(np.zeros(900, np.uint32), np.zeros(3, np.uint32)) == 0.0


def departed(found: Departure | None) -> tuple[str, int] | None:
    return None if found is None else (found.previous.request_id, found.blocks)


def test_a_prompt_that_goes_on_takes_the_place_of_the_last() -> None:
    sessions = Sessions()
    for length in range(8, 80, 8):
        assert sessions.follow(seen(range(length), "s")) is None
        assert len(sessions) == 1


def test_one_block_anew_is_a_template_at_work_and_two_are_a_departure() -> None:
    sessions = Sessions()
    sessions.follow(seen(range(40), "s", request_id="first"))
    assert sessions.find(seen([*range(36), *range(90, 120)], "s")) is None
    assert departed(sessions.find(seen([*range(32), *range(90, 120)], "s"))) == ("first", 8)


def test_of_several_conversations_by_one_name_the_closest_counts() -> None:
    sessions = Sessions()
    sessions.follow(seen(range(40), "s", request_id="main"))
    sessions.follow(seen(range(100, 140), "s", request_id="helper"))
    assert departed(sessions.find(seen([*range(20), *range(60, 90)], "s"))) == ("main", 5)
    assert departed(sessions.find(seen([*range(100, 108), *range(60, 90)], "s"))) == ("helper", 2)
    assert sessions.find(seen([*range(100, 140), 7, 7, 7, 7], "s")) is None


def test_a_named_session_is_not_compared_with_others() -> None:
    sessions = Sessions()
    sessions.follow(seen(range(40), "one", "hello"))
    assert sessions.find(seen([*range(8), *range(60, 90)], "other", "hello")) is None
    # A turn without a name is: its client may have left the name out this time.
    assert sessions.find(seen([*range(8), *range(60, 90)], "", "hello")) is not None


def test_without_a_name_the_first_message_counts_before_the_head() -> None:
    sessions = Sessions()
    sessions.follow(seen(range(40), "", "mine", "mine"))
    sessions.follow(seen([*range(8), *range(200, 240)], "", "theirs", "theirs"))
    changed = [9, *range(1, 40)]
    assert departed(sessions.find(seen(changed, "", "mine"))) == ("mine", 0)
    assert sessions.find(seen(changed, "", "new")) is None


def test_a_new_session_that_only_begins_alike_takes_nobodys_place() -> None:
    sessions = Sessions()
    sessions.follow(seen(range(40), "", "a"))
    sessions.follow(seen([*range(36), *range(90, 130)], "", "b"))
    assert len(sessions) == 2


def test_the_memory_is_bounded_in_bytes_and_forgets_the_oldest() -> None:
    sessions = Sessions(max_bytes=100_000)
    for number in range(300):
        sessions.follow(seen(range(number * 1000, number * 1000 + 400), f"s{number}", f"hello {number}"))
        assert sessions.bytes <= 100_000
    assert 5 < len(sessions) < 40
    assert sessions.find(seen(range(999_000, 999_400), "s299")) is not None
    assert sessions.find(seen(range(999_000, 999_400), "s0")) is None
    # One that is larger than all there may be is not kept.
    sessions.follow(seen(range(40_000), "large"))
    assert (len(sessions), sessions.bytes) == (0, 0)


def test_one_name_holds_a_few_conversations_only() -> None:
    sessions = Sessions()
    for number in range(100):
        sessions.follow(seen(range(number * 1000, number * 1000 + 40), "s"))
        sessions.follow(seen([1, 1, 1, 1, *range(number * 1000, number * 1000 + 40)], "", f"m{number}"))
    assert len(sessions) == 16 + 100
    assert sessions.bytes == 116 * seen(range(40)).size + 100 * (16 + 8)
