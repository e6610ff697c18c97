"""The transport over real sockets, on both event loops: reuse, age, refusal, and what goes wrong."""

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from gateway.upstream.connections import Connections
from gateway.upstream.http1 import UpstreamError
from gateway.upstream.transport import Transport, UpstreamResponse
from workers.connecting import trusting

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Worker:
    """A listener that plays `script` on every connection; which one it is, from 1, the script is told."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._script(reader, writer, self.connections)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.gone.set()
            writer.close()


@asynccontextmanager
async def playing(script: Script) -> AsyncIterator[tuple[Worker, str]]:
    worker = Worker(script)
    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield worker, f"http://127.0.0.1:{port}"
    finally:
        server.close()


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    async with opened() as connections:
        yield connections


@asynccontextmanager
async def opened(**more: float) -> AsyncIterator[Connections]:
    connections = Connections(tls=trusting(), **{"connect_s": 5.0, "between_chunks_s": 5.0, **more})
    await connections.start()
    try:
        yield connections
    finally:
        await connections.close()


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
    """Answers every request, however many come on a connection."""
    while True:
        await request(reader)
        writer.write(OK)


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, rest = head.partition(b"content-length: ")
    return head + await reader.readexactly(int(rest.split(b"\r\n")[0]) if rest else 0)


async def post(transport: Transport, url: str, body: bytes = b"{}") -> UpstreamResponse:
    return await transport.open("POST", url, b"/v1/x?y", [(b"a", b"b")], body)


async def said(response: UpstreamResponse) -> tuple[int, bytes]:
    parts: list[bytes] = []
    while part := await response.read():
        parts.append(part)
    response.close()
    return response.status, b"".join(parts)


async def test_one_connection_carries_one_turn_after_another_and_two_at_once_take_two(transport) -> None:
    async with playing(answering) as (worker, url):
        for _ in range(3):
            assert await said(await post(transport, url)) == (200, b"ok")
        assert worker.connections == 1
        both = await asyncio.gather(post(transport, url), post(transport, url))
        assert [await said(response) for response in both] == [(200, b"ok")] * 2
        assert worker.connections == 2


async def test_the_request_is_on_the_wire_as_it_was_given(transport) -> None:
    seen: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        seen.append(await request(reader))
        writer.write(OK)

    async with playing(script) as (_, url):
        await said(
            await transport.open("POST", f"{url}/below/", b"/v1/x?y", [(b"a", b"1"), (b"a", b"2")], b"\0{}")
        )
        host = url.removeprefix("http://").encode()
        assert (
            seen[0]
            == b"POST /below/v1/x?y HTTP/1.1\r\nhost: %b\r\na: 1\r\na: 2\r\ncontent-length: 3\r\n\r\n\0{}"
            % host
        )


async def test_an_idle_connection_is_closed_before_the_worker_would(transport) -> None:
    closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        writer.write(OK)
        assert await reader.read() == b""
        closed.set()

    async with opened(keepalive_s=0.05) as quick, playing(script) as (_, url):
        await said(await post(quick, url))
        await asyncio.wait_for(closed.wait(), 30)


async def test_a_turn_that_meets_the_end_of_an_idle_connection_goes_out_once_more(transport) -> None:
    bodies: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(OK)
        if number == 1:
            # Too old just as the next one comes.
            bodies.append(await request(reader))
            return
        bodies.append(await request(reader))
        writer.write(OK)

    async with playing(script) as (worker, url):
        await said(await post(transport, url))
        assert await said(await post(transport, url, b"x" * 400_000)) == (200, b"ok")
        assert worker.connections == 2
        assert len(bodies) == 1


@pytest.mark.parametrize("first", [b"", b"H"])
async def test_a_new_connection_or_a_begun_answer_that_breaks_off_is_the_turns_to_decide(
    transport, first: bytes
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        if first:
            writer.write(OK)
            await request(reader)
        writer.write(first)

    async with playing(script) as (worker, url):
        if first:
            await said(await post(transport, url))
        with pytest.raises(UpstreamError) as raised:
            await post(transport, url)
        assert (raised.value.kind, worker.connections) == ("reset", 1)


async def test_two_old_connections_cost_one_new_one(transport) -> None:
    """However many idle connections are dead, a turn is sent twice at most."""
    requests = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        nonlocal requests
        requests += 1
        await request(reader)
        if number > 2:
            return
        writer.write(OK)
        await request(reader)
        requests += 1

    async with playing(script) as (worker, url):
        for response in await asyncio.gather(post(transport, url), post(transport, url)):
            await said(response)
        with pytest.raises(UpstreamError) as raised:
            await post(transport, url)
        assert (raised.value.kind, worker.connections, requests) == ("reset", 3, 4)


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_answer_to_half_a_request_is_an_answer(transport, leaves: bool) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(refusal)
        if not leaves:
            await asyncio.sleep(3600)

    async with playing(script) as (worker, url):
        assert await said(await post(transport, url, b"x" * (16 << 20))) == (413, b"no")
        again = asyncio.create_task(post(transport, url))
        while worker.connections == 1:
            await asyncio.sleep(0.005)
        again.cancel()


async def test_a_worker_that_is_not_there_is_told_from_one_that_does_not_answer(transport) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UpstreamError) as raised:
            await post(transport, f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert raised.value.kind == "connect"
        unused.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(unused.getsockname())
        async with opened(connect_s=0.1) as quick:
            with pytest.raises(UpstreamError) as raised:
                await post(quick, f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert raised.value.kind == "connect_timeout"
        for filler in fillers:
            filler.close()
    with pytest.raises(UpstreamError) as raised:
        await post(transport, "http://no-such-host.invalid:1")
    assert raised.value.kind == "connect"


async def test_descriptors_are_waited_for_as_long_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    connect, tries, missing = loop.create_connection, 0, 3

    async def scarce(*args: Any, **more: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= missing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await connect(*args, **more)

    monkeypatch.setattr(loop, "create_connection", scarce)
    async with playing(answering) as (_, url), opened(connect_s=20.0) as patient:
        assert await said(await post(patient, url)) == (200, b"ok")
        assert tries == missing + 1
    missing = 1 << 30
    async with opened(connect_s=0.1) as quick:
        with pytest.raises(UpstreamError) as raised:
            await post(quick, "http://127.0.0.1:9")
        assert raised.value.kind == "descriptors"


async def test_a_name_server_that_says_nothing_leaves_time_to_connect_and_none_is_spent_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name has an address, known from the first turn, at which nobody accepts."""
    loop = asyncio.get_running_loop()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        port = silent.getsockname()[1]
        lookups = 0

        async def once(*_: object, **__: object) -> list[object]:
            nonlocal lookups
            lookups += 1
            if lookups > 1:
                await asyncio.Event().wait()
            return [(0, 0, 0, "", ("127.0.0.1", port))]

        async with opened(connect_s=0.6) as quick:
            monkeypatch.setattr(loop, "getaddrinfo", once)
            took: list[float] = []
            for expected in (1, 2):
                began = loop.time()
                with pytest.raises(UpstreamError) as raised:
                    await post(quick, f"http://worker.test:{port}")
                assert (raised.value.kind, lookups) == ("connect_timeout", expected)
                took.append(loop.time() - began)
            # A busy machine makes both longer.
            assert took[1] < 1.5 * took[0]
        for filler in fillers:
            filler.close()


async def test_a_gateway_that_is_held_up_while_it_connects_blames_no_worker() -> None:
    loop = asyncio.get_running_loop()

    def hold_up(passes: int) -> None:
        time.sleep(0.1)
        if passes:
            loop.call_soon(hold_up, passes - 1)

    async with playing(answering) as (_, url), opened(connect_s=0.2) as quick:
        # The kernel connects at once; the loop hears of it some passes later.
        loop.call_soon(hold_up, 5)
        assert await said(await post(quick, url)) == (200, b"ok")


async def test_a_name_with_several_addresses_is_tried_at_all_of_them(transport, monkeypatch) -> None:
    async with playing(answering) as (worker, url):
        loop = asyncio.get_running_loop()
        port = int(url.rsplit(":", 1)[1])

        async def two(*_: object, **__: object) -> list[object]:
            return [(0, 0, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        if not isinstance(loop, uvloop.Loop):
            monkeypatch.setattr(loop, "getaddrinfo", two)
        assert await said(await post(transport, f"http://localhost:{port}")) == (200, b"ok")
        assert worker.connections == 1


async def test_of_several_addresses_the_one_that_worked_comes_first_from_then_on(
    transport, monkeypatch
) -> None:
    monkeypatch.setattr("gateway.upstream.connections._ADDRESSES_S", 0.0)
    loop, tried = asyncio.get_running_loop(), list[str]()
    connecting = loop.create_connection

    def watched(make: object, address: str, *rest: object, **more: object) -> object:
        tried.append(address)
        return connecting(make, address, *rest, **more)

    async def two(*_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    async with playing(answering) as (_, url):
        monkeypatch.setattr(loop, "getaddrinfo", two)
        monkeypatch.setattr(loop, "create_connection", watched)
        url = f"http://worker.example:{url.rsplit(':', 1)[1]}"
        held = await asyncio.gather(*(post(transport, url) for _ in range(2)))
        assert [await said(answer) for answer in held] == [(200, b"ok")] * 2
        more = await asyncio.gather(*(post(transport, url) for _ in range(4)))
        assert [await said(answer) for answer in more] == [(200, b"ok")] * 4
    # Two at once before anybody knew; of the four then two took the idle connections.
    assert sorted(tried[:4]) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    assert tried[4:] == ["127.0.0.1"] * 2


async def test_while_a_name_can_not_be_looked_up_its_last_addresses_hold(transport, monkeypatch) -> None:
    monkeypatch.setattr("gateway.upstream.connections._ADDRESSES_S", 0.0)
    async with playing(answering) as (_, url):
        port = int(url.rsplit(":", 1)[1])
        answers: list[list[object]] = [[(0, 0, 0, "", ("127.0.0.1", port))]]

        async def away(*_: object, **__: object) -> list[object]:
            if answers:
                return answers.pop()
            raise socket.gaierror(socket.EAI_AGAIN, "no name server")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", away)
        held = [await post(transport, f"http://worker.example:{port}") for _ in range(3)]
        assert [await said(answer) for answer in held] == [(200, b"ok")] * 3
        with pytest.raises(UpstreamError) as raised:
            await post(transport, f"http://another.example:{port}")
        assert raised.value.kind == "connect"


async def test_cancelled_turns_close_their_connections_at_once(transport) -> None:
    asked = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await request(reader)
        asked.set()
        await reader.read()

    async with playing(script) as (worker, url):
        turn = asyncio.create_task(post(transport, url))
        await asyncio.wait_for(asked.wait(), 30)
        turn.cancel()
        await asyncio.wait_for(worker.gone.wait(), 30)
        assert turn.cancelled()


async def test_a_reader_that_stops_stops_the_worker(transport) -> None:
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        nonlocal sent
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with playing(script) as (_, url):
        response = await post(transport, url)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        # What the kernel holds of it on both sides, and what is ours: one read beyond the limit.
        assert sent < 16 << 20
        assert len(await response.read()) <= (1 << 16) + (1 << 18)
        response.close()


async def test_a_reset_is_no_end_of_a_body_and_a_close_is_one(transport) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await writer.drain()
        await reader.readuntil(b"go")
        if number == 2:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async with playing(script) as (_, url):
        for number in (1, 2):
            response = await post(transport, url)
            assert await response.read() == b"abc"
            # The body's end comes only now.
            response._connection._transport.write(b"go")  # type: ignore[attr-defined]
            if number == 1:
                assert await response.read() == b""
            else:
                with pytest.raises(UpstreamError):
                    await response.read()


async def test_closing_leaves_no_connection(transport) -> None:
    async with playing(answering) as (worker, url):
        async with opened() as connections:
            await said(await post(connections, url))
            assert not worker.gone.is_set()
        await asyncio.wait_for(worker.gone.wait(), 30)
