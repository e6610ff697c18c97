"""The client's leaving ends its turn at once, wherever that is, and leaves nothing behind."""

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from conftest import Front

from peer import Connection, Handler, Peer, Received
from tests.clock import unhindered

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
FORM = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
# (method, path, body) of every API.
TURNS = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "completions": ("POST", "/v1/completions", b'{"model":"m","prompt":"hi"}'),
    "responses": ("POST", "/v1/responses", b'{"model":"m","input":"hi"}'),
    "messages": ("POST", "/v1/messages?beta=true", CHAT[:-1] + b',"max_tokens":9}'),
    "embeddings": ("POST", "/v1/embeddings", b'{"model":"m","input":"hi"}'),
    "count_tokens": ("POST", "/v1/messages/count_tokens?beta=true", CHAT),
    "rerank": ("POST", "/v1/rerank", b'{"model":"m","query":"a","documents":["b"]}'),
    "score": ("POST", "/v1/score", b'{"model":"m","text_1":"a","text_2":"b"}'),
    "classify": ("POST", "/classify", b'{"model":"m","input":"hi"}'),
    "tokenize": ("POST", "/tokenize", b'{"model":"m","prompt":"hi"}'),
    "detokenize": ("POST", "/detokenize", b'{"model":"m","tokens":[1]}'),
    "audio": ("POST", "/v1/audio/transcriptions", FORM),
    "generate": ("POST", "/inference/v1/generate", b'{"model":"m","token_ids":[1]}'),
    "stored": ("GET", "/v1/responses/r1", b""),
}
PLACED_BY_PROMPT = ("chat", "completions", "responses", "messages")
METRICS = b'vllm:cache_config_info{block_size="32",prefix_caching_hash_algo="sha256_cbor"} 1.0\n'


def long_text(*of: object, numbers: int = 10_000) -> str:
    """A text like no other, that takes a thread a tenth of a second."""
    return " ".join(f"{of}{number * 7919 % 99991}" for number in range(numbers)).replace("'", "")


def request(api: str, text: str = "hi") -> bytes:
    method, path, body = TURNS[api]
    body = body.replace(b"hi", text.encode())
    kind = "multipart/form-data; boundary=b" if api == "audio" else "application/json"
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def before_headers(_: Received, connection: Connection) -> None:
    await connection.gone.wait()


async def mid_stream(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    while not connection.gone.is_set():
        await connection.chunk(b'event: x\ndata: {"i":0}\n\n')
        await asyncio.sleep(0.005)


async def silent_mid_stream(_: Received, connection: Connection) -> None:
    await connection.start_stream()
    await connection.chunk(b'event: x\ndata: {"i":0}\n\n')
    await connection.gone.wait()


async def mid_answer(_: Received, connection: Connection) -> None:
    await connection.send(
        b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"a":'
    )
    await connection.gone.wait()


def left(writer: asyncio.StreamWriter, how: int) -> None:
    """The three ways to go: half closed (told apart from closed by nothing), closed, reset."""
    if how % 3 == 0:
        writer.write_eof()
        return
    if how % 3 == 1:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def asking(gate: Front, *requests: bytes) -> AsyncIterator[list[asyncio.StreamWriter]]:
    writers: list[asyncio.StreamWriter] = []
    for sent in requests:
        writers.append((await asyncio.open_connection("127.0.0.1", gate.port))[1])
        writers[-1].write(sent)
    yield writers
    for writer in writers:
        writer.close()


async def quickest(gate: Front, sent: bytes, begun: Callable[[], bool], over: Callable[[], bool]) -> float:
    """Seconds from a client's leaving until its turn is over: of three clients, since machines are busy."""
    found: list[float] = []
    for how in range(3):
        async with asking(gate, sent) as writers:
            await gate.until(begun)
            at = unhindered()
            left(writers[0], how)
            await gate.until(over)
            found.append(unhindered() - at)
    await gate.idle()
    return min(found)


@pytest.mark.parametrize("phase", [before_headers, mid_stream, silent_mid_stream, mid_answer])
async def test_b002_b003_b004_the_upstream_is_closed_within_100_ms_in_every_phase_of_every_api(
    peers, front, phase: Handler
) -> None:
    peer = await peers(phase)
    gate = await front(peer)
    for api in TURNS:
        took = await quickest(gate, request(api), lambda: bool(peer.open), lambda: not peer.open)
        assert took < 0.1, api


async def test_b002_while_the_worker_tokenizes_its_prompt(peers, front) -> None:
    peer: Peer = await peers(before_headers)
    peer.pages["/metrics"] = METRICS
    gate = await front(peer, env={"MOONGATE_PROMPT__SOURCE": "remote"})
    for api in PLACED_BY_PROMPT:
        took = await quickest(gate, request(api), lambda: bool(peer.open), lambda: not peer.open)
        assert took < 0.1, api
    assert {received.target.rsplit("/", 1)[1] for received in peer.received} == {"render"}


def tokenizing() -> bool:
    """Whether a thread makes a prompt right now."""
    frames = sys._current_frames()
    busy = (frames.get(thread.ident or 0) for thread in threading.enumerate() if "prompt" in thread.name)
    return any(frame.f_code.co_name == "finish" for top in busy for frame, _ in traceback.walk_stack(top))


def turns() -> int:
    """Requests that the gateway's server has under way."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks())
    return sum(getattr(coroutine, "__name__", "") == "run_asgi" for coroutine in coroutines)


@pytest.fixture
async def tokenizing_front(peers, front, tiny_model: Path):
    """A gateway that makes prompts itself, in one thread, and its worker."""
    peer: Peer = await peers(before_headers)
    peer.renders = False
    card = {"id": "m", "root": str(tiny_model), "max_model_len": 1 << 20}
    peer.pages["/v1/models"] = json.dumps({"object": "list", "data": [card]}).encode()
    peer.pages["/metrics"] = METRICS
    gate: Front = await front(peer, env={"MOONGATE_PROMPT__THREADS": "1"})
    async with asking(gate, request("completions")):
        await gate.until(lambda: len(peer.received) == 1)  # the tokenizer is loaded
    await gate.until(lambda: not peer.open and not turns())
    peer.received.clear()
    return gate, peer


async def test_b002_while_a_thread_tokenizes_its_prompt(tokenizing_front) -> None:
    gate, peer = tokenizing_front
    for api in PLACED_BY_PROMPT:
        for how in range(3):  # the machine may be busy
            async with asking(gate, request(api, long_text(api, how))) as writers:
                await gate.until(tokenizing)
                at = unhindered()
                left(writers[0], how)
                await gate.until(lambda: not turns())
                took = unhindered() - at
            await gate.until(lambda: not tokenizing())
            if took < 0.1:
                break
        assert took < 0.1, api
    assert peer.received == []
    assert gate.gateway.ledger.total.inflight == 0


async def test_b005_three_hundred_aborts_while_prompts_are_tokenized_leave_nothing(tokenizing_front) -> None:
    gate, peer = tokenizing_front
    for batch in range(5):
        texts = [long_text(batch, number, numbers=6000) for number in range(60)]
        requests = [request(PLACED_BY_PROMPT[i % 4], text) for i, text in enumerate(texts)]
        async with asking(gate, *requests) as writers:
            await gate.until(tokenizing)
            for how, writer in enumerate(writers):
                left(writer, how)
            await gate.until(lambda: not turns())
        await gate.until(lambda: not tokenizing())
    await gate.until(lambda: not peer.open)
    assert len(peer.received) < 150  # most were left waiting for the thread
    assert gate.gateway.ledger.total.inflight == 0


async def test_b002_while_workers_are_asked_for_a_stored_response(peers, front) -> None:
    one, two = await peers(before_headers), await peers(before_headers)
    gate = await front(one, two)
    earlier = json.dumps({"model": "m", "input": "hi", "previous_response_id": "r1"}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(earlier)
    for sent in (request("stored"), head + earlier):
        took = await quickest(
            gate, sent, lambda: bool(one.open and two.open), lambda: not one.open and not two.open
        )
        assert took < 0.1
    assert {received.method for received in one.received + two.received} == {"GET"}


async def test_b002_on_the_second_worker_after_the_first_failed(peers, front) -> None:
    async def fail(_: Received, connection: Connection) -> None:
        await connection.answer(500, b"{}")

    bad, good = await peers(fail), await peers(before_headers)
    gate = await front(bad, good)
    for _ in range(2):
        took = await quickest(gate, request("chat"), lambda: bool(good.open), lambda: not good.open)
        assert took < 0.1


def connecting(port: int) -> int:
    """TCP connections of this machine to `port` that are not answered yet."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "02" and int(row[2].rsplit(":", 1)[1], 16) == port for row in rows)


async def test_b002_while_it_connects(peers, front) -> None:
    peer: Peer = await peers(before_headers)
    # After the first probe nobody looks again: the worker stays up while its port answers no more.
    gate = await front(
        peer, env={"MOONGATE_WORKERS__HEALTH_INTERVAL_S": "3600", "MOONGATE_TIMEOUTS__CONNECT_S": "30"}
    )
    await peer.stop()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", peer.port))
        listener.listen(0)
        for _ in range(2):  # a queue of one, and then the kernel drops what comes
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", peer.port))
        before = connecting(peer.port)
        for api in TURNS:
            took = await quickest(
                gate,
                request(api),
                lambda: connecting(peer.port) > before,
                lambda: gate.gateway.ledger.total.inflight == 0,
            )
            assert took < 0.1, api
            await gate.until(lambda: connecting(peer.port) == before)


async def test_b002_while_it_still_sends_its_body(peers, front) -> None:
    peer = await peers(before_headers)
    gate = await front(peer)
    tasks = len(asyncio.all_tasks())
    for api in TURNS.keys() - {"stored"}:
        took = await quickest(
            gate,
            request(api)[:-1],
            lambda: len(asyncio.all_tasks()) > tasks,
            lambda: len(asyncio.all_tasks()) <= tasks,
        )
        assert took < 0.1, api
    assert peer.received == []


@pytest.mark.parametrize(
    ("api", "last"),
    [
        ("chat", b"data: [DONE]\n\n"),
        ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ],
)
async def test_a_client_that_leaves_with_its_last_event_was_answered(
    peers, front, api: str, last: bytes
) -> None:
    async def all_but_its_end(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b'event: x\ndata: {"i":0}\n\n')
        await connection.chunk(last)
        await connection.gone.wait()

    gate = await front(await peers(all_but_its_end))
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(request(api))
    await reader.readuntil(last)
    writer.close()
    await gate.idle()
    async with gate.client.get(f"{gate.url}/metrics") as page:
        text = await page.text()
    outcomes = [line for line in text.splitlines() if line.startswith("moongate_requests_total{")]
    assert len(outcomes) == 1
    assert f'api="{api}"' in outcomes[0]
    assert 'outcome="ok"' in outcomes[0]


@pytest.mark.parametrize("phase", [before_headers, mid_stream, mid_answer])
async def test_b004_b005_b099_three_hundred_aborts_leave_no_lease_no_connection_and_no_task(
    peers, front, phase: Handler
) -> None:
    peer = await peers(phase)
    gate = await front(peer)
    async with gate.client.get(f"{gate.url}/health"):
        before = len(asyncio.all_tasks())
    apis = [api for api in TURNS if api != "stored"] * 10
    requests = [request(apis[i]) for i in range(60)]
    for _ in range(5):
        async with asking(gate, *requests) as writers:
            await gate.until(lambda: len(peer.open) == 60)
            assert gate.gateway.ledger.total.inflight == 60
            for how, writer in enumerate(writers):
                left(writer, how)
            await gate.until(lambda: not peer.open)
    await gate.idle()
    await gate.until(lambda: len(asyncio.all_tasks()) <= before)
    async with gate.client.get(f"{gate.url}/metrics") as page:
        text = await page.text()
    cancelled = [line for line in text.splitlines() if 'outcome="cancelled"' in line and "_total{" in line]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in cancelled) == 300
