"""More than there is room for: refused in time, in the API's shape, and slow readers cost no memory."""

import asyncio
import contextlib
import json
import logging
import resource

import pytest

from gateway.routing.eligibility import Room, within
from gateway.serve import claim_descriptors
from peer import Connection, Received
from policies.types import Candidate

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"


def test_tokens_have_room_until_the_limit_and_a_large_turn_where_nothing_waits() -> None:
    room = Room(requests=2, tokens=1000)
    assert room.has(1000, inflight=1, queued_tokens=0)
    assert room.has(5000, inflight=1, queued_tokens=0)
    assert room.has(400, inflight=1, queued_tokens=600)
    assert not room.has(401, inflight=1, queued_tokens=600)
    assert not room.has(1, inflight=2, queued_tokens=0)
    given = [Candidate("a", queued_tokens=900, local_tokens=900), Candidate("b", queued_tokens=900)]
    assert [c.excluded for c in within(Room(tokens=1000), given, 1000)] == ["", "full"]


@pytest.mark.parametrize("limit", ["WORKER_REQUESTS", "REQUESTS"])
async def test_b022_b086_beyond_the_limit_is_a_429_in_the_apis_shape(peers, front, limit: str) -> None:
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
    assert int(retry_after) >= 1
    status, retry_after, content = await call("/v1/messages")
    assert (status, content["type"], content["error"]["type"]) == (429, "error", "rate_limit_error")
    assert int(retry_after) >= 1
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert "moongate_overloaded_total 2.0" in await page.text()
    go_on.set()
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 4
    assert (await call())[0] == 200
    await gate.idle()


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
    await gate.until(lambda: not peer.open, budget_s=10)
    assert sent < 40 << 20  # what the kernel buffers on both ways; the rest was never asked for
    await gate.idle()
    with contextlib.suppress(ConnectionError):  # dropped, not left open
        while await asyncio.wait_for(reader.read(1 << 20), 5):
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
