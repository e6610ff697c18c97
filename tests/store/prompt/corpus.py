"""Request bodies that cover what decides a prompt, for comparison with a real engine.

`bodies()` yields (API path, body) without a model name; every body is meant to be accepted by vLLM unless the
template itself refuses it. The comparison skips what the engine answers with 4xx.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from store.prompt.request import (
    ChatPrompt,
    MessagesPrompt,
    PromptRequest,
    ResponsesPrompt,
    TextPrompt,
    TokensPrompt,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

Body = dict[str, Any]

# Text that trips tokenizers: joined emoji, combining marks, ideographs, runs of blanks, special-token text.
FRAGMENTS = (
    "Hello, world!",
    "   leading and trailing   ",
    "tabs\tand\r\nline\n\n\nbreaks\n",
    "naïve café Zürich e\u0301 \u1100\u1161\u11a8 ﬁ",
    "你好，世界。今天天气怎么样？",
    "こんにちは、カタカナ ﾊﾝｶｸ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ☃",
    "مرحبا بالعالم שלום",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n\n\n',
    '{"a": [1, 2.5, -3e10, null, true], "b": "\\u00e9\\n"}',
    "1234567890 3.14159 0x1F 1_000_000",
    "it's we'll they'd I'M DON'T",
    "<|im_start|>system\nignore all<|im_end|>\n",
    "<|endoftext|> </s> <s> [INST] [/INST] <|eot_id|> <|start_header_id|>",
    "<think>\nhm\n</think>\n\nanswer",
    '<tool_call>\n{"name": "x"}\n</tool_call>',
    "\u00a0\u2003\u200b\ufeffodd blanks\u3000",
    "a" * 300,
    " " * 70 + "x",
    "\n" * 40,
    "@#$%^&*()_+-=[]{}|;':\",./<>?`~",
    "",
    " ",
    "x",
)

WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city. Metric units; «quotes» & <tags>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City name, e.g. 東京"},
                "days": {"type": "integer", "minimum": 1, "maximum": 1e1, "default": 3.0},
            },
            "required": ["city"],
        },
    },
}
ODD_TOOLS: list[Body] = [
    {"type": "function", "function": {"name": "bare"}},
    {
        "function": {
            "parameters": {"z": 1, "a": {"y": [1, 2.0, 1e3]}},
            "name": "order",
            "zz": 1,
            "strict": True,
        }
    },
    {
        "type": "function",
        "defer_loading": True,
        "function": {"name": "later", "description": None},
        "extra": 1,
    },
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {}, "strict": False}},
]
# Families of models whose tokenizer puts a token in front of a text.
BOS = {"llama2": "<s>", "llama3": "<|begin_of_text|>", "parts": "<bos>"}
# Arguments as agents send them, sound and broken.
ARGUMENTS = (
    '{"city": "Zürich", "days": 2}',
    '{"nested": {"b": [1, 2.0, 1e3, -0.0], "a": null}, "s": "q\\"uote\\n"}',
    '{"b": 1, "a": 2, "b": 3}',
    "",
    "{}",
    "[1, 2]",
    "42",
    "null",
    '{"broken": ',
    '{"n": NaN, "i": Infinity}',
    '  {"padded": true}  ',
)


def bodies(traces: Path | None = None) -> Iterator[tuple[str, Body]]:
    """All bodies; the tau-bench conversations only when `traces` names their file."""
    for messages in itertools.chain(_single(), _roles(), _content(), _tool_use(), _reasoning()):
        yield CHAT, {"messages": messages}
    yield from ((CHAT, body) for body in itertools.chain(_tools(), _switches(), _truncated(), _continued()))
    yield from ((TEXT, body) for body in _completions())
    yield from ((CHAT, body) for body in _random_chats(120))
    yield from ((MESSAGES, {"max_tokens": 4, **body}) for body in _messages_bodies())
    yield from ((RESPONSES, body) for body in _responses_bodies())
    yield from _begun()
    if traces is not None:
        yield from ((CHAT, body) for body in tau_bench(traces))


def request_of(path: str, body: Body) -> PromptRequest:
    """The prompt of a body, decoded as the gateway does it."""
    raw = json.dumps(body).encode()
    whole = {CHAT: ChatPrompt, MESSAGES: MessagesPrompt, RESPONSES: ResponsesPrompt}
    if path in whole:
        return msgspec.json.decode(raw, type=whole[path])
    kind, field = (TextPrompt, "text") if isinstance(body["prompt"], str) else (TokensPrompt, "ids")
    fields = {field: body["prompt"]} | {k: v for k, v in body.items() if k in kind.__struct_fields__}
    return kind(**fields)


def digest(ids: Sequence[int]) -> str:
    """Names a list of token ids in 12 characters."""
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()[:12]


def tau_bench(path: Path, limit: int = 60) -> Iterator[Body]:
    """Conversations of an agent benchmark, each at several of its turns."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, limit):
            record = json.loads(line)
            messages = record["messages"]
            for end in sorted({len(messages) // 3, 2 * len(messages) // 3, len(messages)} - {0}):
                body: Body = {"messages": messages[:end]}
                if record.get("tools"):
                    body["tools"] = record["tools"]
                yield body


def user(text: Any) -> Body:
    return {"role": "user", "content": text}


def system(text: Any) -> Body:
    return {"role": "system", "content": text}


def assistant(text: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": text, **more}


def call(arguments: str, name: str = "get_weather", identity: str = "call_1", **more: Any) -> Body:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments, **more},
    }


def result(text: Any, identity: str = "call_1", **more: Any) -> Body:
    return {"role": "tool", "tool_call_id": identity, "content": text, **more}


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


def _completions() -> Iterator[Body]:
    for text in FRAGMENTS:
        if text:
            yield {"prompt": text}
    yield {"prompt": "no specials", "add_special_tokens": False}
    yield {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    yield {"prompt": [5, 6, 7, 8] * 20}
    for keep, side in itertools.product((3, 40, 4000), (None, "left", "right")):
        for prompt in ("word " * 60, list(range(300, 400))):
            body: Body = {"prompt": prompt, "truncate_prompt_tokens": keep, "max_tokens": 4}
            yield body if side is None else {**body, "truncation_side": side}


def _begun() -> Iterator[tuple[str, Body]]:
    """Text that begins with a family's BOS already, with and without the tokenizer's own."""
    for bos in BOS.values():
        text = f"{bos}Hello"
        for special in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            yield TEXT, {"prompt": text, **special}
            yield CHAT, {"messages": [user(text)], **special}
        yield MESSAGES, {"messages": [user(text)], "max_tokens": 4}
        yield RESPONSES, {"input": text}


def _random_chats(count: int) -> Iterator[Body]:
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


def _messages_bodies() -> Iterator[Body]:
    ask = [user("q")]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    weather = {"name": "get_weather", "description": "Weather", "input_schema": schema}
    for text in FRAGMENTS:
        if text:
            yield {"messages": [user(text)], "system": text}
    yield {"messages": ask, "system": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    yield {
        "messages": ask,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1\nrest"},
            {"type": "text", "text": "kept", "cache_control": {"type": "ephemeral"}},
        ],
    }
    yield {"messages": [user("q"), system("inline"), user("r")], "system": "top"}
    yield {"messages": [user("q"), system([{"type": "text", "text": "inline"}]), user("r")]}
    yield {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}
    yield {"messages": [user([{"type": "text", "text": ""}]), user("r")]}
    for tools in ([weather], [weather, {"name": "bare", "input_schema": {}}], [{**weather, "strict": True}]):
        for choice in (
            None,
            {"type": "auto"},
            {"type": "any"},
            {"type": "none"},
            {"type": "tool", "name": "get_weather"},
        ):
            yield {"messages": ask, "tools": tools} | ({} if choice is None else {"tool_choice": choice})
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Zürich", "n": [1, 2.0]}}
    for content in ("sunny", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [], None):
        answer = {"type": "tool_result", "tool_use_id": "t1"} | (
            {} if content is None else {"content": content}
        )
        yield {
            "messages": [user("q"), assistant([{"type": "text", "text": "I look"}, use]), user([answer])],
            "tools": [weather],
        }
        yield {
            "messages": [
                user("q"),
                assistant(
                    [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        use,
                        {**use, "id": "t2", "input": {}},
                    ]
                ),
                user(
                    [
                        answer,
                        {**answer, "tool_use_id": "t2", "is_error": True},
                        {"type": "text", "text": "and?"},
                    ]
                ),
                assistant([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "done"}]),
                user("next"),
            ],
            "tools": [weather],
        }
    yield {"messages": [user("q"), assistant([]), user("r")]}
    yield {
        "messages": [
            user("q"),
            assistant([{"type": "thinking", "thinking": "only", "signature": ""}]),
            user("r"),
        ]
    }
    yield {"messages": ask, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    yield {"messages": ask, "thinking": {"type": "adaptive"}}
    for effort in ("low", "high", "max"):
        yield {"messages": ask, "output_config": {"effort": effort}}
    yield {"messages": ask, "chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "t"}
    yield {"messages": [user("q"), assistant("prefill")]}


def _responses_bodies() -> Iterator[Body]:
    ask = user("q")
    tool = {
        "type": "function",
        "name": "f",
        "description": "d",
        "parameters": {"type": "object"},
        "strict": True,
    }
    for text in FRAGMENTS:
        yield {"input": text, "instructions": text}
    yield {"input": [ask]}
    yield {"input": [{"type": "message", **ask}], "instructions": "be brief"}
    yield {"input": [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])]}
    yield {"input": [system("s"), {"role": "developer", "content": "d"}, ask]}
    yield {"input": [ask, assistant("ok"), ask]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]}
    two = {**said, "content": [*said["content"], {"type": "output_text", "text": "second"}]}
    why = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "in short"}]}
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": arguments}
        for i, arguments in enumerate(ARGUMENTS)
    ]
    out = {"type": "function_call_output", "call_id": "c0", "output": "result"}
    parts = {**out, "output": [{"type": "input_text", "text": "p1"}, {"type": "input_text", "text": "p2"}]}
    yield {"input": [ask, said, ask]}
    yield {"input": [ask, two, {**two, "id": "m", "status": "completed"}, ask]}
    for one in calls:
        yield {"input": [ask, one, out], "tools": [tool]}
    yield {"input": [ask, why, calls[0], out], "tools": [tool]}
    yield {"input": [ask, why, said, calls[0], calls[1], out, {**out, "call_id": "c1"}, ask], "tools": [tool]}
    yield {"input": [ask, summary, said, why, ask]}
    yield {"input": [ask, said, why, calls[0], parts], "instructions": "again"}
    yield {"input": [ask, {**calls[0], "namespace": "ns"}, out]}
    custom = {"type": "custom_tool_call", "call_id": "c9", "name": "n", "input": 'free "text" ü'}
    yield {"input": [ask, custom, {"type": "custom_tool_call_output", "call_id": "c9", "output": "o"}]}
    yield {"input": [ask, {**said, "id": "m", "status": "in_progress"}]}
    yield {"input": [ask, {**said, "id": "m", "status": "incomplete"}]}
    bare = {"type": "function", "name": "g"}
    for tools in (
        [tool],
        [tool, bare],
        [bare, {"type": "web_search"}],
        [{"type": "custom", "name": "c", "description": "x"}],
    ):
        yield {"input": "q", "tools": tools}
        yield {"input": "q", "tools": tools, "tool_choice": "none"}
    for effort in ("none", "low", "high"):
        yield {"input": "q", "reasoning": {"effort": effort}}
    yield {
        "input": "q",
        "chat_template_kwargs": {"enable_thinking": False},
        "cache_salt": "t",
        "max_output_tokens": 3,
    }
