"""Bodies of chat completions: roles, content, tools, reasoning, switches, and chats made at random."""

import itertools
import random
from collections.abc import Iterator

from tests.store.prompt.pieces import (
    ARGUMENTS,
    FRAGMENTS,
    ODD_TOOLS,
    WEATHER,
    Body,
    assistant,
    call,
    result,
    system,
    user,
)


def chats() -> Iterator[Body]:
    """All but those made at random."""
    for messages in itertools.chain(_single(), _roles(), _content(), _tool_use(), _reasoning()):
        yield {"messages": messages}
    yield from itertools.chain(_tools(), _switches(), _truncated(), _continued())


def random_chats(count: int) -> Iterator[Body]:
    """Multi-turn chats of all the pieces above, the same in every run."""
    rng = random.Random(20261129)
    for _ in range(count):
        messages: list[Body] = [system(_text(rng))] if rng.random() < 0.7 else []
        for turn in range(rng.randint(1, 5)):
            messages.append(user(_text(rng)))
            if rng.random() < 0.4:
                calls = [
                    call(rng.choice(ARGUMENTS), identity=f"c{turn}{i}") for i in range(rng.randint(1, 2))
                ]
                messages.append(assistant(rng.choice((None, "", _text(rng))), tool_calls=calls))
                messages.extend(result(_text(rng), each["id"]) for each in calls)
            reasoning = {"reasoning": _text(rng)} if rng.random() < 0.3 else {}
            messages.append(assistant(_text(rng), **reasoning))
        if rng.random() < 0.8:
            messages.append(user(_text(rng)))
        body: Body = {"messages": messages}
        if rng.random() < 0.4:
            body["tools"] = rng.sample([WEATHER, *ODD_TOOLS], rng.randint(1, 4))
        yield body


def _text(rng: random.Random) -> str:
    return rng.choice(("", " ", "\n")).join(rng.choices(FRAGMENTS, k=rng.randint(1, 4)))


def _single() -> Iterator[list[Body]]:
    for text in FRAGMENTS:
        yield [user(text)]
        yield [system(text), user("go")]
        yield [user("q"), assistant(text), user("next")]


def _roles() -> Iterator[list[Body]]:
    yield [system("one"), user("q"), system("two"), user("r")]
    yield [{"role": "developer", "content": "be terse"}, user("q")]
    yield [{"role": "developer", "content": "be terse", "tools": [WEATHER]}, user("q")]
    yield [system("base"), {"role": "developer", "content": "more"}, user("q")]
    yield [system("base"), user("q"), {"role": "developer", "content": "late"}, user("r"), system("last")]
    yield [system(""), user("q"), {"role": "developer", "content": ""}, user("r")]
    yield [
        user("q"),
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    yield [{"role": "custom", "content": "c"}, user("q")]
    yield [{"role": "function", "name": "f", "content": "out"}, user("q")]
    yield [{"role": "user", "content": "q", "name": "bob", "extra": {"a": 1}}]
    yield [system("x-anthropic-billing-header: cch=1;\nreal system"), user("q")]
    yield [system("x-anthropic-billing-header: cch=1;"), user("q")]
    yield [user("x-anthropic-billing-header: kept\nfor users")]
    yield [
        system([{"type": "text", "text": "x-anthropic-billing-header: a"}, {"type": "text", "text": "kept"}]),
        user("q"),
    ]
    yield [
        system(
            [{"type": "text", "text": "x-anthropic-billing-header: a\nrest", "cache_control": {"type": "e"}}]
        ),
        user("q"),
    ]
    yield [{"role": "developer", "content": "x-anthropic-billing-header: stays\nhere"}, user("q")]


def _content() -> Iterator[list[Body]]:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second\n"}, "third"]
    yield [user(parts)]
    yield [system(parts), user("q")]
    yield [user("q"), assistant(parts), user(parts)]
    yield [user([])]
    yield [user("q"), assistant(None), user("r")]
    yield [user("q"), {"role": "assistant"}, user("r")]
    yield [user("q"), assistant([]), user("r")]
    yield [user([{"type": "text", "text": "cached", "cache_control": {"type": "ephemeral"}}])]
    yield [user([{"type": "text", "text": ""}, {"type": "text", "text": " "}])]
    yield [
        user("q"),
        assistant([{"type": "text", "text": "no"}, {"type": "refusal", "refusal": "I refuse"}]),
        user("r"),
    ]
    yield [
        user("q"),
        assistant([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]),
        user("r"),
    ]
    yield [user("q"), assistant("", refusal="I refuse"), user("r")]


def _tool_use() -> Iterator[list[Body]]:
    for arguments in ARGUMENTS:
        yield [user("q"), assistant(None, tool_calls=[call(arguments)]), result("sunny")]
    texts = [{"type": "text", "text": "line 1"}, {"type": "text", "text": "line 2"}]
    two = [call('{"city": "A"}'), call('{"city": "B"}', identity="call_2")]
    yield [user("q"), assistant("I look.", tool_calls=two), result("a"), result(texts, "call_2")]
    yield [user("q"), assistant("", tool_calls=two), result([]), result("", "call_2", name="get_weather")]
    yield [user("q"), assistant("x", tool_calls=[]), user("r")]
    yield [user("q"), assistant("x", tool_calls=None), user("r")]
    yield [
        user("q"),
        assistant(None, tool_calls=[call("{}", extra=1) | {"index": 0}]),
        result("ok"),
        user("r"),
    ]
    yield [user("q"), result("orphan")]
    yield [
        user("q"),
        assistant(None, tool_calls=[call("{}")]),
        result([{"type": "tool_reference", "name": "later"}]),
    ]


def _reasoning() -> Iterator[list[Body]]:
    yield [user("q"), assistant("a", reasoning="because"), user("r")]
    yield [user("q"), assistant("a", reasoning_content="because"), user("r")]
    yield [user("q"), assistant("a", reasoning="new", reasoning_content="old"), user("r")]
    yield [
        user("q"),
        assistant("<think>\nold\n</think>\n\na"),
        user("r"),
        assistant("<think>\nx</think>b"),
        user("s"),
    ]
    yield [
        user("q"),
        assistant(None, reasoning="r1", tool_calls=[call("{}")]),
        result("ok"),
        assistant("done", reasoning="r2"),
        user("next"),
    ]


def _tools() -> Iterator[Body]:
    ask = [user("weather?")]
    yield {"messages": ask, "tools": [WEATHER]}
    yield {"messages": [system("sys"), *ask], "tools": [WEATHER, *ODD_TOOLS]}
    yield {"messages": ask, "tools": [WEATHER], "tool_choice": "none"}
    yield {"messages": ask, "tools": [WEATHER], "tool_choice": "auto"}
    yield {"messages": ask, "tools": [WEATHER], "tool_choice": "required"}
    yield {
        "messages": ask,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }
    yield {"messages": ask, "tools": [WEATHER], "parallel_tool_calls": False}
    yield {
        "messages": [*ask, assistant(None, tool_calls=[call(ARGUMENTS[0])]), result("sunny"), user("thanks")],
        "tools": [WEATHER],
    }


def _switches() -> Iterator[Body]:
    ask = [system("sys"), user("q"), assistant("a", reasoning="r"), user("next")]
    for extra in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
        {"add_special_tokens": True},
        {"documents": [{"title": "T", "text": "D"}]},
        {"documents": []},
        {"cache_salt": "tenant-1"},
        {"response_format": {"type": "json_object"}},
        {"temperature": 0.1, "max_tokens": 3, "stop": ["x"], "user": "u", "unknown_field": 1},
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": None, "thinking": True}},
        {"chat_template_kwargs": {"unused": 1, "padding": True, "max_length": 3}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"bos_token": "XX", "eos_token": "YY"}},
        {"chat_template_kwargs": {"tools": [WEATHER]}},
        {"chat_template_kwargs": {"tools": None}, "tools": [WEATHER]},
        {"chat_template_kwargs": {"documents": [{"title": "K", "text": "W"}]}},
        {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
        {"chat_template_kwargs": {"reasoning_effort": "high"}},
        {"chat_template_kwargs": {"tokenize": False}},
        *({"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "max")),
    ):
        yield {"messages": ask, **extra}


def _truncated() -> Iterator[Body]:
    long = [system("sys"), user("word " * 80), assistant("ok"), user("end")]
    for keep, side in itertools.product((1, 17, 64, 5000), (None, "left", "right")):
        body: Body = {"messages": long, "truncate_prompt_tokens": keep, "max_tokens": 4}
        yield body if side is None else {**body, "truncation_side": side}
    yield {"messages": long, "truncate_prompt_tokens": 20, "add_special_tokens": True}


def _continued() -> Iterator[Body]:
    off = {"add_generation_prompt": False, "continue_final_message": True}
    for text in (
        "The answer is",
        "trailing blank ",
        "  both  ",
        "line\n",
        [{"type": "text", "text": "part"}],
        "ü👍",
    ):
        yield {"messages": [user("q"), assistant(text)], **off}
    yield {"messages": [user("q"), assistant("<think>\nhalf"), *[]], **off}
    yield {"messages": [user("only user")], **off}
