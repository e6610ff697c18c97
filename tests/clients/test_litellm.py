"""litellm as a client of the gateway, over the OpenAI and the Anthropic API."""

import json
from typing import Any

import litellm
import pytest

from tests.clients.sim_fleet import CHAT, MESSAGES, MODEL, Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "user", "content": "Read it."}]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL = {"type": "function", "function": {"name": "read", "description": "x", "parameters": PARAMETERS}}


@pytest.fixture(params=["openai", "anthropic"])
def settings(fleet: Fleet, request: pytest.FixtureRequest) -> dict[str, Any]:
    base = f"{fleet.url}/v1" if request.param == "openai" else fleet.url
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": base,
        "api_key": "x",
        "messages": ASK,
        "max_tokens": 40,
        "num_retries": 0,
        "max_retries": 0,
    }


async def test_a_stream_says_what_the_whole_answer_does(settings: dict[str, Any]) -> None:
    whole = await litellm.acompletion(**settings, temperature=0)
    stream = await litellm.acompletion(
        **settings, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content != ""
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [40]


async def test_tools_are_called(settings: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**settings, tools=[TOOL], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("read", {"path": "path"})


async def test_errors_timeouts_and_retries(settings: dict[str, Any], fleet: Fleet) -> None:
    provider = settings["model"].split("/")[0]
    path = CHAT if provider == "openai" else MESSAGES
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**settings | {"model": f"{provider}/none"})
    fleet.refuse_once(path)
    with pytest.raises((litellm.ServiceUnavailableError, litellm.InternalServerError)):
        await litellm.acompletion(**settings)
    fleet.refuse_once(path)
    assert (await litellm.acompletion(**settings | {"num_retries": 2})).choices
    fleet.hang(path)
    with pytest.raises(litellm.Timeout):
        await litellm.acompletion(**settings, timeout=0.3)
