"""What clients do on a connection besides sending one good request and waiting: slow, odd, early, gone."""

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from peer import Connection, Received

PATH = "/v1/chat/completions"
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


def post(*lines: str, body: bytes = CHAT, framing: str = "") -> bytes:
    head = [f"POST {PATH} HTTP/1.1", "host: x", framing or f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + (b"" if framing else body)


async def say_length(request: Received, connection: Connection) -> None:
    await connection.answer(200, b"%d" % len(request.body), "content-type: application/json")


async def hold(_: Received, connection: Connection) -> None:
    await connection.gone.wait()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)).decode().split("\r\n")
        lines = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        content = await self.reader.readexactly(int(lines.get("content-length", "0")))
        return int(head[0].split()[1]), lines, content

    async def closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(), 30) == b""


@pytest.fixture
async def connect(peers, front):
    """A gateway in front of `handler`, and connections to it: `gate, peer, open = await connect(handler)`."""
    clients: list[Client] = []

    async def start(handler=say_length, env=None):
        peer = await peers(handler)
        gate = await front(peer, env=env)

        async def opened() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", gate.port)))
            return clients[-1]

        return gate, peer, opened

    yield start
    for client in clients:
        client.writer.close()


H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")


async def test_an_offer_of_http2_is_passed_over_and_the_body_is_not_lost(connect) -> None:
    _, peer, opened = await connect()
    client = await opened()
    for _ in range(2):  # Java's client offers it on every request
        client.writer.write(post(*H2C))
        status, _, content = await client.answer()
        assert (status, content) == (200, b"%d" % len(CHAT))
    client.writer.write(post(*H2C, framing="transfer-encoding: chunked"))
    await asyncio.sleep(0)
    client.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT))
    assert (await client.answer())[0] == 200
    client.writer.write(post())
    assert (await client.answer())[0] == 200
    assert [received.body for received in peer.received] == [CHAT] * 4
    for received in peer.received:
        assert not {name.lower() for name, _ in received.headers} & {
            "upgrade",
            "http2-settings",
            "connection",
        }


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (
            b"GET /v1/responses HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            426,  # upon which Codex goes on by HTTP: after a 400 it gives up
            "WebSockets",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP/2"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "TLS"),
        (b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n\r\n", 405, "forward proxy"),
        (post(framing="transfer-encoding: chunked") + b"nonsense\r\n", 400, "not valid HTTP"),
        (post("content-length: 1", framing="transfer-encoding: chunked"), 400, "not valid HTTP"),
        (post(framing="transfer-encoding: gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n", 400, "not valid HTTP"),
    ],
)
async def test_b085_what_is_not_spoken_here_is_said_clearly(
    connect, sent: bytes, status: int, said: str
) -> None:
    _, peer, opened = await connect()
    client = await opened()
    client.writer.write(sent)
    found, lines, content = await client.answer()
    assert (found, lines["content-type"], lines["connection"]) == (status, "application/json", "close")
    assert said in json.loads(content)["error"]["message"]
    assert await client.closed()
    assert peer.received == []


async def test_what_is_no_http_behind_a_request_cuts_its_answer_instead_of_being_written_into_it(
    connect,
) -> None:
    async def begin(_: Received, connection: Connection) -> None:
        await connection.start_stream()
        await connection.chunk(b"data: 1\n\n")
        await connection.gone.wait()

    gate, peer, opened = await connect(begin)
    client = await opened()
    client.writer.write(post())
    await client.reader.readuntil(b"data: 1\n\n\r\n")
    client.writer.write(b"nonsense\r\n\r\n")
    assert await client.closed()
    await gate.until(lambda: not peer.open)
    await gate.idle()


@pytest.mark.parametrize(
    "behind",
    [
        b"nonsense\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/realtime HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n\r\n",
    ],
)
async def test_what_is_refused_is_not_said_to_the_request_before_it(connect, behind: bytes) -> None:
    gate, peer, opened = await connect(hold)
    client = await opened()
    client.writer.write(post())
    await gate.until(lambda: len(peer.open) == 1)
    client.writer.write(behind)
    assert await client.closed()
    await gate.idle()


async def test_an_offer_of_http2_is_passed_over_behind_a_request_that_waits(connect) -> None:
    _, peer, opened = await connect()
    client = await opened()
    client.writer.write(post() + post(*H2C) + post())
    for _ in range(3):
        assert (await client.answer())[0] == 200
    assert [received.body for received in peer.received] == [CHAT] * 3


async def test_a_head_that_does_not_come_is_a_408(connect) -> None:
    _, peer, opened = await connect(env={"MOONGATE_TIMEOUTS__HEAD_S": "1"})
    for first in (b"", post()):  # the first request of a connection, and a later one
        client = await opened()
        if first:
            client.writer.write(first)
            assert (await client.answer())[0] == 200
        for byte in b"POST ":  # a client that sends a byte now and then gets no further
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        status, _, content = await client.answer()
        assert (status, json.loads(content)["error"]["code"]) == (408, "request_timeout")
        assert await client.closed()
    assert len(peer.received) == 1


async def test_a_head_without_end_is_a_431(connect) -> None:
    _, peer, opened = await connect()
    client = await opened()
    client.writer.write(f"POST {PATH} HTTP/1.1\r\n".encode())
    for _ in range(17):
        await asyncio.sleep(0.01)  # what comes with the first bytes is not counted
        client.writer.write(b"x: " + b"y" * 4000 + b"\r\n")
    status, _, content = await client.answer()
    assert (status, json.loads(content)["error"]["code"]) == (431, "request_head_too_large")
    assert peer.received == []


async def test_a_large_body_before_the_next_head_is_not_counted_as_its_bytes(connect) -> None:
    _, _, opened = await connect()
    client = await opened()
    large = CHAT[:-1] + b',"x":"' + b"y" * (3 << 20) + b'"}'
    one, other = post(body=large), post()
    client.writer.write(one + other[:50])
    assert (await client.answer())[2] == b"%d" % len(large)
    client.writer.write(other[50:])
    assert (await client.answer())[2] == b"%d" % len(CHAT)


async def test_requests_sent_ahead_are_answered_in_their_order(connect) -> None:
    _, peer, opened = await connect()
    client = await opened()
    bodies = [CHAT[:-1] + b" " * i + b"}" for i in range(40)]
    client.writer.write(b"".join(post(body=body) for body in bodies))
    for body in bodies:
        assert (await client.answer())[2] == b"%d" % len(body)
    assert [received.body for received in peer.received] == bodies


async def test_b004_a_client_that_leaves_with_requests_sent_ahead_is_noticed(connect) -> None:
    gate, peer, opened = await connect(hold)
    client = await opened()
    client.writer.write(post())
    await gate.until(lambda: len(peer.open) == 1)
    client.writer.write(post() + post())
    await asyncio.sleep(0.05)  # they are read while the first one waits
    client.writer.transport.abort()
    await gate.until(lambda: not peer.open)
    await gate.idle()
    assert len(peer.received) == 1  # nobody waits for the others


@pytest.mark.parametrize("ahead", [post(body=b"x" * (4 << 20))[:-1], b"GET /health HTTP/1.1\r\n\r\n" * 60])
async def test_b004_a_client_that_leaves_with_much_sent_ahead_is_noticed(connect, ahead: bytes) -> None:
    gate, peer, opened = await connect(hold)
    client = await opened()
    client.writer.write(post())
    await gate.until(lambda: len(peer.open) == 1)
    for start in range(0, len(ahead), size := len(ahead) // 30 + 1):  # each is read by itself
        client.writer.write(ahead[start : start + size])
        await client.writer.drain()
        await asyncio.sleep(0)
    client.writer.write_eof()
    await gate.until(lambda: not peer.open)
    await gate.idle()


async def test_b002_a_client_that_leaves_after_a_body_whose_end_came_at_once_is_noticed(connect) -> None:
    gate, peer, opened = await connect(hold)
    client = await opened()
    whole = post(body=CHAT[:-1] + b',"x":"' + b"y" * 200_000 + b'"}')
    client.writer.write(whole[:200])
    await asyncio.sleep(0.05)  # its reader waits
    client.writer.write(whole[200:])
    await gate.until(lambda: len(peer.open) == 1)
    client.writer.write_eof()
    await gate.until(lambda: not peer.open)
    await gate.idle()


@pytest.mark.parametrize("ahead", [post(body=b"x" * 100_001), b"GET /health HTTP/1.1\r\n\r\n" * 1025])
async def test_a_client_that_sends_more_ahead_than_is_kept_is_cut_off(connect, ahead: bytes) -> None:
    gate, peer, opened = await connect(hold, env={"MOONGATE_LIMITS__MAX_BODY_BYTES": "100000"})
    client = await opened()
    client.writer.write(post())
    await gate.until(lambda: len(peer.open) == 1)
    client.writer.write(ahead)
    assert await client.closed()
    await gate.until(lambda: not peer.open)
    await gate.idle()


async def test_as_much_as_is_kept_may_be_sent_ahead(connect) -> None:
    gate, peer, opened = await connect(env={"MOONGATE_LIMITS__MAX_BODY_BYTES": "400000"})
    client = await opened()
    for _ in range(3):
        large = CHAT[:-1] + b',"x":"' + b"y" * 390_000 + b'"}'
        client.writer.write(post() + post(body=large))
        assert (await client.answer())[2] == b"%d" % len(CHAT)
        assert (await client.answer())[2] == b"%d" % len(large)
    assert len(peer.received) == 6
    await gate.idle()


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked_only_if_it_is_wanted(connect) -> None:
    _, peer, opened = await connect(env={"MOONGATE_LIMITS__MAX_BODY_BYTES": "100"})
    client = await opened()
    wanted = post("expect: 100-continue")
    client.writer.write(wanted[: -len(CHAT)])
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(CHAT)
    assert (await client.answer())[0] == 200
    assert peer.received[0].header("expect") == []
    # RFC 9110 10.1.1: a client that old does not know what an interim answer is.
    older = await opened()
    older.writer.write(wanted.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (await older.answer())[0] == 200
    client.writer.write(post("expect: 100-continue", framing="content-length: 101"))
    assert (await client.answer())[0] == 413


async def test_trailers_are_no_headers_and_end_at_this_hop(connect) -> None:
    async def with_trailers(request: Received, connection: Connection) -> None:
        await connection.send(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-t: theirs\r\n\r\n"
        )

    gate, peer, opened = await connect(with_trailers)
    client = await opened()
    for _ in range(2):  # the connection to the worker is good for another request
        client.writer.write(post("trailer: x-t, authorization", framing="transfer-encoding: chunked"))
        client.writer.write(
            b"%x\r\n%b\r\n0\r\nx-t: ours\r\nauthorization: Bearer x\r\n\r\n" % (len(CHAT), CHAT)
        )
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"x-t" not in head
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"2\r\n{}\r\n0\r\n\r\n"
    for received in peer.received:
        assert received.body == CHAT
        assert received.header("x-t") == received.header("authorization") == received.header("trailer") == []
    await gate.idle()


@pytest.mark.parametrize("more", [b"x-t: " + b"y" * 1000 + b"\r\n", b"y" * 1000, b"y: z\r\n"])
@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\n", b"2;"])
async def test_b098_trailers_and_chunk_extensions_without_end_are_cut_off(connect, begin, more) -> None:
    if begin == b"2;":
        more = more.replace(b"\r\n", b"").replace(b": ", b"")
    elif b":" not in more:
        begin += b"x-t: "
    gate, peer, opened = await connect()
    client = await opened()
    client.writer.write(post(framing="transfer-encoding: chunked") + begin)

    async def go_on() -> None:
        for _ in range(64):
            client.writer.write(more * ((1 << 20) // len(more)))
            await client.writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(go_on(), 20)
    assert peer.received == []
    await gate.idle()


BEHIND = {
    "a line break": (b"", b"\r\n"),
    "a line break behind an answer": (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n"),
    "a piece of a body nobody wants": (b"PUT /no HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", b"x"),
    "all of one": (b"PUT /no HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("case", BEHIND)
async def test_b035_what_begins_no_request_keeps_no_connection_open(peers, front, case: str) -> None:
    gate = await front(await peers(say_length), keep_alive_s=1)
    first, later = BEHIND[case]
    reader, writer = await asyncio.open_connection("127.0.0.1", gate.port)
    writer.write(first)
    if first:
        await reader.readuntil(b"}}" if b"/no " in first else b"}")
    writer.write(later)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_turn_longer_than_an_idle_connection_may_be_ends_well(peers, front) -> None:
    """Whether its request came whole, or its head in two pieces with the end of another answer between."""
    answering, go = asyncio.Event(), asyncio.Event()

    async def slow(request: Received, connection: Connection) -> None:
        answering.set()
        await (asyncio.sleep(1.5) if go.is_set() else go.wait())
        await connection.answer(200, b"{}")

    gate = await front(await peers(slow), keep_alive_s=1)
    client = Client(*await asyncio.open_connection("127.0.0.1", gate.port))
    client.writer.write(post() + post()[:20])
    await answering.wait()
    go.set()
    assert (await client.answer())[0] == 200
    client.writer.write(post()[20:])
    assert (await client.answer())[0] == 200
    client.writer.write(post())
    assert (await client.answer())[0] == 200
    client.writer.close()


async def test_b098_an_answer_that_is_cut_and_nobody_reads_is_given_up(peers, front) -> None:
    async def large(_: Received, connection: Connection) -> None:
        await connection.answer(200, b"x" * (8 << 20))

    gate = await front(await peers(large), keep_alive_s=1, env={"MOONGATE_TIMEOUTS__TOTAL_S": "0.5"})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gate.port))
        await loop.sock_sendall(client, post())

        async def wait() -> None:
            while client.send(b"\r\n"):
                await asyncio.sleep(0.05)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(wait(), 30)


@pytest.mark.parametrize("line", [(), ("connection: close",)])
async def test_b098_an_answer_whose_end_nobody_reads_is_given_up(peers, front, line) -> None:
    async def large(_: Received, connection: Connection) -> None:
        await connection.answer(200, b"x" * (8 << 20))

    peer = await peers(large)
    gate = await front(peer, keep_alive_s=1)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gate.port))
        await loop.sock_sendall(client, post(*line))
        # As much as makes the gateway write the end of it, which it keeps then.
        while gate.gateway.ledger.total.inflight or not peer.received:
            with suppress(BlockingIOError):
                client.recv(1 << 14)
            await asyncio.sleep(0)

        async def wait() -> None:
            while client.send(b"\r\n"):
                await asyncio.sleep(0.05)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(wait(), 30)
