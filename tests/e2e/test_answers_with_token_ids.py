"""Sending token ids to a worker changes nothing that a client can see."""

import json
from typing import Any

import httpx
import pytest

from conversation import TOOLS, Conversation
from real_fleet import PATIENT_S, RealFleet

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "ids returned": {"return_token_ids": True},
    "two choices": {"n": 2, "temperature": 0.8, "seed": 7},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "tools required": {"tools": TOOLS, "tool_choice": "required"},
    "tools auto": {"tools": TOOLS},
    "stop": {"stop": ["e"]},
    "truncated": {"truncate_prompt_tokens": 600},
    "salted": {"cache_salt": "tenant"},
    "prompt text": {"return_prompt_text": True},
    "echo": {"echo": True},
}
# Different on every call, or counters of the cache, which the first of two calls has warmed.
VOLATILE = {"id", "created", "created_at", "system_fingerprint", "usage", "metrics", "kv_transfer_params"}


def steady(value: Any) -> Any:
    """`value` without what differs between any two calls."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items() if key not in VOLATILE}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


async def both(fleet: RealFleet, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The answers of the gateway and of a worker asked directly."""
    through = await fleet.client.post(path, json=body)
    assert through.status_code == 200, through.text
    async with httpx.AsyncClient(base_url=fleet.workers[0].url, timeout=PATIENT_S, trust_env=False) as worker:
        direct = await worker.post(path, json=body)
    assert direct.status_code == 200, direct.text
    return steady(through.json()), steady(direct.json())


@pytest.mark.parametrize("kind", CHATS)
async def test_chat_answers_are_the_same(fleet: RealFleet, kind: str) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=4000, words=500, tools=False)
    talk.grow()
    through, direct = await both(fleet, "/v1/chat/completions", {**talk.body(max_tokens=12), **CHATS[kind]})
    assert through == direct
    assert through["choices"]


@pytest.mark.parametrize("kind", ["plain", "tools auto"])
async def test_streams_are_the_same(fleet: RealFleet, kind: str) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=4100, words=500, tools=False)
    talk.grow()
    body = {**talk.body(max_tokens=12, stream=True), **CHATS[kind]}

    async def text_of(client: httpx.AsyncClient) -> str:
        page = (await client.post("/v1/chat/completions", json=body)).text
        assert page.rstrip().endswith("data: [DONE]")
        events = [json.loads(line[6:]) for line in page.splitlines() if line.startswith("data: {")]
        return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])

    async with httpx.AsyncClient(base_url=fleet.workers[0].url, timeout=PATIENT_S, trust_env=False) as worker:
        assert await text_of(fleet.client) == await text_of(worker) != ""


async def test_the_other_apis_are_the_same(fleet: RealFleet) -> None:
    talk = Conversation(fleet.client, fleet.model, seed=4200, words=600)
    text = talk.text(600)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text, "max_tokens": 8, "temperature": 0, "logprobs": 2},
        "/v1/messages": {
            "system": text,
            "messages": [{"role": "user", "content": "Go on"}],
            "max_tokens": 8,
            "temperature": 0,
        },
        "/v1/responses": {"instructions": text, "input": "Go on", "max_output_tokens": 8, "temperature": 0},
    }
    for path, body in bodies.items():
        through, direct = await both(fleet, path, {"model": fleet.model, **body})
        for answer in (through, direct):
            for item in answer.get("output", []) if isinstance(answer, dict) else []:
                item.pop("id", None)
        assert through == direct, path


async def test_ids_were_really_sent(fleet: RealFleet) -> None:
    """A worker that is given ids does not look at the messages' text: its tokenizer has nothing to do."""
    talk = Conversation(fleet.client, fleet.model, seed=4300, words=500, tools=False)
    talk.grow()
    body = talk.body(max_tokens=1, return_token_ids=True)
    answer = await fleet.client.post("/v1/chat/completions", json=body)
    sent = await fleet.metric("moongate_tokens_forwarded_total", api="chat")
    assert sent > 0
    prompt = answer.json()["prompt_token_ids"]
    async with httpx.AsyncClient(base_url=fleet.workers[0].url, timeout=PATIENT_S, trust_env=False) as worker:
        rendered = await worker.post("/v1/chat/completions/render", json=body)
    assert prompt == rendered.json()["token_ids"]
