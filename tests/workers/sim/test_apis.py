"""The simulated worker speaks every API, for the openai and anthropic SDKs as a real one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.ports import ports
from tests.simulated import simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORTS = ports(above=21_520)
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
}
CALLED = {"path": "path", "lines": 1}
HELLO: Any = [{"role": "user", "content": "hello there " * 40}]
OTHERS: Any = [{"role": "user", "content": "good morning " * 40}]


def running(model: Path, **rates: float) -> AbstractAsyncContextManager[str]:
    return simulated(model, PORTS, blocks=128, max_model_len=2000, **rates)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tiny_model: Path) -> AsyncIterator[str]:
    async with running(tiny_model) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as it:
        yield it


async def test_a_response_streams_what_it_says_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="tiny", input=HELLO, max_output_tokens=9)
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    stream = await client.responses.create(model="tiny", input=HELLO, max_output_tokens=9, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed"
    assert text == whole.output_text == last.response.output_text != ""
    assert last.response.usage is not None
    # What the first one left in the cache.
    assert last.response.usage.input_tokens_details.cached_tokens > 0


async def test_a_response_can_be_a_tool_call(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "read", "parameters": PARAMETERS, "strict": True}
    asked: dict[str, Any] = {"model": "tiny", "input": "go", "tools": [tool], "tool_choice": "required"}
    whole = await client.responses.create(**asked)
    called: Any = whole.output[0]
    assert (whole.status, called.name, json.loads(called.arguments)) == ("completed", "read", CALLED)
    for _ in range(5):  # steps that a busy machine is late for come as one
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(parts)) == CALLED
        if len(parts) > 1:
            break
    assert len(parts) > 1


async def test_a_response_goes_on_from_a_stored_one(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="tiny", input="hello there", max_output_tokens=9)
    second = await client.responses.create(
        model="tiny", input="and then?", max_output_tokens=9, previous_response_id=first.id
    )
    told = await client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "hello there"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and then?"},
        ],
        max_output_tokens=9,
    )
    assert second.usage is not None
    assert told.usage is not None
    assert second.usage.input_tokens == told.usage.input_tokens
    assert second.output_text == told.output_text
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    items = await client.responses.input_items.list(second.id)
    roles: list[Any] = [getattr(item, "role", None) for item in items.data]
    assert roles == ["user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(second.id)
    await client.responses.delete(second.id)
    for gone in (
        client.responses.retrieve(second.id),
        client.responses.create(model="tiny", input="x", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match=f"'{second.id}' not found"):
            await gone
    kept_not = await client.responses.create(model="tiny", input="x", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(kept_not.id)


async def test_a_background_response_is_worked_on_until_it_is_cancelled(tiny_model: Path) -> None:
    async with (
        running(tiny_model, step_s=0.05) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        short = await client.responses.create(model="tiny", input="a", max_output_tokens=2, background=True)
        assert short.status == "queued"
        async with asyncio.timeout(30):
            while (await client.responses.retrieve(short.id)).status != "incomplete":
                await asyncio.sleep(0.01)
        long = await client.responses.create(model="tiny", input="a", max_output_tokens=900, background=True)
        assert (await client.responses.cancel(long.id)).status == "cancelled"
        assert (await client.responses.retrieve(long.id)).status == "cancelled"


async def test_a_message_streams_what_it_says_whole(claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="tiny", max_tokens=9, messages=OTHERS)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 9)
    block: Any = whole.content[0]
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=OTHERS) as stream:
        text = "".join([part async for part in stream.text_stream])
        last = await stream.get_final_message()
    assert text == block.text != ""
    counted = await claude.messages.count_tokens(model="tiny", messages=OTHERS)
    for usage, cached in ((whole.usage, False), (last.usage, True)):
        read, created = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert read is not None
        assert created is not None
        assert (read > 0, created > 0) == (cached, not cached)
        assert usage.input_tokens + read + created == counted.input_tokens


async def test_a_message_can_be_a_tool_use(claude: anthropic.AsyncAnthropic) -> None:
    tools: Any = [{"name": "read", "input_schema": PARAMETERS}]
    whole = await claude.messages.create(
        model="tiny", max_tokens=300, messages=HELLO, tools=tools, tool_choice={"type": "any"}
    )
    used: Any = whole.content[0]
    assert (whole.stop_reason, used.name, used.input) == ("tool_use", "read", CALLED)
    async with claude.messages.stream(
        model="tiny",
        max_tokens=300,
        messages=HELLO,
        tools=tools,
        tool_choice={"type": "tool", "name": "read"},
    ) as stream:
        streamed: Any = (await stream.get_final_message()).content[0]
    assert (streamed.name, streamed.input) == ("read", CALLED)


async def test_errors_have_the_shape_of_their_api(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as openai_error:
        await client.responses.create(model="no", input="x")
    assert openai_error.value.param == "model"
    with pytest.raises(anthropic.NotFoundError) as claude_error:
        await claude.messages.create(model="no", max_tokens=9, messages=HELLO)
    body: Any = claude_error.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "NotFoundError")
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        await claude.messages.create(
            model="tiny", max_tokens=9, messages=[{"role": "user", "content": "word " * 3000}]
        )


async def test_embeddings_scores_ranks_and_classes_depend_on_the_text_alone(
    client: openai.AsyncOpenAI,
) -> None:
    one = await client.embeddings.create(model="tiny", input=["a b", "c"], dimensions=8)
    floats = await client.embeddings.create(
        model="tiny", input=["c", "a b"], dimensions=8, encoding_format="float"
    )
    # The SDK asks for base64 by itself and decodes it.
    assert one.data[0].embedding == pytest.approx(floats.data[1].embedding, abs=1e-6)
    assert sum(x * x for x in one.data[0].embedding) == pytest.approx(1)
    assert one.usage.prompt_tokens == floats.usage.prompt_tokens > 0
    post: Any = client.post
    asked = {"model": "tiny", "query": "the cat", "documents": ["a dog", "the cat", "the bird"]}
    ranked = await post("/rerank", body=asked, cast_to=object)
    assert [result["index"] for result in ranked["results"]] == [1, 2, 0]
    scored = await post("/score", body={"model": "tiny", "text_1": "a", "text_2": ["a", "b"]}, cast_to=object)
    assert scored["data"][0]["score"] == 1
