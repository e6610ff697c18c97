"""Bodies of OpenAI responses."""

from collections.abc import Iterator

from tests.store.prompt.pieces import ARGUMENTS, FRAGMENTS, Body, assistant, system, user


def openai_responses() -> Iterator[Body]:
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
