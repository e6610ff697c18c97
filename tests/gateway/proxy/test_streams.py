"""Answers on their way back: streams as they come, and as what they end."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from peer import Connection, Received

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def body(**more: Any) -> bytes:
    return json.dumps({**CHAT, **more}).encode()


async def stream_three(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    for i in range(3):
        await connection.chunk(b'data: {"i":%d}\n\n' % i)
    await connection.chunk(b"data: [DONE]\n\n")
    await connection.end_stream()


async def test_b033_chunks_come_as_the_worker_sends_them_and_headers_before_the_first(
    peers, front, tmp_path: Path
) -> None:
    go = asyncio.Event()

    async def paced(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        for i in range(3):
            await go.wait()
            go.clear()
            await connection.chunk(b": hb\r\n\r\ndata:{%d}\n\n" % i)
        await go.wait()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    keys = tmp_path / "keys"
    keys.write_text("k\n")
    gate = await front(await peers(paced), env={"MOONGATE_AUTH__API_KEYS_FILE": str(keys)})
    headers = {"accept-encoding": "gzip, br, zstd", "authorization": "Bearer k"}
    async with gate.client.post(
        f"{gate.url}/v1/chat/completions", data=body(stream=True), headers=headers
    ) as answer:
        assert answer.status == 200
        assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
        for i in range(3):
            go.set()
            assert await answer.content.readany() == b": hb\r\n\r\ndata:{%d}\n\n" % i
        go.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"
    await gate.idle()


async def test_b038_a_reset_before_any_byte_is_tried_again_and_after_output_never(peers, front) -> None:
    async def reset_at_once(_: Received, connection: Connection) -> None:
        connection.reset()

    async def reset_after_output(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b'data: {"i":0}\n\n')
        connection.reset()

    early, good = await peers(reset_at_once), await peers(stream_three)
    gate = await front(early, good)
    for _ in range(6):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(stream=True)) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    assert len(good.received) == 6

    late = [await peers(reset_after_output) for _ in range(2)]
    gate = await front(*late)  # there is another one that could take it
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(stream=True)) as answer:
        got = await answer.read()
    assert sum(len(peer.received) for peer in late) == 1
    assert_broken_stream(got, b'data: {"i":0}\n\n')
    await gate.idle()


def assert_broken_stream(got: bytes, before: bytes) -> None:
    assert got.startswith(before)
    events = [event for event in got[len(before) :].split(b"\n\n") if event]
    assert len(events) == 1
    error = json.loads(events[0].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert b"[DONE]" not in got


@pytest.mark.parametrize("sent", [b'data: {"i":0}\n\n', b'data: {"i"', b""])
async def test_b007_a_stream_that_ends_without_its_terminator_does_not_look_complete(
    peers, front, sent: bytes
) -> None:
    async def stop_short(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        if sent:
            await connection.chunk(sent)
        await connection.end_stream()

    gate = await front(await peers(stop_short))
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body(stream=True)) as answer:
        assert_broken_stream(await answer.read(), sent)
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert 'moongate_requests_total{api="chat",model="m",outcome="error"} 1.0' in await page.text()


ENDS = {
    "/v1/chat/completions": [
        b'data: {"choices":[{"delta":{"reasoning":"r","content":null}}]}\n\n',
        b"data: [DONE]\n\n",
    ],
    "/v1/responses": [
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
        b'"response":{"id":"resp_1"}}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","sequence_number":1}\n\n',
    ],
    "/v1/messages": [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m1"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
}


STREAM = (
    b'{"model":"m","stream":true,"max_tokens":1,"input":"hi","messages":[{"role":"user","content":"hi"}]}'
)


@pytest.mark.parametrize("path", ENDS)
async def test_b088_every_apis_own_end_is_a_good_one_and_nothing_is_added_to_it(
    peers, front, path: str
) -> None:
    async def whole(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        for event in ENDS[path]:
            await connection.chunk(event)
        await connection.end_stream()

    gate = await front(await peers(whole))
    async with gate.client.post(gate.url + path, data=STREAM) as answer:
        assert await answer.read() == b"".join(ENDS[path])
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert 'model="m",outcome="ok"} 1.0' in await page.text()


DELTAS = [
    '{"reasoning":"hm"}',
    '{"reasoning_content":"hm"}',
    '{"content":null,"tool_calls":[{"index":1,"function":{"arguments":"{"}}]}',
    '{"tool_calls":[{"id":"c","type":"function","function":{"name":"f"}}]}',
    '{"tool_calls":[{"index":0,"function":{"arguments":"\\u007b\\ud83d"}}]}',
    '{"content":null,"new_in_the_next_vllm":[1.0,1e3]}',
    '{},"finish_reason":"tool_calls"',
]


async def test_b092_deltas_of_every_kind_pass_as_they_are_and_so_does_a_history_with_them(
    peers, front
) -> None:
    events = [f'data: {{"choices":[{{"index":0,"delta":{delta}}}]}}\n\n'.encode() for delta in DELTAS]

    async def speak(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        for event in events:
            await connection.chunk(event)
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    peer = await peers(speak)
    gate = await front(peer)
    said = '{"role":"assistant","content":null,"reasoning":"hm","tool_calls":[{"id":"c","function":{}}]}'
    sent = f'{{"model":"m","stream":true,"messages":[{{"role":"user","content":[]}},{said}]}}'.encode()
    async with gate.client.post(f"{gate.url}/v1/chat/completions", data=sent) as answer:
        assert (answer.status, await answer.read()) == (200, b"".join(events) + b"data: [DONE]\n\n")
    assert peer.received[0].body == sent


@pytest.mark.parametrize("how", ["reset", "clean"])
@pytest.mark.parametrize("path", ENDS)
async def test_b007_a_stream_cut_after_its_first_event_ends_with_its_apis_error_event(
    peers, front, path: str, how: str
) -> None:
    async def cut(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(ENDS[path][0])
        await (connection.end_stream() if how == "clean" else asyncio.sleep(0.05))
        connection.reset()

    gate = await front(await peers(cut))
    async with gate.client.post(gate.url + path, data=STREAM) as answer:
        got = (await answer.read()).removeprefix(ENDS[path][0])
    name, _, data = got.rpartition(b"data: ")
    event = json.loads(data)
    if path == "/v1/chat/completions":
        assert (name, event["error"]["code"]) == (b"", "upstream_failed")
    elif path == "/v1/messages":
        assert (name, event["type"], event["error"]["type"]) == (b"event: error\n", "error", "api_error")
    else:
        assert (name, event["type"]) == (b"event: response.failed\n", "response.failed")
        assert (event["sequence_number"], event["response"]["id"]) == (1, "resp_1")
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"]["code"] == "upstream_failed"
    async with gate.client.get(f"{gate.url}/metrics") as page:
        assert 'model="m",outcome="error"} 1.0' in await page.text()


async def test_a_json_answer_that_breaks_off_closes_the_connection(peers, front) -> None:
    async def half(_: Received, connection: Connection) -> None:
        await connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        connection.reset()

    gate = await front(await peers(half))
    with pytest.raises(Exception, match=r"(?i)payload|disconnected"):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", data=body()) as answer:
            await answer.read()
    await gate.idle()


async def test_b029_a_compressed_stream_ends_as_its_framing_says(peers, front) -> None:
    async def packed(_: Received, connection: Connection) -> None:
        await connection.start_stream("text/event-stream\r\ncontent-encoding: gzip")
        await connection.chunk(gzip.compress(b"data: [DONE]\n\n"))
        await connection.end_stream()

    peer = await peers(packed)
    gate = await front(peer)
    for _ in range(3):
        async with gate.client.post(
            f"{gate.url}/v1/chat/completions", data=body(stream=True), headers={"accept-encoding": "gzip"}
        ) as answer:
            assert gzip.decompress(await answer.read()) == b"data: [DONE]\n\n"
    (worker,) = gate.gateway.fleet.workers()
    assert worker.breaker.failures == 0
    assert all(record.outcome.kind == "ok" for record in gate.gateway.decisions.recent(3))


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "x-length: unknown", "content-length: 99"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_b028_an_answer_that_a_worker_breaks_off_looks_whole_to_no_client(
    peers, front, framing: str, version: str
) -> None:
    async def dies(_: Received, connection: Connection) -> None:
        await connection.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode()
        )
        await connection.send(b"4\r\nhalf\r\n" if "chunked" in framing else b"half")
        await sent.wait()
        connection.reset()

    sent = asyncio.Event()
    gate = await front(await peers(dies))
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    head = f"POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\ncontent-length: {len(body())}\r\n\r\n"
    writer.write(head.encode() + body())
    answer = await reader.readuntil(b"half")
    sent.set()
    if b"content-length" in answer or b"chunked" in answer:
        # The client misses the rest, or the last chunk.
        assert await reader.read() in (b"", b"\r\n")
    else:
        with pytest.raises(ConnectionResetError):
            await reader.read()
    writer.close()
    await gate.idle()
