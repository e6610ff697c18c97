"""Through a real gateway: what a turn is told of the prompt its session had before."""

import json
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.explanation import as_text
from peer import ADMIN, Connection, Peer, Received

METRICS = b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
Message = dict[str, Any]
SYSTEM = "You mend what is broken in a repository, one careful step after another. " * 12
CHAT = "/v1/chat/completions"


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


def words(topic: str, count: int = 60) -> str:
    return " ".join(f"{topic} number {n}, which differs from all others by {n * n}." for n in range(count))


def tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {name: {"type": "string", "description": words(name, 6)}}}
    return {
        "type": "function",
        "function": {"name": name, "description": words(name, 4), "parameters": parameters},
    }


def conversation(system: str = SYSTEM, topic: str = "file", length: int = 5) -> list[Message]:
    turns = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": words(f"{topic} of turn {n}", 20)}
        for n in range(length)
    ]
    return [{"role": "system", "content": system}, *turns]


class Session:
    """A client of the gateway that sends whole bodies and looks up what was said of them."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate
        self.sent = 0

    async def turn(self, body: Message, path: str = CHAT, **headers: str) -> dict[str, Any] | None:
        self.sent += 1
        name = f"turn-{self.sent}"
        sent = {"model": "m", **body}
        headers = {"x-request-id": name, **{key.replace("_", "-"): value for key, value in headers.items()}}
        async with self.gate.client.post(self.gate.url + path, json=sent, headers=headers) as answer:
            await answer.read()
            assert answer.status == 200
        breaks = self.gate.gateway.breaks
        await self.gate.until(lambda: not breaks.busy)
        async with self.gate.client.get(
            f"{self.gate.url}/admin/v1/decisions/{name}", headers=ADMIN
        ) as answer:
            view = await answer.json()
        assert view["unrenderable"] == ""
        assert view["prompt_tokens"] > 0
        return view["divergence"]

    async def chat(self, messages: list[Message], **fields: Any) -> dict[str, Any] | None:
        return await self.turn({"messages": messages, **fields})

    async def explain(self, body: Message) -> dict[str, Any]:
        url = f"{self.gate.url}/admin/v1/explain"
        async with self.gate.client.post(url, json={"model": "m", **body}, headers=ADMIN) as answer:
            assert answer.status == 200
            return await answer.json()

    async def metrics(self) -> str:
        async with self.gate.client.get(f"{self.gate.url}/metrics") as answer:
            return await answer.text()


@pytest.fixture
async def session(
    peers: Callable[..., Awaitable[Peer]], front: Callable[..., Awaitable[Any]], tiny_model: Path
) -> Session:
    peer = await peers(say_ok)
    card = {"id": "m", "root": str(tiny_model)}
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
    peer.pages["/metrics"] = METRICS
    gate = await front(peer)
    await gate.tokenizers()
    return Session(gate)


async def test_a_conversation_that_grows_does_not_break(session: Session) -> None:
    whole = conversation(length=9)
    tools = [tool("search"), tool("edit")]
    for length in (2, 4, 6, 8, 10):
        assert await session.chat(whole[:length], tools=tools) is None
    assert "moongate_prefix_breaks_total{" not in await session.metrics()


@pytest.mark.parametrize("named", [True, False])
async def test_a_clock_in_the_system_prompt(session: Session, named: bool) -> None:
    fields = {"prompt_cache_key": "s1"} if named else {}
    whole = conversation(f"Now it is 10:15:07. {SYSTEM}", length=7)
    assert await session.chat(whole[:6], **fields) is None
    whole[0] = {"role": "system", "content": f"Now it is 10:16:33. {SYSTEM}"}
    found = await session.chat(whole, **fields)

    assert found is not None
    assert found["cause"] == "messages[0] (system)"
    assert found["block"] == 0
    assert 0 < found["token"] < 32
    assert found["before"].endswith("Now it is 10:1")
    assert found["previously"].startswith("5:07. You mend")
    assert found["now"].startswith("6:33. You mend")
    assert found["previous_request_id"] == "turn-1"
    assert found["inferred"] is not named
    first = await session.explain({"messages": whole[:6]})
    assert found["lost_tokens"] == first["prompt_tokens"] // 32 * 32
    page = await session.metrics()
    assert 'moongate_prefix_breaks_total{cause="system",model="m"} 1.0' in page
    assert "10:16" not in page


async def test_a_system_message_that_comes_and_goes(session: Session) -> None:
    whole = conversation("You mend.", length=7)
    assert await session.chat(whole, session_id="s") is None
    found = await session.chat(whole[1:], session_id="s")
    assert found is not None
    assert found["cause"] == "system: none now, there was one before"
    assert await session.chat(whole[1:], session_id="t") is None
    found = await session.chat(whole, session_id="t")
    assert found is not None
    assert found["cause"] == "messages[0] (system): none before"
    page = await session.metrics()
    assert 'moongate_prefix_breaks_total{cause="system",model="m"} 2.0' in page
    # What comes after that is not its fault.
    whole[1]["content"] = "Edited. " + whole[1]["content"]
    found = await session.chat(whole, session_id="t")
    assert found is not None
    assert found["cause"] == "messages[1] (user)"
    turns = whole[1:]
    body: Message = {"max_tokens": 9, "metadata": {"session_id": "anthropic"}, "messages": turns}
    assert await session.turn({**body, "system": "You mend."}, "/v1/messages") is None
    found = await session.turn(body, "/v1/messages")
    assert found is not None
    assert found["cause"] == "system: none now, there was one before"


async def test_the_next_turn_goes_on_from_the_broken_one(session: Session) -> None:
    whole = conversation(length=7)
    edited = [{"role": "system", "content": f"Today. {SYSTEM}"}, *whole[1:]]
    assert await session.chat(whole[:6]) is None
    assert await session.chat(edited[:6]) is not None
    assert await session.chat(edited) is None


async def test_reordered_tools(session: Session) -> None:
    tools = [tool(name) for name in ("search", "edit", "run", "ask")]
    whole = conversation(length=7)
    assert await session.chat(whole[:6], tools=tools) is None
    found = await session.chat(whole, tools=[tools[0], tools[2], tools[1], tools[3]])

    assert found is not None
    assert found["cause"] == "tools[1] (run)"
    assert found["previously"].startswith("edit")
    assert found["now"].startswith("run")
    assert 'moongate_prefix_breaks_total{cause="tools",model="m"} 1.0' in await session.metrics()


async def test_a_tool_that_comes_and_goes(session: Session) -> None:
    tools = [tool(name) for name in ("search", "edit", "run")]
    whole = conversation(length=7)
    assert await session.chat(whole, tools=tools) is None
    fewer = await session.chat(whole, tools=tools[:2])
    assert fewer is not None
    assert fewer["cause"] == "tools[1] (edit): 2 tools now, 3 before"
    none = await session.chat(whole)
    assert none is not None
    assert none["cause"] == "tools: 0 now, 2 before"
    more = await session.chat(whole, tools=[*tools, tool("ask")])
    assert more is not None
    assert more["cause"] == "tools[3] (ask): 4 tools now, 3 before"


async def test_an_edited_message_in_the_middle(session: Session) -> None:
    whole = conversation(length=9)
    assert await session.chat(whole[:8]) is None
    edited = deepcopy(whole)
    edited[3]["content"] = edited[3]["content"].replace("number 3,", "number three,")
    found = await session.chat(edited)

    assert found is not None
    assert found["cause"] == "messages[3] (user)"
    assert found["previously"] != found["now"]
    assert "three," in found["now"]
    before = (await session.explain({"messages": whole[:3]}))["prompt_tokens"]
    after = (await session.explain({"messages": whole[:4]}))["prompt_tokens"]
    assert before <= found["token"] < after
    assert found["block"] == found["token"] // 32


async def test_a_message_put_in_between_is_named_and_not_the_one_before(session: Session) -> None:
    whole = conversation(length=9)
    assert await session.chat(whole[:8]) is None
    found = await session.chat([*whole[:3], {"role": "user", "content": "By the way."}, *whole[3:]])
    # Both sides go on with a user's message there.
    assert found is not None
    assert found["cause"] == "messages[3] (user)"
    found = await session.chat([*whole[:4], {"role": "user", "content": "By the way."}, *whole[4:]])
    # Here only the role differs.
    assert found is not None
    assert found["cause"] == "messages[4] (user)"


async def test_other_apis(session: Session) -> None:
    turns = conversation(length=7)[1:]
    user = json.dumps({"device_id": "d", "session_id": "s"})
    body: Message = {"max_tokens": 9, "metadata": {"user_id": user}, "tools": []}
    clock = [{"type": "text", "text": "It is noon. " + SYSTEM}]
    assert await session.turn({**body, "system": clock, "messages": turns[:5]}, "/v1/messages") is None
    clock = [{"type": "text", "text": "It is late. " + SYSTEM}]
    found = await session.turn({**body, "system": clock, "messages": turns}, "/v1/messages")
    assert found is not None
    assert found["cause"] == "system"
    assert not found["inferred"]

    body = {"instructions": SYSTEM, "input": [{"type": "message", "role": "user", "content": words("a")}]}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "x"}'}
    output = {"type": "function_call_output", "call_id": "c", "output": words("found", 30)}
    more = [call, output, {"type": "message", "role": "user", "content": words("more", 30)}]
    first = {**body, "input": [*body["input"], *more]}
    assert await session.turn(first, "/v1/responses", session_id="r") is None
    changed = deepcopy(first)
    changed["input"][2]["output"] = "Again: " + output["output"]
    found = await session.turn(changed, "/v1/responses", session_id="r")
    assert found is not None
    assert found["cause"] == "input[2] (function_call_output)"

    prompt = words("plain", 50)
    assert await session.turn({"prompt": SYSTEM + prompt}, "/v1/completions") is None
    found = await session.turn({"prompt": SYSTEM + "So. " + prompt}, "/v1/completions")
    assert found is not None
    assert found["cause"] == "prompt"
    assert found["inferred"]


@pytest.mark.parametrize("named", [True, False])
async def test_interleaved_sessions_are_kept_apart(session: Session, named: bool) -> None:
    one, other = conversation(topic="file", length=7), conversation(topic="test", length=7)
    for length in (2, 4, 6):
        for name, whole in (("a", one), ("b", other)):
            headers = {"x_session_id": name} if named else {}
            assert await session.turn({"messages": whole[:length]}, **headers) is None
    one[2]["content"] = "Edited. " + one[2]["content"]
    headers = {"x_session_id": "a"} if named else {}
    found = await session.turn({"messages": one}, **headers)
    assert found is not None
    assert found["previous_request_id"] == "turn-5"
    assert found["cause"] == "messages[2] (assistant)"


async def test_a_sub_agent_a_rewound_and_a_summarised_conversation_are_no_breaks(session: Session) -> None:
    whole = conversation(length=9)
    named = {"prompt_cache_key": "s"}
    assert await session.chat(whole, **named) is None
    assert await session.chat(conversation("You review. " * 60, "review", 5), **named) is None
    assert (
        await session.chat([*whole[:4], {"role": "user", "content": words("instead", 40)}], **named) is None
    )
    assert await session.chat([whole[0], {"role": "user", "content": words("summary", 40)}], **named) is None
    assert await session.chat([*whole, {"role": "user", "content": "Go on."}], **named) is None


async def test_another_salt(session: Session) -> None:
    whole = conversation(length=5)
    assert await session.chat(whole, cache_salt="one", session_id="s") is None
    found = await session.chat(whole, cache_salt="two", session_id="s")
    assert found is not None
    assert found["cause"] == "cache_salt"
    assert found["token"] == 0
    # Without a name, turns of two tenants that begin alike are two sessions.
    assert await session.chat(whole, cache_salt="three") is None


async def test_an_explanation_tells_of_the_break_and_remembers_nothing(session: Session) -> None:
    whole = conversation(length=7)
    assert await session.chat(whole[:6]) is None
    edited = [{"role": "system", "content": f"Today. {SYSTEM}"}, *whole[1:]]
    views = [await session.explain({"messages": edited}) for _ in range(2)]
    assert [view["divergence"]["cause"] for view in views] == ["messages[0] (system)"] * 2
    lost = views[1]["divergence"]["lost_tokens"]
    text = as_text(views[1])
    assert f"messages[0] (system), {lost} tokens lost" in text
    assert "'Today. You mend" in text.split("now ")[1]
    assert "moongate_prefix_breaks_total{" not in await session.metrics()
    assert (await session.explain({"messages": whole}))["divergence"] is None
