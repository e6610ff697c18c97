"""What clients see: the official SDK unchanged, and errors that say what is wrong."""

import json
from typing import Any, cast

import openai
import pytest
from openai.types.chat import ChatCompletion

from real_fleet import RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: list[Any] = [{"role": "user", "content": "Which worker holds this prefix?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "locate",
        "description": "Find a block.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"tier": {"type": "string", "enum": ["gpu", "cpu", "disk"]}},
            "required": ["tier"],
            "additionalProperties": False,
        },
    },
}
# Random weights end an answer wherever they like.
TO_THE_END = {"ignore_eos": True}
NAMED: Any = {"type": "function", "function": {"name": "locate"}}


@pytest.fixture
def sync_client(fleet: RealFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def async_client(fleet: RealFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)


async def test_the_sync_sdk(fleet: RealFleet, sync_client: openai.OpenAI) -> None:
    assert [model.id for model in sync_client.models.list()] == [fleet.model]
    answer = sync_client.chat.completions.create(
        model=fleet.model, messages=ASK, max_tokens=8, extra_body=TO_THE_END
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    text = sync_client.completions.create(
        model=fleet.model, prompt="def main(", max_tokens=8, extra_body=TO_THE_END
    )
    assert text.choices[0].finish_reason == "length"


async def test_the_async_sdk_streams(fleet: RealFleet, async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model=fleet.model,
        messages=ASK,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=TO_THE_END,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_through_the_sdk_come_out_as_from_the_worker_itself(
    fleet: RealFleet, async_client: openai.AsyncOpenAI, stream: bool
) -> None:
    direct = openai.AsyncOpenAI(base_url=f"{fleet.workers[0].url}/v1", api_key="any", max_retries=0)
    sampling = {"tool_choice": NAMED, "temperature": 0, "max_tokens": 60}
    through = await made_to_call(async_client, fleet.model, stream, **sampling)
    assert through == await made_to_call(direct, fleet.model, stream, **sampling)
    assert through[1] or through[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_tool_call_comes_out_whole(
    fleet: RealFleet, async_client: openai.AsyncOpenAI, choice: Any, stream: bool
) -> None:
    """Random weights fill the grammar's free places for as long as they like: some seeds come to an end."""
    end, calls, seeds = None, list[tuple[str, str]](), iter(range(2, 12))
    while end not in ("stop", "tool_calls"):
        sampling = {"temperature": 1, "seed": next(seeds), "max_tokens": 400}
        end, _, calls = await made_to_call(async_client, fleet.model, stream, tool_choice=choice, **sampling)
    assert calls
    for name, arguments in calls:
        assert name == "locate"
        assert json.loads(arguments)["tier"] in ("gpu", "cpu", "disk")


async def made_to_call(
    client: openai.AsyncOpenAI, model: str, stream: bool, **more: Any
) -> tuple[str | None, str, list[tuple[str, str]]]:
    """Why an answer that has to be a call ended, its text, and name and arguments of its calls."""
    asked: dict[str, Any] = {"model": model, "messages": ASK, "tools": [TOOL], **more}
    if not stream:
        answer = cast(ChatCompletion, await client.chat.completions.create(**asked))
        chosen = answer.choices[0]
        made = [call.function for call in chosen.message.tool_calls or [] if call.type == "function"]
        text = chosen.message.content or ""
        return chosen.finish_reason, text, [(call.name, call.arguments) for call in made]
    end, text, parts = None, "", dict[int, tuple[str, str]]()
    chunks = await client.chat.completions.create(**asked, stream=True)
    async for chunk in chunks:
        for choice in chunk.choices:
            end = choice.finish_reason or end
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name, arguments = parts.get(call.index, ("", ""))
                parts[call.index] = (
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                )
    return end, text, list(parts.values())


async def test_the_sdk_raises_the_right_classes(fleet: RealFleet, sync_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sync_client.chat.completions.create(model="no-such-model", messages=ASK)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        sync_client.chat.completions.create(model=fleet.model, messages="hi")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as theirs:
        sync_client.chat.completions.create(model=fleet.model, messages=ASK, max_tokens=10**9)
    assert "max_tokens" in str(theirs.value)


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAD: list[tuple[str, bytes, int]] = [
    (CHAT, b"", 400),
    (CHAT, b"{not json", 400),
    (CHAT, b"[1, 2]", 400),
    (CHAT, b'{"model": "MODEL", "messages": [{"role": "user", "content": "\xff"}]}', 400),
    (CHAT, b'{"model": "no-such-model", "messages": []}', 404),
    (CHAT, b'{"model": 5, "messages": []}', 400),
    (CHAT, b'{"model": "MODEL"}', 400),
    (CHAT, b'{"model": "MODEL", "messages": "hi"}', 400),
    (TEXT, b"{not json", 400),
    (TEXT, b'{"model": "no-such-model", "prompt": "hi"}', 404),
]
ODD: list[tuple[str, bytes, int]] = [
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"model": null, "messages": []}', 400),
    (CHAT, b'{"model": "MODEL", "messages": [], "stream": {}}', 400),
    (TEXT, b'{"prompt": "hi", "max_tokens": 1}', 200),
    (TEXT, b'{"model": "MODEL", "prompt": {"text": "hi"}}', 400),
    (TEXT, b'{"model": "MODEL", "prompt": "hi", "stream": "often"}', 400),
]
AS_JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(("path", "content", "status"), ODD)
async def test_what_vllm_judges_is_answered_as_it_answers(
    fleet: RealFleet, path: str, content: bytes, status: int
) -> None:
    body = content.replace(b"MODEL", fleet.model.encode())
    answer = await fleet.client.post(path, content=body, headers=AS_JSON)
    direct = await fleet.client.post(f"{fleet.workers[0].url}{path}", content=body, headers=AS_JSON)
    assert (answer.status_code, direct.status_code) == (status, status), answer.text
    if status != 200:
        assert answer.content == direct.content


@pytest.mark.parametrize(("path", "content", "status"), BAD)
async def test_bad_input_is_refused_in_openai_shape_forwarded_nowhere_and_charged_to_nobody(
    fleet: RealFleet, path: str, content: bytes, status: int
) -> None:
    async def seen() -> list[float]:
        """Requests that came to the workers, answered well or not; decisions and failures here."""
        came = [await w.metric("http_requests_total", handler=path) for w in fleet.workers]
        decided = await fleet.metric("moongate_decisions_total")
        return [*came, decided, await fleet.metric("moongate_upstream_errors_total")]

    before = await seen()
    answer = await fleet.client.post(
        path, content=content.replace(b"MODEL", fleet.model.encode()), headers=AS_JSON
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    assert await seen() == before
    assert await fleet.inflight() == 0
