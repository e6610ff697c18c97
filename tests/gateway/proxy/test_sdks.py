"""The official SDKs, unchanged, through the gateway to two simulated workers."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from conftest import Front, serving

from gateway.settings import load
from tests.ports import ports
from tests.simulated import simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORTS = ports(above=23_300)
ASK: Any = [{"role": "user", "content": "Which worker holds this? " * 20}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gate(tiny_model: Path) -> AsyncIterator[tuple[Front, list[str]]]:
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(simulated(tiny_model, PORTS, blocks=256, max_model_len=4000))
            for _ in range(2)
        ]
        flags: dict[str, Any] = {"workers.urls": urls, "admin.token": "admin-token"}
        quick = load(None, {"MOONGATE_WORKERS__HEALTH_INTERVAL_S": "0.1"}, flags)
        front = await stack.enter_async_context(serving(quick))
        await front.until(lambda: all(w.state == "up" for w in front.gateway.fleet.workers()))
        yield front, urls


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gate: tuple[Front, list[str]]) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gate[0].url}/v1", api_key="x", max_retries=0) as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(gate: tuple[Front, list[str]]) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gate[0].url, api_key="x", max_retries=0) as it:
        yield it


async def test_chat_streams_and_calls_tools(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=9)
    stream = await client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None
    tool: Any = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
    called = await client.chat.completions.create(
        model="tiny", messages=ASK, tools=[tool], tool_choice="required"
    )
    call: Any = (called.choices[0].message.tool_calls or [])[0]
    assert json.loads(call.function.arguments) == {"path": "path"}


async def test_stored_responses_of_two_workers_are_all_found(client: openai.AsyncOpenAI) -> None:
    for number in range(6):
        first = await client.responses.create(model="tiny", input=f"task {number}", max_output_tokens=5)
        async with client.responses.stream(
            model="tiny", input="go on", max_output_tokens=5, previous_response_id=first.id
        ) as stream:
            second = await stream.get_final_response()
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
        assert len((await client.responses.input_items.list(second.id)).data) == 3
        await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_of_nobody")


async def test_messages_stream_count_and_use_tools(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=ASK) as stream:
        said = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    usage = final.usage
    counted = await claude.messages.count_tokens(model="tiny", messages=ASK)
    parts = (usage.input_tokens, usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0)
    assert said
    assert sum(parts) == counted.input_tokens
    tools: Any = [{"name": "read", "input_schema": PARAMETERS}]
    used = await claude.messages.create(
        model="tiny", max_tokens=200, messages=ASK, tools=tools, tool_choice={"type": "any"}
    )
    block: Any = used.content[0]
    assert (used.stop_reason, block.input) == ("tool_use", {"path": "path"})


async def test_embeddings_and_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    made = await client.embeddings.create(model="tiny", input=["a", "b"])
    assert len(made.data) == 2


async def test_b085_errors_raise_the_right_classes(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="no", max_tokens=1, messages=ASK)
    too_long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match="context length"):
        await client.chat.completions.create(model="tiny", messages=too_long)
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        await claude.messages.create(model="tiny", max_tokens=1, messages=too_long)


async def test_b003_a_client_that_times_out_leaves_nothing_behind(
    gate: tuple[Front, list[str]], client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    front, urls = gate
    async with httpx.AsyncClient() as http:
        for url in urls:
            (await http.post(f"{url}/sim/faults", json={"hang": {}})).raise_for_status()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=ASK)
        with pytest.raises(anthropic.APITimeoutError):
            await claude.with_options(timeout=0.3).messages.create(model="tiny", max_tokens=1, messages=ASK)
        await front.idle()
        for url in urls:
            (await http.post(f"{url}/sim/faults", json={})).raise_for_status()
    answered = await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
    assert answered.usage is not None


async def test_the_gateway_is_as_patient_as_the_sdks() -> None:
    ours = load(None, {}, {}).timeouts
    for default in (openai.DEFAULT_TIMEOUT, anthropic.DEFAULT_TIMEOUT):
        assert default.read is not None
        assert min(ours.first_byte_s, ours.between_chunks_s) >= default.read
