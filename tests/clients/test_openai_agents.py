"""openai-agents through the gateway: whole runs with a tool, over chat and over responses."""

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.clients.sim_fleet import CHAT, MODEL, RESPONSES, Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

set_tracing_disabled(True)
READ: list[str] = []


@function_tool
def read(path: str) -> str:
    """Read a file."""
    READ.append(path)
    return "its content"


@pytest.fixture(params=[CHAT, RESPONSES])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(fleet: Fleet, path: str):
    def agent(model: str = MODEL, *, tools: bool = False, **client: object) -> Agent:
        READ.clear()
        made = openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x", **{"max_retries": 0, **client})
        settings = ModelSettings(tool_choice="required" if tools else None)
        kind = OpenAIChatCompletionsModel if path == CHAT else OpenAIResponsesModel
        return Agent("a", model=kind(model, made), model_settings=settings, tools=[read] if tools else [])

    return agent


async def test_a_run_calls_its_tool_and_goes_on_from_what_it_says(make) -> None:
    result = await Runner.run(make(tools=True), "Read it.")
    assert READ == ["path"]
    assert result.final_output
    assert len(result.raw_responses) == 2


async def test_a_streamed_run(make) -> None:
    streamed = Runner.run_streamed(make(tools=True), "Read it.")
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert READ == ["path"]
    assert streamed.final_output


async def test_errors_timeouts_and_retries(make, path: str, fleet: Fleet) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await Runner.run(make("none"), "hi")
    fleet.refuse_once(path)
    assert (await Runner.run(make(max_retries=2), "hi")).final_output
    fleet.hang(path)
    with pytest.raises(openai.APITimeoutError):
        await Runner.run(make(timeout=0.3), "hi")
