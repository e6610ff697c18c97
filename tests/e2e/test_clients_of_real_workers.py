"""What clients see: the official SDK unchanged, and errors that say what is wrong."""

from typing import Any

import openai
import pytest

from real_fleet import RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: list[Any] = [{"role": "user", "content": "Which worker holds this prefix?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "locate",
        "description": "Find a block.",
        "parameters": {
            "type": "object",
            "properties": {"tier": {"type": "string", "enum": ["gpu", "cpu", "disk"]}},
            "required": ["tier"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def sync_client(fleet: RealFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def async_client(fleet: RealFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="any", max_retries=0)


async def test_the_sync_sdk(fleet: RealFleet, sync_client: openai.OpenAI) -> None:
    assert [model.id for model in sync_client.models.list()] == [fleet.model]
    answer = sync_client.chat.completions.create(model=fleet.model, messages=ASK, max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    text = sync_client.completions.create(model=fleet.model, prompt="def main(", max_tokens=8)
    assert text.choices[0].finish_reason == "length"


async def test_the_async_sdk_streams(fleet: RealFleet, async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model=fleet.model, messages=ASK, max_tokens=8, stream=True, stream_options={"include_usage": True}
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
    through = await made_to_call(async_client, fleet.model, stream)
    assert through == await made_to_call(direct, fleet.model, stream)
    assert any(through)


async def made_to_call(client: openai.AsyncOpenAI, model: str, stream: bool) -> tuple[str, str, str]:
    """Text, name and arguments of an answer that has to be a call (random weights may never end it)."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": ASK,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "locate"}},
        "max_tokens": 60,
        "temperature": 0,
    }
    text = name = arguments = ""
    if not stream:
        message = (await client.chat.completions.create(**asked)).choices[0].message
        text = message.content or ""
        for call in message.tool_calls or []:
            name, arguments = name + call.function.name, arguments + call.function.arguments
        return text, name, arguments
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return text, name, arguments


async def test_the_sdk_raises_the_right_classes(fleet: RealFleet, sync_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sync_client.chat.completions.create(model="no-such-model", messages=ASK)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        sync_client.chat.completions.create(model=fleet.model, messages="hi")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as theirs:
        sync_client.chat.completions.create(model=fleet.model, messages=ASK, max_tokens=10**9)
    assert "max_tokens" in str(theirs.value)


BAD: list[tuple[bytes, int]] = [
    (b"{not json", 400),
    (b"[1, 2]", 400),
    (b'{"messages": []}', 400),
    (b'{"model": "no-such-model", "messages": []}', 404),
    (b'{"model": 5, "messages": []}', 400),
    (b'{"model": "MODEL", "messages": "hi"}', 400),
    (b'{"model": "MODEL", "messages": [], "stream": {}}', 400),
]


@pytest.mark.parametrize(("content", "status"), BAD)
async def test_bad_input_is_refused_in_openai_shape_forwarded_nowhere_and_charged_to_nobody(
    fleet: RealFleet, content: bytes, status: int
) -> None:
    async def prompts() -> list[float]:
        return [await worker.metric("vllm:prompt_tokens_total") for worker in fleet.workers]

    before = await prompts()
    errors = await fleet.metric("moongate_upstream_errors_total")
    decisions = await fleet.metric("moongate_decisions_total")
    answer = await fleet.client.post(
        "/v1/chat/completions", content=content.replace(b"MODEL", fleet.model.encode())
    )
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
    assert await prompts() == before
    assert await fleet.metric("moongate_decisions_total") == decisions
    assert await fleet.metric("moongate_upstream_errors_total") == errors
    workers = (await fleet.admin("workers"))["workers"]
    assert all(target["inflight"] == 0 for worker in workers for target in worker["targets"])
