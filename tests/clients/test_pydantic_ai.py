"""pydantic-ai through the gateway: structured output by tools, streams, errors."""

import anthropic
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.sim_fleet import CHAT, MESSAGES, MODEL, RESPONSES, Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Read(BaseModel):
    """A file to read."""

    path: str


@pytest.fixture(params=[CHAT, RESPONSES, MESSAGES])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(fleet: Fleet, path: str):
    def model(name: str = MODEL, **client: object):
        client = {"api_key": "x", "max_retries": 0, **client}
        if path == MESSAGES:
            claude = anthropic.AsyncAnthropic(base_url=fleet.url, **client)
            return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=claude))
        made = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", **client)
        kind = OpenAIChatModel if path == CHAT else OpenAIResponsesModel
        return kind(name, provider=OpenAIProvider(openai_client=made))

    return model


async def test_structured_output_is_a_tool_call(make) -> None:
    result = await Agent(make(), output_type=Read).run("Read it.")
    assert result.output == Read(path="path")
    assert result.usage.output_tokens


async def test_a_stream(make) -> None:
    async with Agent(make(), model_settings={"max_tokens": 12}).run_stream("hi") as stream:
        parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(parts)
    assert len(parts) > 1


async def test_errors_timeouts_and_retries(make, path: str, fleet: Fleet) -> None:
    with pytest.raises(ModelHTTPError) as missing:
        await Agent(make("none")).run("hi")
    assert missing.value.status_code == 404
    fleet.refuse_once(path)
    with pytest.raises(ModelHTTPError) as full:
        await Agent(make()).run("hi")
    assert full.value.status_code == 503
    fleet.refuse_once(path)
    assert (await Agent(make(max_retries=2), model_settings={"max_tokens": 3}).run("hi")).output
    fleet.hang(path)
    with pytest.raises(ModelAPIError, match=r"(?i)timed out"):
        await Agent(make(timeout=0.3)).run("hi")
