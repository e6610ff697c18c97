"""Reading a body beside those of its conversation gives what reading it alone gives, or raises the same."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.bodies import Bodies
from gateway.api.parse import parse
from gateway.errors import ApiError
from store.prompt.request import ChatPrompt, MessagesPrompt, ResponsesPrompt
from tests.clock import cpu_share

FILLER = "A long text, as they are. " * 400
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": 1}}}


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def chat(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [user(FILLER * 2), *messages], **more}).encode()


def read(bodies: Bodies, body: bytes) -> ChatPrompt:
    return bodies.read(body, ChatPrompt, "messages").prompt


def alike(bodies: Bodies, body: bytes, kind: Any = ChatPrompt, name: Any = "messages") -> None:
    """Compared as JSON text: 1, 1.0 and true are equal in Python, but not in a prompt."""
    try:
        expected = msgspec.json.decode(body, type=kind, strict=False)
    except msgspec.MsgspecError as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            bodies.read(body, kind, name)
        return
    found = bodies.read(body, kind, name)
    assert msgspec.json.encode(found.prompt) == msgspec.json.encode(expected)
    # What is left of the body says of everything else the same.
    whole, rest = json.loads(body), json.loads(found.rest)
    assert {**whole, name: 0, "tools": 0} == {**rest, name: 0, "tools": 0}


values = st.sampled_from(
    (0, 1, 1.0, True, False, None, "", '"]},{[\\', "é 漢 🌍", "\u0000", [1], {"messages": [2]})
)
texts = st.builds(str.__add__, st.text(max_size=4), st.sampled_from(("", FILLER)))
messages = st.builds(user, texts, extra=values)
tools = st.sampled_from((None, [], [TOOL], [TOOL, TOOL], [TOOL | {"x": 1.0}], {"no": "list"}, [1], "text"))
layouts = st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", " :\t")))
tails = st.sampled_from(
    (
        *(b"", b"}", b",", b'"', b"]}", b', "messages": []}', b', "messages": [{"role": "user"}]}'),
        *(
            b', "tools": []}',
            b', "tools": [{"a": 1}]}',
            b', "documents": "no list"}',
            b', "\\u006dessages": []}',
        ),
    )
)


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    history = draw(st.lists(messages, min_size=1, max_size=8))
    separators, ascii_only = draw(layouts), draw(st.booleans())
    before, after = draw(st.booleans()), draw(tools)
    found: list[bytes] = []
    for _ in range(draw(st.integers(2, 6))):
        change = draw(
            st.sampled_from(("go on", "go on", "go on", "repeat", "cut", "edit", "tools", "layout"))
        )
        if change == "go on":
            history = history + draw(st.lists(messages, min_size=1, max_size=3))
        elif change == "cut":
            history = history[: draw(st.integers(0, len(history)))]
        elif change == "edit" and history:
            at = draw(st.integers(0, len(history) - 1))
            history = [*history[:at], draw(messages), *history[at + 1 :]]
        elif change == "tools":
            after = draw(tools)
        elif change == "layout":
            separators = draw(layouts)
        fields: dict[str, Any] = {"model": "m", "tools": after} if before else {"model": "m"}
        fields |= {"messages": [user(FILLER * 2), *history], "tools": after}
        body = json.dumps(fields, separators=separators, ensure_ascii=ascii_only).encode()
        found.append(body)
        if draw(st.integers(0, 3)) == 0:
            found.append(body[: -1 - draw(st.sampled_from((0, 0, 1, 2)))] + draw(tails))
    return found


@settings(max_examples=300, deadline=None)
@given(found=conversations(), room=st.sampled_from((64 << 20, 100_000)))
def test_a_body_is_read_as_if_it_were_the_only_one(found: list[bytes], room: int) -> None:
    bodies = Bodies(room)
    for body in found:
        alike(bodies, body)
        assert 0 <= bodies.bytes <= room


def placed(body: bytes, bodies: Bodies) -> object:
    try:
        return parse("POST", "/v1/chat/completions", body, bodies=bodies, prompts=False)
    except ApiError as error:
        return error.status, str(error)


@settings(max_examples=100, deadline=None)
@given(found=conversations())
def test_one_whose_prompt_nobody_reads_is_placed_as_if_it_were_the_only_one(found: list[bytes]) -> None:
    bodies = Bodies(64 << 20)
    for body in found:
        assert placed(body, bodies) == placed(body, Bodies(0))


def test_b085_of_a_conversation_whose_prompts_nobody_reads_the_rest_is_read_all_the_same() -> None:
    bodies = Bodies(1 << 20)
    history = [user(str(number)) for number in range(20)]
    for body in (chat(history), chat([*history, user("x")], session_id="s")):
        assert len(bodies.rest(body, "messages")) < 100
    body = chat([*history, user("y")], kv_transfer_params={"remote_host": "x"})
    assert placed(body, bodies) == (400, "kv_transfer_params is not for clients")
    assert placed(chat([*history, user("y")])[:-1], bodies) == (400, "the body is not valid JSON")


def test_what_was_there_before_is_the_same_object_and_only_that() -> None:
    bodies = Bodies(1 << 20)
    history = [user(f"{number}", value=number) for number in range(6)]
    first = read(bodies, chat(history, tools=[TOOL]))
    second = read(bodies, chat([*history[:-1], user("5", value=5.0), user("6")], tools=[TOOL]))
    shared = [one is other for one, other in zip(first.messages, second.messages, strict=False)]
    assert shared == [True] * 6 + [False]
    assert second.messages[6]["value"] is not first.messages[6]["value"]
    assert first.tools is not None
    assert second.tools is not None
    assert first.tools[0] is second.tools[0]
    assert read(bodies, chat([*history, user("x")], tools=[TOOL | {"x": 1}])).tools == [TOOL | {"x": 1}]


def test_an_equal_body_is_the_same_turn() -> None:
    bodies = Bodies(1 << 20)
    body = chat([user("a"), user("b")])
    assert read(bodies, body) is read(bodies, bytes(bytearray(body)))
    assert read(bodies, chat([user("a"), user("b")], seed=1)) is not read(bodies, body)


def test_the_same_body_for_another_api_is_read_anew() -> None:
    bodies = Bodies(1 << 20)
    body = chat([user("a")])
    assert type(read(bodies, body)) is ChatPrompt
    assert type(bodies.read(body, MessagesPrompt, "messages").prompt) is MessagesPrompt
    assert type(parse("POST", "/v1/messages", body, bodies=bodies).prompt) is not ChatPrompt


def test_items_of_responses_and_other_inputs() -> None:
    bodies = Bodies(1 << 20)
    items: list[Any] = [user(FILLER * 2), user("b")]
    for value in (items, [*items, user("c")], [*items, "no object"], FILLER * 2):
        alike(bodies, json.dumps({"model": "m", "input": value}).encode(), ResponsesPrompt, "input")
    found = [bodies.read(json.dumps({"input": items[:n]}).encode(), ResponsesPrompt, "input") for n in (1, 2)]
    assert found[0].prompt.input[0] is found[1].prompt.input[0]


@pytest.mark.parametrize(
    "tail",
    [
        b', "messages": [{"role": "user", "content": "the last of a name counts"}]}',
        b', "messages": []}',
        b', "messages": 1}',
        b', "x": NaN}',
        b", }",
        b"",
    ],
)
def test_a_second_list_or_a_broken_end_after_known_messages(tail: bytes) -> None:
    bodies = Bodies(1 << 20)
    history = [user(str(number)) for number in range(8)]
    read(bodies, chat(history))
    alike(bodies, chat([*history, user("new")])[:-1] + tail)
    alike(bodies, chat(history)[:-2] + b",]}")


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_a_second_list_that_equals_what_is_new_in_the_first(name: str) -> None:
    bodies = Bodies(1 << 20)
    history, new = [user(FILLER * 2), *(user(str(number)) for number in range(8))], user("new")
    read(bodies, json.dumps({"messages": history, "tools": [TOOL]}, separators=(",", ":")).encode())
    fields = {"messages": [*history, new], "tools": [TOOL]}
    second = {name: [new] if name == "messages" else [TOOL]}
    for first, last in ((fields, second), (second, fields), (fields, fields)):
        parts = (json.dumps(part, separators=(",", ":"))[1:-1] for part in (first, last))
        alike(bodies, f"{{{','.join(parts)}}}".encode())


def test_tools_of_the_same_length() -> None:
    bodies = Bodies(1 << 20)
    history = [user("a"), user("b")]
    for value in (1, 2, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"default": value}}}
        history = [*history, user("more")]
        alike(bodies, chat(history, tools=[tool]))


def test_sessions_that_begin_alike_are_kept_apart() -> None:
    bodies = Bodies(64 << 20)
    histories = [[user(f"session {name}"), *(user(str(n)) for n in range(8))] for name in "abc"]
    before = [read(bodies, chat(history)) for history in histories]
    for history, turn in zip(histories, before, strict=True):
        after = read(bodies, chat([*history, user("more")]))
        assert all(one is other for one, other in zip(turn.messages, after.messages, strict=False))


def test_memory_is_bounded_by_the_longest_unused() -> None:
    bodies = Bodies(1 << 20)
    kept = read(bodies, chat([user("kept"), user("x")]))
    for number in range(100):
        read(bodies, chat([user(f"session {number}"), user("x")]))
        assert read(bodies, chat([user("kept"), user("x")])) is kept
        assert bodies.bytes <= 1 << 20
    assert read(bodies, chat([user("session 0"), user("x")])) is not kept


def test_a_body_is_taken_apart_in_little_more_time_than_it_is_read() -> None:
    """Not in that of looking for all of its messages in it, for all of its tools in the rest."""
    tool = {"type": "function", "function": {"name": "f", "description": FILLER}}
    body = chat([user(FILLER * 2) for _ in range(16)], tools=[tool] * 8)

    def apart() -> None:
        Bodies(1 << 26).rest(body, "messages")

    # 3 here, 7.4 where both are looked for.
    assert cpu_share(apart, of=lambda: msgspec.json.decode(body, type=msgspec.Raw)) < 5
