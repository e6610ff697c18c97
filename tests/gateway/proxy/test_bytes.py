"""Bodies and answers are the same bytes on both sides, however they are cut, framed or encoded."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from conftest import QUICK, Front, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.settings import load
from peer import Connection, Peer, Received

KINDS = ("application/json", "text/event-stream; charset=utf-8", "application/octet-stream")
ENCODINGS = ("", "gzip", "br", "zstd")


class Rig:
    """A gateway in front of a worker that answers with `pieces` as they are, chunked or with a length."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.pieces: list[bytes] = []
        self.kind = KINDS[0]
        self.encoding = ""
        self.chunked = True

    async def __call__(self, _: Received, connection: Connection) -> None:
        whole = sum(map(len, self.pieces))
        framing = "transfer-encoding: chunked" if self.chunked else f"content-length: {whole}"
        lines = ["HTTP/1.1 200 OK", f"content-type: {self.kind}", framing]
        if self.encoding:
            lines.append(f"content-encoding: {self.encoding}")
        await connection.send("\r\n".join(lines).encode() + b"\r\n\r\n")
        for piece in self.pieces:
            await (connection.chunk(piece) if self.chunked else connection.send(piece))
            await asyncio.sleep(0)
        if self.chunked:
            await connection.end_stream()


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Rig, Peer, Front]]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> tuple[Rig, Peer, Front]:
            made = Rig(runner)
            peer = await Peer(made).start()
            stack.push_async_callback(peer.stop)
            flags: dict[str, Any] = {"workers.urls": [peer.url], "admin.token": "admin-token"}
            gate = await stack.enter_async_context(serving(load(None, QUICK, flags)))
            await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))
            return made, peer, gate

        yield runner.run(start())
        runner.run(stack.aclose())


# Cuts fall anywhere: within a character, an event, a line end.
PIECES = st.lists(
    st.binary(min_size=1, max_size=200)
    | st.sampled_from(
        [b"data:", b"data: ", b"\r\n", b"\n\n", b": ping\n\n", b"\xf0\x9f", b"\x98\x80", b"[DONE]"]
    )
    | st.text(min_size=1).map(lambda text: text.encode("utf-8", "surrogatepass")),
    min_size=1,
    max_size=12,
)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sent=st.lists(st.binary(min_size=1, max_size=3000), max_size=6),
    pieces=PIECES,
    kind=st.sampled_from(KINDS),
    encoding=st.sampled_from(ENCODINGS),
    upload=st.booleans(),
    chunked=st.booleans(),
)
@example(
    sent=[b"x"],
    pieces=[b"data: " + b"y" * (2 << 20) + b"\n\n"],
    kind=KINDS[1],
    encoding="",
    upload=True,
    chunked=True,
)
@example(
    sent=[b"z" * (8 << 20)],
    pieces=[b"w" * (8 << 20)],
    kind=KINDS[2],
    encoding="gzip",
    upload=True,
    chunked=False,
)
def test_b017_b029_b031_both_sides_have_the_same_bytes(
    rig: tuple[Rig, Peer, Front],
    sent: list[bytes],
    pieces: list[bytes],
    kind: str,
    encoding: str,
    upload: bool,
    chunked: bool,
) -> None:
    made, peer, gate = rig
    made.pieces, made.kind, made.encoding, made.chunked = pieces, kind, encoding, chunked

    async def uploading() -> AsyncIterator[bytes]:
        for part in sent:
            yield part
            await asyncio.sleep(0)

    async def exchange() -> None:
        data = uploading() if upload else b"".join(sent)
        headers = {"content-type": "application/octet-stream", "content-encoding": "br"}
        async with gate.client.put(f"{gate.url}/v1/files/x?y=%20", data=data, headers=headers) as answer:
            assert answer.status == 200
            assert await answer.read() == b"".join(pieces)
            assert answer.headers["content-type"] == kind
            assert answer.headers.get("content-encoding", "") == encoding
            framed = ("content-length" in answer.headers, "transfer-encoding" in answer.headers)
            assert framed == (not chunked, chunked)
        got = peer.received[-1]
        peer.received.clear()
        assert got.body == b"".join(sent)
        assert got.header("content-encoding") == ["br"]

    made.runner.run(exchange())


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_methods_without_a_body_pass_with_their_headers(rig: tuple[Rig, Peer, Front], method: str) -> None:
    made, peer, gate = rig

    async def answer(_: Received, connection: Connection) -> None:
        await connection.send(
            b"HTTP/1.1 200 OK\r\nallow: GET\r\nx-a: 1\r\nx-a: 2\r\ncontent-length: 0\r\n\r\n"
        )

    async def exchange() -> None:
        async with gate.client.request(method, f"{gate.url}/v1/files/x") as got:
            assert (got.status, got.headers["allow"], got.headers.getall("x-a")) == (200, "GET", ["1", "2"])
            assert await got.read() == b""
        assert peer.received[-1].method == method

    peer.handler = answer
    try:
        made.runner.run(exchange())
    finally:
        peer.handler = made
