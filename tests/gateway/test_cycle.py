"""A request's bytes in and its answer's out, without sockets: how many writes, what is waited for."""

import asyncio
import socket
import weakref
from collections.abc import Iterable
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.asgi import CLIENT, Receive, Scope, Send
from gateway.cycle import Cycle
from gateway.errors import NoWorker, PayloadTooLarge, RequestTimeout


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.closed = False
        self.aborted = 0
        self.sock: socket.socket | None = None

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self.sock if name == "socket" else default

    def abort(self) -> None:
        self.aborted += 1
        if self.sock is not None:
            self.sock.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def made(
    method: str = "POST", *, keep_alive: bool = True, asks_first: bool = False, version: str = "1.1"
) -> tuple[Cycle, Wire]:
    wire = Wire()
    cycle = Cycle(
        {"type": "http", "method": method, "path": "/", "http_version": version},
        {},
        wire,
        FlowControl(wire),
        [(b"date", b"now")],
        lambda: None,
        keep_alive,
        asks_first,
    )
    return cycle, wire


LENGTH = (b"content-length", b"2")


async def test_the_head_of_an_answer_goes_out_with_its_first_piece() -> None:
    cycle, wire = made()
    cycle.start(200, [LENGTH], alone=False)
    assert wire.writes == []
    cycle.write(b"{}", more=False)
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 2\r\n\r\n{}"]
    assert cycle.response_complete


async def test_an_answer_in_asgis_messages() -> None:
    cycle, wire = made()
    await cycle.send({"type": "http.response.start", "status": 404, "headers": [LENGTH]})
    await cycle.send({"type": "http.response.body", "body": b"{", "more_body": True})
    assert wire.writes[1:] == [b"{"]
    await cycle.send({"type": "http.response.body", "body": b"}"})
    head = b"HTTP/1.1 404 Not Found\r\ndate: now\r\ncontent-length: 2\r\n\r\n"
    assert wire.writes == [head, b"{", b"}"]
    assert cycle.response_complete


async def test_b085_what_the_app_did_not_expect_is_answered_in_the_apis_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(*_: object, says: str = "a secret") -> None:
        raise ZeroDivisionError(says)

    cycle, wire = made()
    cycle.scope["path"] = "/v1/messages"
    await cycle.run(fails, set())
    assert wire.writes[0].startswith(b"HTTP/1.1 500 ")
    assert b'{"type":"error","error":{' in wire.writes[0]
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text + wire.writes[0].decode()
    assert cycle.response_complete
    assert not wire.closed


async def test_nothing_of_an_answered_request_waits_for_the_garbage_collector() -> None:
    cycle, _ = made()
    scope: dict[str, Any] = cast(dict[str, Any], cycle.scope)
    scope["extensions"] = {CLIENT: cycle}
    cycle.start(200, [LENGTH])
    cycle.write(b"{}", more=False)
    there = weakref.ref(cycle)
    del cycle, scope
    assert there() is None


@pytest.mark.parametrize("size", [3, 1 << 20])
async def test_pieces_without_a_length_are_framed_and_the_head_of_a_stream_goes_out_alone(size: int) -> None:
    cycle, wire = made(keep_alive=False)
    cycle.start(200, [])
    head = b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert wire.writes == [head]
    body = b"x" * size
    cycle.write(body)
    assert wire.writes[1:] == [b"%x\r\n%b\r\n" % (size, body)]
    cycle.write(body, more=False)
    assert wire.writes[2:] == [b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)]
    assert wire.closed


async def test_b028_a_client_older_than_chunks_gets_none() -> None:
    cycle, wire = made(keep_alive=False, version="1.0")
    cycle.start(200, [])
    cycle.write(b"{")
    assert not wire.closed
    cycle.write(b"}", more=False)
    assert b"".join(wire.writes) == b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\n\r\n{}"
    assert wire.closed


async def test_an_answer_to_head_has_its_length_and_no_body() -> None:
    cycle, wire = made("HEAD")
    cycle.start(200, [LENGTH])
    cycle.write(b"{}", more=False)
    assert b"".join(wire.writes).endswith(b"content-length: 2\r\n\r\n")


@pytest.mark.parametrize("value", [b"a\r\nx: b", b"a\nx: b", b"a\rb", b"a\0b"])
async def test_a_value_does_not_break_out_of_its_line(value: bytes) -> None:
    cycle, wire = made()
    with pytest.raises(RuntimeError):
        cycle.start(200, [(b"x-a", value)])
    assert wire.writes == []


@pytest.mark.parametrize("body", [b"{", b"{}}"])
async def test_a_body_of_another_length_than_its_head_says_is_a_fault(body: bytes) -> None:
    cycle, _ = made()
    cycle.start(200, [LENGTH])
    with pytest.raises(RuntimeError):
        cycle.write(body, more=False)
    assert not cycle.response_complete


async def test_nothing_is_written_for_a_client_that_left() -> None:
    cycle, wire = made()
    left: list[bool] = []
    cycle.on_gone(lambda: left.append(True))
    cycle.start(200, [])
    cycle.gone()
    cycle.write(b"late")
    cycle.write(b"later", more=False)
    assert len(wire.writes) == 1
    assert left == [True]


async def test_a_connection_may_be_dropped_twice() -> None:
    async def gives_up(scope: Scope, *_: object) -> None:
        client: Cycle = scope["extensions"][CLIENT]
        client.start(200, [])
        client.abort()

    cycle, wire = made(keep_alive=False, version="1.0")
    cycle.scope["extensions"] = {CLIENT: cycle}
    wire.sock = socket.socket()
    await cycle.run(gives_up, set())
    assert wire.aborted == 2


async def test_a_whole_body_is_waited_for_once_and_read_without_a_pause() -> None:
    cycle, wire = made()
    body = asyncio.create_task(cycle.whole_body(1 << 20, 5.0))
    await asyncio.sleep(0)
    for _ in range(4):
        assert not cycle.took(b"x" * (200 << 10))
    await asyncio.sleep(0)
    assert wire.reading
    assert not body.done()
    cycle.took_all()
    assert await body == b"x" * (800 << 10)


async def test_who_takes_a_body_by_messages_decides_how_fast_it_comes() -> None:
    cycle, _ = made(asks_first=True)
    assert not cycle.took(b"x" * (64 << 10))
    assert cycle.took(b"x")
    message = await cycle.receive()
    assert (len(message["body"]), message["more_body"]) == ((64 << 10) + 1, True)


async def test_a_body_that_is_too_large_is_not_waited_for() -> None:
    cycle, _ = made()
    body = asyncio.create_task(cycle.whole_body(10, 0.0))
    await asyncio.sleep(0)
    assert cycle.took(b"x" * 11)
    with pytest.raises(PayloadTooLarge):
        await body


async def test_a_body_of_which_nothing_comes_is_given_up_but_not_one_that_comes_slowly() -> None:
    cycle, _ = made()
    body = asyncio.create_task(cycle.whole_body(0, 0.2))
    began = asyncio.get_running_loop().time()
    for _ in range(8):
        await asyncio.sleep(0.05)
        cycle.took(b"x")
    assert not body.done()
    with pytest.raises(RequestTimeout):
        await body
    assert asyncio.get_running_loop().time() - began >= 0.6


async def test_there_is_no_body_of_a_client_that_left() -> None:
    cycle, _ = made()
    body = asyncio.create_task(cycle.whole_body(0, 0.0))
    await asyncio.sleep(0)
    cycle.gone()
    assert await body is None


QUOTED = "SENTINEL2"


async def test_a_fault_before_a_response_is_answered_and_in_the_middle_of_one_cuts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def at_once(*_: object) -> None:
        raise RuntimeError(QUOTED)

    async def midway(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError(QUOTED)

    cycle, wire = made()
    await cycle.run(at_once, set())
    assert wire.writes[0].startswith(b"HTTP/1.1 500 ")
    assert b'"code":"internal_error"' in wire.writes[0]
    assert not wire.closed
    cycle, wire = made()
    await cycle.run(midway, set())
    assert b"".join(wire.writes).endswith(b"4\r\nhalf\r\n")
    assert wire.closed
    assert caplog.text.count("RuntimeError while answering POST") == 2
    assert QUOTED not in caplog.text + str(wire.writes)


async def test_an_api_error_that_nobody_answered_keeps_its_status_and_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(*_: object) -> None:
        raise NoWorker("no worker is up", retry_after_s=1)

    cycle, wire = made()
    cycle.scope["path"] = "/v1/messages"
    await cycle.run(app, set())
    assert wire.writes[0].startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in wire.writes[0]
    assert b'"overloaded_error"' in wire.writes[0]
    assert caplog.messages == []
