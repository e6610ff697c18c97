"""What never reaches a worker: wrong methods, slow bodies, placement by clients, credentials, ourselves."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from gateway.own_url import leads_here
from peer import ADMIN, Connection, Received

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"
ANY = "0.0.0.0"  # noqa: S104 - compared, not bound


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b"{}", "content-type: application/json", "x-moongate-worker: forged")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/embeddings", "/tokenize"])
async def test_b085_a_path_for_post_alone_is_a_405_for_other_methods(
    peers, front, method: str, path: str
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.request(method, gate.url + path) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        content = await answer.read()
    if method != "HEAD":
        error = json.loads(content)["error"]
        assert error["type"] == "invalid_request_error"
        assert ("code" in error) == (path != "/v1/messages")
    assert peer.received == []


async def test_b085_a_body_that_does_not_come_is_a_408(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer, env={"MOONGATE_TIMEOUTS__BODY_S": "0.1"})
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % PATH.encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in await reader.readuntil(b"}}")
    writer.close()
    assert peer.received == []


PLACING = (
    "x-data-parallel-rank x-data-parallel-host-port x-dp-rank x-worker-id x-worker-instance-id "
    "x-prefill-instance-id x-prefiller-host-port x-gateway-destination-endpoint x-smg-target-worker "
    "target-pod x-moongate-worker"
).split()


async def test_b070_headers_that_place_a_request_do_not_pass_either_way(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    headers = dict.fromkeys(PLACING, "169.254.169.254:1") | {"x-kept": "1"}
    async with gate.client.post(gate.url + PATH, data=CHAT, headers=headers) as answer:
        assert answer.status == 200
        assert "x-moongate-worker" not in answer.headers
    received = peer.received[0]
    assert received.header("x-kept") == ["1"]
    assert [name for name in PLACING if received.header(name)] == []


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("worker_key", ["worker-key", ""])
async def test_b079_b105_the_worker_sees_its_own_credential_or_none_and_no_log_any(
    peers, front, tmp_path: Path, caplog: pytest.LogCaptureFixture, keyed: bool, worker_key: str
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = tmp_path / "keys"
    keys.write_text("SENTINEL-client\n")
    env = {"MOONGATE_WORKERS__API_KEY": worker_key}
    if keyed:
        env["MOONGATE_AUTH__API_KEYS_FILE"] = str(keys)
    peer = await peers(say_ok)
    gate = await front(peer, env=env)
    shown = [
        [("authorization", "Bearer SENTINEL-client")],
        [("x-api-key", "SENTINEL-client")],
        [("authorization", "Bearer SENTINEL-client"), ("x-api-key", "SENTINEL-client")],
        [("authorization", "Bearer SENTINEL-wrong"), ("authorization", "Bearer SENTINEL-client")],
    ]
    for headers in shown:
        async with gate.client.post(gate.url + PATH, data=CHAT, headers=headers) as answer:
            assert answer.status == 200
    for received in peer.received:
        assert received.header("authorization") == ([f"Bearer {worker_key}"] if worker_key else [])
        assert received.header("x-api-key") == []
        assert "SENTINEL" not in str(received)
    wrong = [("x-api-key", "SENTINEL-wrong")]
    async with gate.client.post(gate.url + PATH, data=CHAT, headers=wrong) as answer:
        assert answer.status == (401 if keyed else 200)
        assert "SENTINEL" not in await answer.text()
    assert "SENTINEL" not in caplog.text


async def test_the_gateway_is_no_worker_of_itself(peers, front) -> None:
    gate = await front(await peers(say_ok))
    for url in (gate.url, f"{gate.url}/", f"http://localhost:{gate.port}"):
        async with gate.client.post(
            f"{gate.url}/admin/v1/workers", json={"url": url}, headers=ADMIN
        ) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "url"
    assert len(gate.gateway.fleet.workers()) == 1


def test_only_an_address_that_listens_is_our_own() -> None:
    assert leads_here("http://127.0.0.1:8000", ANY, {8000})
    assert leads_here("http://127.0.0.1", "127.0.0.1", {80})
    assert not leads_here("http://127.0.0.1:8001", ANY, {8000})
    assert not leads_here("http://127.0.0.2:8000", "127.0.0.1", {8000})
    assert not leads_here("http://192.0.2.1:8000", ANY, {8000})
    assert not leads_here("http://no-such-host.invalid:8000", ANY, {8000})


async def test_an_unknown_worker_has_a_code_of_its_own(front) -> None:
    gate = await front()
    async with gate.client.get(f"{gate.url}/admin/v1/workers/none", headers=ADMIN) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "worker_not_found")


async def silent(_: Received, connection: Connection) -> None:
    await connection.gone.wait()


async def streaming(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    while not connection.gone.is_set():
        await connection.chunk(b'event: x\ndata: {"i":0}\n\n')
        await asyncio.sleep(0.005)


APIS = {
    PATH: CHAT,
    "/v1/completions": b'{"model":"m","prompt":"hi"}',
    "/v1/responses": b'{"model":"m","input":"hi"}',
    "/v1/messages": b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}',
    "/v1/embeddings": b'{"model":"m","input":"hi"}',
}


@pytest.mark.parametrize("phase", [silent, streaming])
async def test_b004_b099_three_hundred_aborts_leave_no_lease_no_connection_and_no_task(
    peers, front, phase
) -> None:
    peer = await peers(phase)
    gate = await front(peer)
    async with gate.client.get(f"{gate.url}/health"):
        before = len(asyncio.all_tasks())
    loop = asyncio.get_running_loop()
    slowest = 0.0
    for path, content in APIS.items():
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        writers: list[asyncio.StreamWriter] = []
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", gate.port)
            writer.write(head + content)
            writers.append(writer)
        await gate.until(lambda: len(peer.open) == 60)
        last = writers.pop()
        for number, writer in enumerate(writers):
            if number % 2:
                writer.write_eof()  # half closed: taken for gone, and told apart from it by nothing
            else:
                writer.transport.abort()
        await gate.until(lambda: len(peer.open) == 1, budget_s=10)
        left = loop.time()
        last.transport.abort()
        await gate.until(lambda: not peer.open, budget_s=10)
        slowest = max(slowest, loop.time() - left)
        for writer in writers:
            writer.close()
    await gate.idle()
    await gate.until(lambda: len(asyncio.all_tasks()) <= before, budget_s=10)
    assert slowest < 0.5  # 0.1 on a machine that does nothing else
    async with gate.client.get(f"{gate.url}/metrics") as page:
        text = await page.text()
    cancelled = [line for line in text.splitlines() if 'outcome="cancelled"' in line and "_total{" in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in cancelled) == 300
