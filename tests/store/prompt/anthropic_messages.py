"""Bodies of Anthropic messages, without `max_tokens`."""

from collections.abc import Iterator

from tests.store.prompt.pieces import FRAGMENTS, Body, assistant, system, user


def anthropic_messages() -> Iterator[Body]:
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
