"""Comments of the gateway's own in a stream that is silent."""

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from test_cycle import made

from gateway.api.usage import AnswerTail
from gateway.asgi import CLIENT
from gateway.proxy.exchange import Exchange
from gateway.proxy.keep_alive import keep_alive
from peer import Connection, Received

CHAT = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
PATH = "/v1/chat/completions"
OFTEN = {"MOONGATE_TIMEOUTS__KEEP_ALIVE_S": "0.02"}
COMMENT = b": keep-alive\n"


async def said(content: Any, end: bytes) -> bytes:
    """What comes until all but comments ends with `end`."""
    got = b""
    while not got.replace(COMMENT, b"").endswith(end) or (not end and not got):
        got += await asyncio.wait_for(content.readany(), 30)
    return got


async def silent(content: Any) -> bool:
    try:
        await asyncio.wait_for(content.readany(), 0.1)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
async def test_b031_comments_come_before_the_first_byte_and_between_events_and_never_within_one(
    peers, front, end: bytes
) -> None:
    go = asyncio.Event()
    pieces = [b'data: {"i":', b"0}" + end[:-1], end[-1:], b"data: [DONE]\n\n"]

    async def paced(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        for piece in pieces:
            await go.wait()
            go.clear()
            await connection.chunk(piece)
        await connection.end_stream()

    gate = await front(await peers(paced), env=OFTEN)
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert not (await said(answer.content, b"")).replace(COMMENT, b"")  # before a byte of the worker's
        for piece in pieces[:2]:  # within an event
            go.set()
            await said(answer.content, piece)
            assert await silent(answer.content)
        go.set()
        await said(answer.content, pieces[2])
        assert not (await said(answer.content, b"")).replace(COMMENT, b"")
        go.set()
        assert (await answer.content.read()).replace(COMMENT, b"") == pieces[3]
    await gate.idle()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "keep alive"] == []


@pytest.mark.parametrize("head", ["content-encoding: gzip", "content-length: 14"])
async def test_no_byte_of_ours_comes_into_what_is_compressed_or_has_a_length(peers, front, head: str) -> None:
    async def slow(_: Received, connection: Connection) -> None:
        framing = "" if "length" in head else "transfer-encoding: chunked\r\n"
        lines = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}{head}\r\n\r\n"
        await connection.send(lines.encode())
        await asyncio.sleep(0.1)
        if framing:
            await connection.chunk(b"data: [DONE]\n\n")
            await connection.end_stream()
        else:
            await connection.send(b"data: [DONE]\n\n")

    gate = await front(await peers(slow), env=OFTEN)
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert await answer.read() == b"data: [DONE]\n\n"


async def test_by_default_there_are_none(peers, front) -> None:
    async def slow(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await asyncio.sleep(0.2)
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    gate = await front(await peers(slow))
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        assert await answer.read() == b"data: [DONE]\n\n"


async def test_a_worker_that_fails_after_comments_is_still_replaced(peers, front) -> None:
    async def dies(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await asyncio.sleep(0.1)
        connection.reset()

    async def speaks(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    gate = await front(await peers(dies), await peers(speaks), env=OFTEN)
    for _ in range(2):
        async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
            assert (await answer.read()).replace(COMMENT, b"") == b"data: [DONE]\n\n"


async def test_a_stream_that_breaks_off_ends_with_its_error_and_no_comment_after_it(peers, front) -> None:
    async def dies(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b'data: {"i":0}\n\n')
        await asyncio.sleep(0.1)
        connection.reset()

    gate = await front(await peers(dies), env=OFTEN)
    async with gate.client.post(gate.url + PATH, data=CHAT) as answer:
        last = (await answer.read()).replace(COMMENT, b"").split(b"\n\n")[1]
    assert last.startswith(b'data: {"error":')


def chat_chunk(text: str) -> bytes:
    return (
        b'id: 7\ndata: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text.encode()
    )


MESSAGE = [
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"i","type":"message",'
    b'"role":"assistant","model":"m","content":[],"stop_reason":null,"stop_sequence":null,'
    b'"usage":{"input_tokens":1,"output_tokens":0}}}\n\n',
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"a"}}\n\n',
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
    b'"stop_sequence":null},"usage":{"output_tokens":1}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


async def test_b031_the_openai_and_anthropic_sdks_take_them(peers, front) -> None:
    async def slow(request: Received, connection: Connection) -> None:
        await connection.start_stream()
        chat = [chat_chunk("a"), chat_chunk("b"), b"data: [DONE]\n\n"]
        for event in chat if "chat" in request.target else MESSAGE:
            await asyncio.sleep(0.05)
            await connection.chunk(event)
        await connection.end_stream()

    gate = await front(await peers(slow), env=OFTEN)
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0) as client:
        ask: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model="m", messages=ask, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["a", "b"]
    async with (
        anthropic.AsyncAnthropic(base_url=gate.url, api_key="x", max_retries=0) as claude,
        claude.messages.stream(model="m", max_tokens=9, messages=ask) as events,
    ):
        assert [text async for text in events.text_stream] == ["a"]
        assert (await events.get_final_message()).stop_reason == "end_turn"


async def test_b031_none_waits_for_a_client_to_read_and_then_comes_within_an_event() -> None:
    cycle, wire = made()
    cycle.task = asyncio.current_task()
    exchange = Exchange({**cycle.scope, "path": PATH, "headers": [], "extensions": {CLIENT: cycle}})
    tail, pieces = AnswerTail(), [b"data: 1\n\n", b"data", b": 2\n\n"]
    exchange.start(200, [], alone=True)
    cycle.flow.pause_writing()

    async def forward() -> None:
        for piece in pieces[:2]:
            tail.feed(piece)
            await exchange.send(piece)

    forwarding = asyncio.create_task(forward())
    await asyncio.sleep(0)
    keeper = asyncio.create_task(keep_alive(exchange, tail, 0.01))
    # It had its chance, while the first piece waited to be read.
    await asyncio.sleep(0.05)
    cycle.flow.resume_writing()
    await forwarding
    await asyncio.sleep(0.05)
    tail.feed(pieces[2])
    await exchange.send(pieces[2])
    keeper.cancel()
    assert b"".join(wire.writes[1:]).replace(b"\r\n", b"").count(COMMENT) == 0
