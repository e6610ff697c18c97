"""More than there is room for: refused in time, in the API's shape, and slow readers cost no memory."""

import asyncio
import contextlib
import json
import logging
import re
import resource
import time
from typing import Any

import pytest

from gateway.proxy.accounts import Accounts
from gateway.routing.eligibility import Lack, Room, within
from gateway.routing.router import Router
from gateway.serve import claim_descriptors, room_for_clients
from gateway.upstream.connections import Connections
from peer import ADMIN, Connection, Received
from policies.ledger import Ledger
from policies.types import Candidate

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"


def test_tokens_have_room_until_the_limit_and_a_large_turn_where_nothing_waits() -> None:
    room = Room(requests=2, tokens=1000)
    assert not room.lacks(1000, inflight=1, queued_tokens=0)
    assert not room.lacks(5000, inflight=1, queued_tokens=0)
    assert not room.lacks(400, inflight=1, queued_tokens=600)
    assert room.lacks(401, inflight=1, queued_tokens=600) == "tokens"
    assert room.lacks(1, inflight=2, queued_tokens=0) == "requests"
    given = [Candidate("a", queued_tokens=900, local_tokens=900), Candidate("b", queued_tokens=900)]
    assert [c.excluded for c in within(Room(tokens=1000), given, 1000)] == ["", "full"]


@pytest.mark.parametrize("limit", ["WORKER_REQUESTS", "REQUESTS"])
async def test_b022_b086_beyond_the_limit_is_a_429_in_the_apis_shape_that_names_it(
    peers, front, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await go_on.wait()
        await connection.answer(200, b"{}")

    one, two = await peers(slow), await peers(slow)
    room = {"WORKER_REQUESTS": "2", "REQUESTS": "4"}[limit]
    gate = await front(one, two, env={f"MOONGATE_LIMITS__{limit}": room})

    async def call(path: str = PATH) -> tuple[int, str, dict]:
        async with gate.client.post(gate.url + path, data=CHAT) as answer:
            return answer.status, answer.headers.get("retry-after", ""), await answer.json(content_type=None)

    waiting = [asyncio.create_task(call()) for _ in range(4)]
    await gate.until(lambda: len(one.open) + len(two.open) == 4)
    assert len(one.open) == len(two.open) == 2
    status, retry_after, content = await call()
    assert (status, content["error"]["code"]) == (429, "rate_limit_exceeded")
    assert f"(limits.{limit.lower()})" in content["error"]["message"]
    # Of how fast turns end nothing is known yet.
    assert int(retry_after) == 5
    status, retry_after, content = await call("/v1/messages")
    assert (status, content["type"], content["error"]["type"]) == (429, "error", "rate_limit_error")
    assert int(retry_after) >= 1
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert f'moongate_overloaded_total{{limit="{limit.lower()}"}} 2.0' in await page.text()
    async with gate.client.get(f"{gate.url}/ready") as ready:
        assert ready.status == 200
        reason = (await ready.json())["reasons"][0]
    async with gate.client.get(f"{gate.url}/admin/v1/workers", headers=ADMIN) as view:
        (refusal,) = (await view.json())["refusals"]
    lately = rf"turns were refused, the last \d+ s ago, with 429 for want of room: limits.{limit.lower()}"
    assert re.fullmatch(lately, reason)
    assert re.fullmatch(lately, refusal)
    said = f"1 turn was refused with 429 for want of room: limits.{limit.lower()}"
    assert [line for line in caplog.messages if "refused" in line] == [said]
    gate.gateway.refusals.close()
    more = f"1 more turn was refused with 429 for want of room in the last minute: limits.{limit.lower()}"
    assert [line for line in caplog.messages if "refused" in line] == [said, more]
    go_on.set()
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 4
    assert (await call())[0] == 200
    await gate.idle()


@pytest.mark.parametrize(("lacks", "said"), [("requests", "2"), ("tokens", "60")])
def test_the_wait_is_for_what_there_is_too_little_of(lacks: Lack, said: str) -> None:
    parts: dict[str, Any] = dict.fromkeys(("fleet", "prompts", "holders", "knowledge", "trusts"))
    now, ledger = time.monotonic(), Ledger()
    ledger.total.sent(100, now - 1.5)
    ledger.total.went(now, 1, 100)
    router = Router(ledger=ledger, **parts)
    assert router._overloaded(lacks, f"worker_{lacks}", 80_000).headers["retry-after"] == said


@pytest.mark.parametrize(("limit", "room"), [("WORKER_TOKENS", "1500"), ("TOKENS", "3000")])
async def test_b086_tokens_of_prompts_that_nobody_knows_are_estimated_for_every_limit(
    peers, front, limit: str, room: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await go_on.wait()
        await connection.answer(200, b"{}")

    one, two = await peers(slow), await peers(slow)
    off = {"MOONGATE_PROMPT__SOURCE": "off"}
    # What waits for longer than it takes to compute is taken to be computed.
    slowly = {"MOONGATE_ROUTING__RATES__PREFILL_TOKENS_PER_S": "10"}
    gate = await front(one, two, env={f"MOONGATE_LIMITS__{limit}": room, **off, **slowly})
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 8000}]})

    async def call() -> int:
        async with gate.client.post(gate.url + PATH, data=content) as answer:
            return answer.status

    waiting = [asyncio.create_task(call()) for _ in range(2)]
    await gate.until(lambda: len(one.open) + len(two.open) == 2)
    assert await call() == 429
    assert f"1 turn was refused with 429 for want of room: limits.{limit.lower()}" in caplog.messages
    go_on.set()
    assert await asyncio.gather(*waiting) == [200, 200]
    assert await call() == 200
    await gate.idle()


async def test_a_worker_that_is_registered_anew_still_has_the_turns_it_was_sent(peers, front) -> None:
    go_on = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await go_on.wait()
        await connection.answer(200, b"{}")

    peer = await peers(slow)
    gate = await front(peer, env={"MOONGATE_LIMITS__WORKER_REQUESTS": "1"})

    async def call() -> int:
        async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
            return answer.status

    waiting = asyncio.create_task(call())
    await gate.until(lambda: len(peer.open) == 1)
    admin, name = f"{gate.url}/admin/v1/workers", f"127.0.0.1:{peer.port}"
    async with gate.client.delete(f"{admin}/{name}", headers=ADMIN) as answer:
        assert answer.status < 300
    async with gate.client.post(admin, json={"url": peer.url}, headers=ADMIN) as answer:
        assert answer.status < 300
    await gate.until(lambda: gate.gateway.fleet.get(name).state == "up")
    async with gate.client.get(f"{admin}/{name}", headers=ADMIN) as answer:
        assert [target["inflight"] for target in (await answer.json())["targets"]] == [1]
    assert await call() == 429
    go_on.set()
    assert await waiting == 200
    assert await call() == 200
    await gate.idle()


@pytest.mark.parametrize("of", [Accounts, Connections])
async def test_b005_a_fault_behind_the_decision_gives_the_lease_back(
    peers, front, monkeypatch: pytest.MonkeyPatch, of: type
) -> None:
    async def answer(_: Received, connection: Connection) -> None:
        await connection.answer(200, b"{}")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    gate = await front(await peers(answer))
    monkeypatch.setattr(of, {Accounts: "decided", Connections: "open"}[of], broken)
    async with gate.client.post(gate.url + PATH, data=CHAT) as answered:
        assert answered.status == 500
    assert gate.gateway.ledger.total.inflight == 0


async def test_b098_a_client_that_does_not_read_stops_its_worker_and_is_cut_off(peers, front) -> None:
    sent = 0
    chunk = b"data: " + b"x" * (1 << 16) + b"\n\n"

    async def pour(_: Received, connection: Connection) -> None:
        nonlocal sent
        await connection.start_stream()
        while sent < 200 << 20:
            await connection.chunk(chunk)  # raises once the gateway is gone
            sent += len(chunk)

    peer = await peers(pour)
    gate = await front(peer, env={"MOONGATE_TIMEOUTS__STALL_S": "0.6"})
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port, limit=1 << 12)
    content = CHAT[:-1] + b',"stream":true}'
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(content))
    writer.write(head + content)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    await gate.until(lambda: not peer.open)
    assert sent < 40 << 20  # what the kernel buffers on both ways; the rest was never asked for
    await gate.idle()
    with contextlib.suppress(ConnectionError):  # dropped, not left open
        while await asyncio.wait_for(reader.read(1 << 20), 30):
            pass
    writer.close()


def test_b035_the_limit_of_open_files_is_raised_and_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1064))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert claim_descriptors(600) == 1064
    assert raised == [(1064, 1064)]
    assert "about 500 turns" in caplog.text
    assert "limits.requests = 600" in caplog.text
    caplog.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    claim_descriptors(600)
    assert "raise the limit" not in caplog.text
    assert [room_for_clients(n) for n in (40, 200, 1 << 20, resource.RLIM_INFINITY)] == [10, 68, 524_256, 0]
