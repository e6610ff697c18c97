"""What never reaches a worker: wrong methods, slow bodies, placement by clients, credentials, ourselves."""

import asyncio
import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from yarl import URL

from gateway.own_url import leads_here
from peer import ADMIN, Connection, Received

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
PATH = "/v1/chat/completions"
ANY = "0.0.0.0"  # noqa: S104 - compared, not bound


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b"{}", "content-type: application/json", "x-moongate-worker: forged")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
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


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/v1/load_lora_adapter", 403),
        ("/v1/unload_lora_adapter", 403),
        ("/inference/v1/abort_requests", 403),
        ("/inference/v1/abort%5Frequests", 403),
        ("/v1/../collective_rpc", 400),
        ("/v1/%2e%2E/sleep", 400),
        ("/v1/..%2fsleep", 400),
        ("/pooling/./x", 400),
        ("/v1/files/.hidden", 200),
        ("/v1/files/a..b", 200),
    ],
)
async def test_no_client_changes_a_worker(peers, front, target: str, status: int) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(URL(gate.url + target, encoded=True), json={"lora_name": "x"}) as answer:
        assert answer.status == status
    assert len(peer.received) == (status == 200)


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/v1/v1/messages", "//v1/messages"])
async def test_b085_a_client_with_a_wrong_base_url_is_told_where_the_apis_are(
    peers, front, path: str
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(gate.url + path, data=CHAT) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["message"] == (
            f"no such route: POST {path}; the APIs are at /v1/..."
        )
    assert peer.received == []


async def test_a_browsers_preflight_is_the_workers_to_answer(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with gate.client.options(gate.url + PATH, headers=headers) as answer:
        assert answer.status == 200
    assert peer.received[0].header("access-control-request-method") == ["POST"]


@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        (gzip.compress(CHAT, mtime=0), {"content-type": "application/json", "content-encoding": "gzip"}),
        (b"model=m&prompt=hi", {"content-type": "application/x-www-form-urlencoded"}),
    ],
    ids=["gzip", "form"],
)
async def test_b085_a_body_of_a_kind_that_is_not_read_is_a_415(
    peers, front, path: str, sent: bytes, headers: dict[str, str]
) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    async with gate.client.post(gate.url + path, data=sent, headers=headers) as answer:
        assert answer.status == 415
        error = (await answer.json())["error"]
    assert error["message"].startswith("send the body ")
    assert peer.received == []


async def test_b085_a_body_that_does_not_come_is_a_408(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer, env={"MOONGATE_TIMEOUTS__BODY_S": "0.1"})
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{" % PATH.encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
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
    assert not leads_here("http://[::1", ANY, {8000})
    assert not leads_here("http://127.0.0.1:8001", ANY, {8000})
    assert not leads_here("http://127.0.0.2:8000", "127.0.0.1", {8000})
    assert not leads_here("http://192.0.2.1:8000", ANY, {8000})
    assert not leads_here("http://no-such-host.invalid:8000", ANY, {8000})


async def test_an_unknown_worker_has_a_code_of_its_own(front) -> None:
    gate = await front()
    async with gate.client.get(f"{gate.url}/admin/v1/workers/none", headers=ADMIN) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "worker_not_found")


async def test_b078_every_call_of_the_gateways_own_carries_the_workers_key(peers, front) -> None:
    async def answer(_: Received, connection: Connection) -> None:
        await connection.answer(404, b"{}", "content-type: application/json")

    workers = [await peers(answer), await peers(answer)]
    for peer in workers:
        peer.pages["/metrics"] = (
            b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'
        )
    env = {"MOONGATE_WORKERS__API_KEY": "worker-key", "MOONGATE_PROMPT__SOURCE": "remote"}
    gate = await front(*workers, env=env)
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    for method, path, body, kind in (
        ("POST", "/v1/chat/completions", b'{"model":"m","messages":[]}', "application/json"),
        ("GET", "/v1/responses/r1", b"", "application/json"),
        ("POST", "/v1/audio/transcriptions", form, "multipart/form-data; boundary=b"),
    ):
        headers = {"content-type": kind, "authorization": "Bearer client-key"}
        async with gate.client.request(method, gate.url + path, data=body, headers=headers) as got:
            assert got.status == 404
    received = [request for peer in workers for request in peer.received]
    paths = Counter(request.target for request in received)
    assert paths.keys() == {
        *("/v1/chat/completions/render", "/v1/chat/completions"),
        *("/v1/responses/r1", "/v1/audio/transcriptions"),
    }
    for request in received:
        assert request.header("authorization") == ["Bearer worker-key"], request.target
