"""Every API that a worker serves passes, with the same accounting and nothing of it changed."""

import asyncio
import json

import pytest
from yarl import URL

from gateway.api.usage import parse_usage
from peer import Connection, Received

FORM = "multipart/form-data; boundary=XX"


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}')


def form(model: bytes) -> bytes:
    return (
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + bytes(range(256)) * 400
        + b'\r\n--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--XX--\r\n' % model
    )


async def test_b089_anthropic_headers_and_query_strings_reach_the_worker(peers, front) -> None:
    peer = await peers(say_ok)
    gate = await front(peer)
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "prompt-caching-2024-07-31,fine-grained-tool-streaming-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-stainless-lang": "python",
        "x-api-key": "the client's",
    }
    sent = b'{"model":"m","max_tokens":1,"messages":[]}'
    for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true&x=a%2Fb"):
        url = URL(gate.url + path, encoded=True)
        async with gate.client.post(url, data=sent, headers=headers) as answer:
            assert answer.status == 200
        got = peer.received[-1]
        assert (got.target, got.body) == (path, sent)
        assert {name: got.header(name) for name in headers} == {
            **{name: [value] for name, value in headers.items()},
            "x-api-key": [],
        }


async def test_a_form_goes_to_a_worker_of_its_model_byte_for_byte(peers, front) -> None:
    one, two = await peers(say_ok, "whisper"), await peers(say_ok, "other")
    gate = await front(one, two)
    sent = form(b"whisper")
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        async with gate.client.post(gate.url + path, data=sent, headers={"content-type": FORM}) as answer:
            assert answer.status == 200
    assert [(r.body, r.header("content-type")) for r in one.received] == [(sent, [FORM])] * 2
    assert two.received == []
    async with gate.client.post(
        f"{gate.url}/v1/audio/transcriptions", data=form(b"none"), headers={"content-type": FORM}
    ) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/classify"),
        ("POST", "/score"),
        ("POST", "/rerank"),
        ("POST", "/v2/rerank"),
        ("POST", "/v1/rerank"),
        ("POST", "/pooling"),
        ("POST", "/detokenize"),
        ("POST", "/v1/messages/count_tokens"),
        ("PUT", "/v1/anything/at/all"),
        ("DELETE", "/v1/files/f"),
        ("GET", "/inference/v1/x"),
    ],
)
async def test_b042_every_path_is_charged_and_counted(peers, front, method: str, path: str) -> None:
    go = asyncio.Event()

    async def slow(_: Received, connection: Connection) -> None:
        await go.wait()
        await connection.answer(200, b"{}")

    peer = await peers(slow)
    gate = await front(peer)
    call = asyncio.create_task(gate.client.request(method, gate.url + path, data=b'{"model":"m"}'))
    await gate.until(lambda: len(peer.open) == 1)
    assert gate.gateway.ledger.total.inflight == 1
    go.set()
    async with await call as answer:
        assert answer.status == 200
    assert (peer.received[0].method, peer.received[0].target) == (method, path)
    await gate.idle()
    async with gate.client.get(f"{gate.url}/metrics") as answer:
        assert 'moongate_requests_total{api="other",model="m",outcome="ok"} 1.0' in await answer.text()


async def test_b080_an_adapters_turns_go_only_where_it_is_loaded(peers, front) -> None:
    one, two = await peers(say_ok), await peers(say_ok)
    adapter = {"id": "lora", "root": "/adapters/lora", "parent": "m", "max_model_len": 7}
    cards = [json.loads(one.pages["/v1/models"])["data"][0], adapter]
    two.pages["/v1/models"] = json.dumps({"object": "list", "data": cards}).encode()
    gate = await front(one, two)
    async with gate.client.get(f"{gate.url}/v1/models") as answer:
        listed = (await answer.json())["data"]
    assert listed == cards
    for _ in range(4):
        async with gate.client.post(
            f"{gate.url}/v1/chat/completions", data=b'{"model":"lora","messages":[]}'
        ) as answer:
            assert answer.status == 200
    assert (len(one.received), len(two.received)) == (0, 4)


def test_usage_of_messages_counts_what_was_read_and_what_was_cached() -> None:
    usage = parse_usage(
        b'"usage":{"input_tokens":11,"output_tokens":6,"cache_creation_input_tokens":32,'
        b'"cache_read_input_tokens":128}'
    )
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (171, 128)
