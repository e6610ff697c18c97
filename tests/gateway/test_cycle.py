"""A request's bytes in and its answer's out, without sockets: how many writes, what is waited for."""

import asyncio
import logging
import weakref
from collections.abc import Iterable
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.asgi import BODY_FOLLOWS, CLIENT
from gateway.cycle import Cycle
from gateway.errors import PayloadTooLarge, RequestTimeout


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.closed = False

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
    wire, log = Wire(), logging.getLogger()
    cycle = Cycle(
        scope={"type": "http", "method": method, "http_version": version},
        transport=wire,
        flow=FlowControl(wire),
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[(b"date", b"now")],
        message_event=asyncio.Event(),
        expect_100_continue=asks_first,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )
    return cycle, wire


def start(*headers: tuple[bytes, bytes], status: int = 200, follows: bool = True) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers, BODY_FOLLOWS: follows}


def piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


LENGTH = (b"content-length", b"2")


async def test_the_head_of_an_answer_goes_out_with_its_first_piece() -> None:
    cycle, wire = made()
    await cycle.send(start(LENGTH))
    assert wire.writes == []
    await cycle.send(piece(b"{}"))
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-length: 2\r\n\r\n{}"]
    assert cycle.response_complete


async def test_nothing_of_an_answered_request_waits_for_the_garbage_collector() -> None:
    cycle, _ = made()
    scope: dict[str, Any] = cast(dict[str, Any], cycle.scope)
    scope["extensions"] = {CLIENT: cycle}
    await cycle.send(start(LENGTH))
    await cycle.send(piece(b"{}"))
    there = weakref.ref(cycle)
    del cycle, scope
    assert there() is None


@pytest.mark.parametrize("size", [3, 1 << 20])
async def test_pieces_without_a_length_are_framed_and_the_head_of_a_stream_goes_out_alone(size: int) -> None:
    cycle, wire = made(keep_alive=False)
    await cycle.send(start(follows=False))
    head = b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert wire.writes == [head]
    body = b"x" * size
    cycle.write(body)
    assert wire.writes[1:] == [b"%x\r\n%b\r\n" % (size, body)]
    await cycle.send(piece(body))
    assert wire.writes[2:] == [b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)]
    assert wire.closed


async def test_b028_a_client_older_than_chunks_gets_none() -> None:
    cycle, wire = made(keep_alive=False, version="1.0")
    await cycle.send(start(follows=False))
    cycle.write(b"{")
    assert not wire.closed
    await cycle.send(piece(b"}"))
    assert b"".join(wire.writes) == b"HTTP/1.1 200 OK\r\ndate: now\r\nconnection: close\r\n\r\n{}"
    assert wire.closed


async def test_an_answer_to_head_has_its_length_and_no_body() -> None:
    cycle, wire = made("HEAD")
    await cycle.send(start(LENGTH))
    await cycle.send(piece(b"{}"))
    assert b"".join(wire.writes).endswith(b"content-length: 2\r\n\r\n")


@pytest.mark.parametrize("value", [b"a\r\nx: b", b"a\nx: b", b"a\rb", b"a\0b"])
async def test_a_value_does_not_break_out_of_its_line(value: bytes) -> None:
    cycle, wire = made()
    with pytest.raises(RuntimeError):
        await cycle.send(start((b"x-a", value)))
    assert wire.writes == []


@pytest.mark.parametrize("body", [b"{", b"{}}"])
async def test_a_body_of_another_length_than_its_head_says_is_a_fault(body: bytes) -> None:
    cycle, _ = made()
    await cycle.send(start(LENGTH))
    with pytest.raises(RuntimeError):
        await cycle.send(piece(body))
    assert not cycle.response_complete


async def test_nothing_is_written_for_a_client_that_left() -> None:
    cycle, wire = made()
    left: list[bool] = []
    cycle.on_gone(lambda: left.append(True))
    await cycle.send(start(follows=False))
    cycle.gone()
    cycle.write(b"late")
    await cycle.send(piece(b"later"))
    assert len(wire.writes) == 1
    assert left == [True]


async def test_a_whole_body_is_waited_for_once_and_read_without_a_pause() -> None:
    cycle, wire = made()
    body = asyncio.create_task(cycle.whole_body(1 << 20, 5.0))
    await asyncio.sleep(0)
    for _ in range(4):
        assert not cycle.took(b"x" * (200 << 10))
    assert not cycle.message_event.is_set()
    assert wire.reading
    cycle.more_body = False
    cycle.message_event.set()
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
