"""langchain-openai through the gateway: streams, tools, errors, timeouts, retries; chat and responses."""

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.sim_fleet import CHAT, MODEL, RESPONSES, Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


@tool
def read(path: str) -> str:
    """Read a file."""
    return path


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def settings(fleet: Fleet, request: pytest.FixtureRequest) -> dict[str, object]:
    return {
        "model": MODEL,
        "base_url": f"{fleet.url}/v1",
        "api_key": "x",
        "max_retries": 0,
        "use_responses_api": request.param,
    }


async def test_a_stream_says_what_the_whole_answer_does(settings: dict[str, object]) -> None:
    llm = ChatOpenAI(**settings, temperature=0, max_tokens=12, stream_usage=True)
    whole = await llm.ainvoke("Which worker holds this?")
    parts = [part async for part in llm.astream("Which worker holds this?")]
    assert "".join(part.text for part in parts) == whole.text != ""
    assert sum((part.usage_metadata or {}).get("output_tokens", 0) for part in parts) == 12


async def test_tools_are_called(settings: dict[str, object]) -> None:
    llm = ChatOpenAI(**settings).bind_tools([read], tool_choice="required")
    called = await llm.ainvoke("Read it.")
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("read", {"path": "path"})]


async def test_errors_timeouts_and_retries(settings: dict[str, object], fleet: Fleet) -> None:
    path = RESPONSES if settings["use_responses_api"] else CHAT
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await ChatOpenAI(**settings | {"model": "none"}).ainvoke("hi")
    with pytest.raises(openai.BadRequestError):
        await ChatOpenAI(**settings, temperature=-1).ainvoke("hi")
    fleet.refuse_once(path)
    with pytest.raises(openai.InternalServerError):
        await ChatOpenAI(**settings).ainvoke("hi")
    fleet.refuse_once(path)
    assert (await ChatOpenAI(**settings | {"max_retries": 2}, max_tokens=3).ainvoke("hi")).text
    fleet.hang(path)
    with pytest.raises(openai.APITimeoutError):
        await ChatOpenAI(**settings, timeout=0.3).ainvoke("hi")


async def test_embeddings(fleet: Fleet) -> None:
    made = OpenAIEmbeddings(
        model=MODEL, base_url=f"{fleet.url}/v1", api_key="x", check_embedding_ctx_length=False
    )
    assert len(await made.aembed_documents(["a", "b"])) == 2
