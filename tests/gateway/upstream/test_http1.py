"""A connection's bytes, without sockets: what goes out, and what is made of whatever comes back."""

import asyncio
from collections.abc import Iterable

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.asgi import Headers
from gateway.upstream import http1
from gateway.upstream.http1 import Connection, Response, UpstreamError, request_head


class Wire(asyncio.Transport):
    """Keeps what is written. unsent: bytes of it that the other side has not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.unsent = 0
        self.aborted = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.sent += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Line:
    """A connection with the worker's end of it in a test's hand."""

    def __init__(self) -> None:
        self.free = 0
        self.gone = 0
        self.wire = Wire()
        self.connection = Connection(lambda _: self._count("free"), lambda _: self._count("gone"))
        self.connection.connection_made(self.wire)

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    async def ask(self, *answer: bytes, method: str = "POST", eof: bool = False) -> Response:
        """Send a request; its answer comes in these pieces."""
        asked = asyncio.create_task(self.connection.ask(method, b"head", b"body", 0.0).begun())
        await asyncio.sleep(0)
        for piece in answer:
            if not self.wire.aborted:
                self.connection.data_received(piece)
        if eof and not self.wire.aborted:
            self.connection.eof_received()
        return await asked


async def whole(response: Response) -> bytes:
    parts: list[bytes] = []
    while part := await response.read():
        parts.append(part)
    return b"".join(parts)


OK = b"HTTP/1.1 200 OK\r\n"
TOKEN = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).filter(
    lambda name: name not in {"content-length", "transfer-encoding", "connection", "upgrade"}
)
VALUE = st.binary(max_size=30).map(
    lambda value: bytes(b for b in value if b >= 0x20 and b != 0x7F).strip(b" \t")
)
LINES = st.lists(st.tuples(TOKEN.map(str.encode), VALUE), max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, int, Headers, list[bytes], bytes]:
    """Method, status, header lines, parts of the body, and all that as a worker may write it."""
    method = draw(st.sampled_from(["POST", "GET", "HEAD"]))
    status = draw(st.sampled_from([200, 201, 204, 304, 404, 500, 599]))
    headers = draw(LINES)
    parts = draw(st.lists(st.binary(min_size=1, max_size=300), max_size=5))
    wire = b"".join(
        b"HTTP/1.1 %d Wait\r\n%b\r\n" % (code, b"link: x\r\n" * draw(st.integers(0, 2)))
        for code in draw(st.lists(st.sampled_from([100, 102, 103]), max_size=2))
    )
    if draw(st.booleans()):
        headers.insert(draw(st.integers(0, len(headers))), (b"content-length", b"%d" % len(b"".join(parts))))
        body = b"".join(parts)
    else:
        headers.insert(draw(st.integers(0, len(headers))), (b"transfer-encoding", b"chunked"))
        extension = draw(st.sampled_from([b"", b";a=b", b';q="x"']))
        trailers = b"".join(b"%b: %b\r\n" % line for line in draw(LINES))
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
        body += b"0\r\n%b\r\n" % trailers
    case = draw(st.sampled_from([bytes, bytes.upper, bytes.title]))
    gap = draw(st.sampled_from([b" ", b"", b"  ", b"\t"]))
    lines = b"".join(b"%b:%b%b\r\n" % (case(name), gap, value) for name, value in headers)
    if method == "HEAD" or status in {204, 304}:
        parts, body = [], b""
    if status in {204, 304}:
        headers = [line for line in headers if line[0] != b"content-length"]
    wire += b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (
        status,
        draw(st.sampled_from([b"OK", b"", b"Not so"])),
        lines,
        body,
    )
    return method, status, headers, parts, wire


@settings(max_examples=200, deadline=None)
@given(st.lists(answers(), min_size=1, max_size=3), st.data())
def test_answers_are_read_as_they_were_written_however_they_are_cut(
    made: list[tuple[str, int, Headers, list[bytes], bytes]], data: st.DataObject
) -> None:
    async def run() -> None:
        line = Line()
        for count, (method, status, headers, parts, wire) in enumerate(made, 1):
            cuts = sorted(data.draw(st.sets(st.integers(1, len(wire)), max_size=12)))
            pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True) if a < b]
            response = await line.ask(*pieces, method=method)
            assert (response.status, response.headers) == (status, headers)
            assert await whole(response) == b"".join(parts)
            # What follows is the next request's.
            assert (line.free, line.gone, line.wire.aborted) == (count, 0, False)

    asyncio.run(run())


REQUESTS = st.tuples(
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.sampled_from([b"/v1/x", b"/v1/x?a=%20b&c", b"/", b"/v1/files/%c3%a9?;="]),
    LINES,
    st.binary(max_size=500),
)


@settings(max_examples=200, deadline=None)
@given(REQUESTS)
def test_a_server_reads_the_request_that_was_meant(made: tuple[str, bytes, Headers, bytes]) -> None:
    method, target, headers, body = made

    class Server:
        url = content = b""
        complete = 0

        def __init__(self) -> None:
            self.headers: Headers = []

        def on_url(self, url: bytes) -> None:
            self.url += url

        def on_header(self, name: bytes, value: bytes) -> None:
            self.headers.append((name, value))

        def on_body(self, part: bytes) -> None:
            self.content += part

        def on_message_complete(self) -> None:
            self.complete += 1

    seen = Server()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(request_head(method, target, b"w:8000", headers, len(body)) + body)
    framing = [(b"content-length", b"%d" % len(body))] if body or method in {"POST", "PUT", "DELETE"} else []
    assert (parser.get_method(), seen.url, seen.content, seen.complete) == (method.encode(), target, body, 1)
    assert seen.headers == [(b"host", b"w:8000"), *headers, *framing]


@pytest.mark.parametrize("value", [b"a\r\nx-b: c", b"a\nb", b"a\rb", b"a\0b", b"\r\n"])
@pytest.mark.parametrize("place", ["value", "name", "target", "method"])
def test_nothing_breaks_out_of_a_requests_lines(value: bytes, place: str) -> None:
    text = value.decode()
    with pytest.raises(ValueError, match="header line"):
        request_head(
            text if place == "method" else "GET",
            value if place == "target" else b"/",
            b"w",
            [(value if place == "name" else b"a", value if place == "value" else b"b")],
            0,
        )
    with pytest.raises(ValueError, match="header line"):
        request_head("GET", b"/ HTTP/1.1", b"w", [], 0)


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
SENSELESS = {
    "no HTTP": b"\x16\x03\x01\x02",
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
    "lower case": b"http/1.1 200 OK\r\n\r\n",
    "version 2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\ncontent-length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status of two digits": b"HTTP/1.1 99 OK\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 OK\r\ncontent-length: 0\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status above 599": b"HTTP/1.1 999 OK\r\ncontent-length: 0\r\n\r\n",
    "switches protocols": b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc",
    "switches without a name": b"HTTP/1.1 101 S\r\n\r\n",
    "two lengths": OK + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    "a length twice": OK + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "lengths in one line": OK + b"content-length: 3, 3\r\n\r\nabc",
    "length and chunks": OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": OK + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    "signed length": OK + b"content-length: +3\r\n\r\nabc",
    "negative length": OK + b"content-length: -1\r\n\r\n",
    "empty length": OK + b"content-length: \r\n\r\n",
    "endless length": OK + b"content-length: 99999999999999999999999\r\n\r\n",
    "another coding": OK + b"transfer-encoding: gzip\r\n\r\nabc",
    "a coding in chunks": OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded line": OK + b"a: b\r\n c\r\n\r\n",
    "blank before the colon": OK + b"a : b\r\n\r\n",
    "no name": OK + b": b\r\n\r\n",
    "name of other bytes": OK + b"\xff: b\r\n\r\n",
    "zero in a name": OK + b"a\0: b\r\n\r\n",
    "zero in a value": OK + b"a: \0\r\n\r\n",
    "lone CR": OK + b"a: b\rc: d\r\n\r\n",
    "lone LF": OK + b"a: b\nc: d\r\n\r\n",
    "head without end": OK + b"a: b\r\n" * 30_000,
    "line without end": OK + b"a: " + b"b" * 200_000,
    "interim answers without end": b"HTTP/1.1 100 C\r\n\r\n" * 10_000,
    "chunk size of letters": CHUNKED + b"zz\r\n",
    "chunk size without CR": CHUNKED + b"3\nabc\n0\n\n",
    "chunk size too large": CHUNKED + b"fffffffffffffffff\r\n",
    "chunk longer than it says": CHUNKED + b"3\r\nabcd\r\n",
    "trailers without end": CHUNKED + b"1\r\na\r\n0\r\n" + b"a: b\r\n" * 60_000,
    "trailer without end": CHUNKED + b"1\r\na\r\n0\r\na: " + b"b" * 400_000,
}


@pytest.mark.parametrize("answer", SENSELESS.values(), ids=SENSELESS)
@pytest.mark.parametrize("at_once", [True, False])
async def test_what_makes_no_sense_is_an_error_and_the_end_of_the_connection(
    answer: bytes, at_once: bool
) -> None:
    line = Line()
    step = 1 << 16 if at_once else max(1, len(answer) // 60)
    pieces = [answer[at : at + step] for at in range(0, len(answer), step)]
    with pytest.raises(UpstreamError) as raised:
        await whole(await line.ask(*pieces))
    assert raised.value.kind == "protocol"
    assert (line.wire.aborted, line.free, line.gone) == (True, 0, 1)


CUT = {
    "nothing": b"",
    "half a status line": b"HTTP/1.1 2",
    "half a head": OK + b"content-length: 1\r\n",
    "half a body": OK + b"content-length: 4\r\n\r\nabc",
    "half a chunk": CHUNKED + b"4\r\nabc",
    "chunks without their end": CHUNKED + b"3\r\nabc\r\n",
    "chunks without the last line": CHUNKED + b"3\r\nabc\r\n0\r\n",
}


@pytest.mark.parametrize("answer", CUT.values(), ids=CUT)
async def test_an_answer_that_ends_too_soon_is_not_taken_for_whole(answer: bytes) -> None:
    line = Line()
    with pytest.raises(UpstreamError) as raised:
        await whole(await line.ask(answer, eof=True))
    assert (raised.value.kind, line.gone, line.free) == ("reset", 1, 0)


@pytest.mark.parametrize("head", [OK, OK + b"connection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
async def test_a_body_without_framing_ends_with_its_connection(head: bytes) -> None:
    line = Line()
    response = await line.ask(head + b"\r\nabc", b"def", eof=True)
    assert (await whole(response), line.free, line.gone) == (b"abcdef", 0, 1)
    assert line.wire.aborted
    line = Line()
    response = await line.ask(head + b"\r\nabc")
    line.connection.connection_lost(ConnectionResetError())
    assert await response.read() == b"abc"
    with pytest.raises(UpstreamError):
        await response.read()


NOT_KEPT = {
    "bytes too many": OK + b"content-length: 2\r\n\r\nokk",
    "a body where there is none": b"HTTP/1.1 204 No\r\n\r\nabc",
    "a second answer": (OK + b"content-length: 2\r\n\r\nok") * 2,
    "half a second answer": OK + b"content-length: 2\r\n\r\nokHTTP/1.1 200 O",
    "it says so": OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok",
    "an old version": b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("answer", NOT_KEPT.values(), ids=NOT_KEPT)
@pytest.mark.parametrize("method", ["POST", "HEAD"])
async def test_a_connection_that_may_be_out_of_step_is_not_used_again(answer: bytes, method: str) -> None:
    line = Line()
    response = await line.ask(answer, method=method)
    assert await whole(response) == (b"" if method == "HEAD" or b"204" in answer else b"ok")
    assert (line.free, line.gone, line.wire.aborted) == (0, 1, True)


async def test_an_answer_before_the_request_was_read_whole_counts_and_its_connection_does_not() -> None:
    line = Line()
    line.wire.unsent = 1000
    response = await line.ask(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
    assert (response.status, await whole(response)) == (413, b"no")
    assert (line.free, line.wire.aborted) == (0, True)


async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    line = Line()
    await line.ask(OK + b"content-length: 0\r\n\r\n")
    assert line.free == 1
    line.connection.data_received(OK + b"content-length: 0\r\n\r\n")
    assert (line.gone, line.wire.aborted) == (1, True)
    with pytest.raises(UpstreamError):
        line.connection.ask("GET", b"", b"", 0.0)


async def test_what_is_not_read_is_not_asked_for() -> None:
    line = Line()
    response = await line.ask(OK + b"content-length: 1000000\r\n\r\n")
    for _ in range(4):
        assert line.wire.reading
        line.connection.data_received(b"x" * 20_000)
    assert not line.wire.reading
    assert len(await response.read()) == 80_000
    assert line.wire.reading
    for _ in range(4):
        line.connection.data_received(b"x" * 20_000)
    assert not line.wire.reading
    line.connection.data_received(b"x" * 840_000)
    # All of it is here: the connection has to hear of its end.
    assert (line.free, line.wire.reading) == (1, True)
    assert len(await whole(response)) == 920_000


async def test_a_body_may_be_as_long_as_it_is() -> None:
    line = Line()
    response = await line.ask(OK + b"content-length: 1000000\r\n\r\n")
    for _ in range(50):
        line.connection.data_received(b"x" * 20_000)
        assert await response.read() == b"x" * 20_000
    assert (await response.read(), line.free) == (b"", 1)


async def test_who_does_not_want_the_rest_has_the_connection_cut() -> None:
    line = Line()
    response = await line.ask(CHUNKED + b"3\r\nabc\r\n")
    response.close()
    assert (line.wire.aborted, line.gone) == (True, 1)
    line = Line()
    response = await line.ask(OK + b"content-length: 3\r\n\r\nabc")
    response.close()
    assert (line.wire.aborted, line.free) == (False, 1)


async def test_cancelled_while_it_waits_for_the_head_the_connection_is_cut_at_once() -> None:
    line = Line()
    asked = asyncio.create_task(line.connection.ask("POST", b"head", b"", 0.0).begun())
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    assert (asked.cancelled(), line.wire.aborted, line.gone) == (True, True, 1)


async def test_only_an_end_before_the_first_byte_and_soon_is_of_an_old_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ended(*answer: bytes) -> bool:
        line = Line()
        with pytest.raises(UpstreamError):
            await whole(await line.ask(*answer, eof=True))
        return line.connection.stale

    assert await ended()
    assert not await ended(b"H")
    monkeypatch.setattr(http1, "_STALE_S", 0.0)
    assert not await ended()


async def test_silence_between_bytes_costs_its_budget_but_only_while_somebody_waits() -> None:
    line = Line()
    pause_s = 0.08
    asked = asyncio.create_task(line.connection.ask("POST", b"head", b"", pause_s).begun())
    await asyncio.sleep(0)
    line.connection.data_received(CHUNKED + b"1\r\na\r\n")
    response = await asked
    assert await response.read() == b"a"
    waiting = asyncio.create_task(response.read())
    await asyncio.sleep(pause_s / 2)
    line.connection.data_received(b"1\r\nb\r\n")
    assert await waiting == b"b"
    # The client's turn: however long it takes to take what was read.
    await asyncio.sleep(3 * pause_s)
    began = asyncio.get_running_loop().time()
    with pytest.raises(UpstreamError) as raised:
        await response.read()
    assert raised.value.kind == "timeout"
    assert asyncio.get_running_loop().time() - began >= pause_s * 0.9
    assert line.wire.aborted


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12), st.lists(st.integers(0, 3)))
def test_pieces_that_are_passed_on_and_pieces_that_are_read_make_the_body(
    parts: list[bytes], enough_after: list[int]
) -> None:
    async def passed() -> None:
        line, came, given_on = Line(), [], iter(enough_after)
        response = await line.ask(OK + b"transfer-encoding: chunked\r\n\r\n")

        async def take_all() -> bytes:
            while True:
                left = next(given_on, 99)

                def take(piece: bytes) -> bool:
                    nonlocal left
                    came.append(piece)
                    left -= 1
                    return left > 0

                await response.forward(take)
                piece = await response.read()
                if not piece:
                    return b"".join(came)
                came.append(piece)

        taking = asyncio.create_task(take_all())
        await asyncio.sleep(0)
        for number, part in enumerate(parts):
            end = b"0\r\n\r\n" if number == len(parts) - 1 else b""
            line.connection.data_received(b"%x\r\n%b\r\n%b" % (len(part), part, end))
            if number % 3 == 2:
                await asyncio.sleep(0)
        assert await taking == b"".join(parts)
        assert line.free == 1

    asyncio.run(passed())


async def test_the_last_bytes_are_left_to_be_read_so_that_the_end_goes_out_with_them() -> None:
    line, came = Line(), []
    response = await line.ask(OK + b"transfer-encoding: chunked\r\n\r\n")

    def take(piece: bytes) -> bool:
        came.append(piece)
        return True

    forwarding = asyncio.create_task(response.forward(take))
    await asyncio.sleep(0)
    line.connection.data_received(b"1\r\na\r\n")
    await asyncio.sleep(0)
    assert came == [b"a"]
    assert not forwarding.done()
    line.connection.data_received(b"1\r\nb\r\n0\r\n\r\n")
    await forwarding
    assert came == [b"a"]
    assert await response.read() == b"b"
    assert response.read_whole


async def test_a_worker_that_breaks_off_ends_what_is_passed_on() -> None:
    line = Line()
    response = await line.ask(OK + b"transfer-encoding: chunked\r\n\r\n")
    forwarding = asyncio.create_task(response.forward(lambda _: True))
    await asyncio.sleep(0)
    line.connection.eof_received()
    await forwarding
    with pytest.raises(UpstreamError):
        await response.read()


async def test_a_worker_that_falls_silent_ends_what_is_passed_on() -> None:
    line = Line()
    asked = asyncio.create_task(line.connection.ask("POST", b"head", b"", 0.5).begun())
    await asyncio.sleep(0)
    line.connection.data_received(OK + b"transfer-encoding: chunked\r\n\r\n")
    response = await asked
    forwarding = asyncio.create_task(response.forward(lambda _: True))
    for _ in range(5):
        await asyncio.sleep(0.15)
        line.connection.data_received(b"1\r\na\r\n")
    assert not forwarding.done()  # longer than the limit, but never silent for so long
    async with asyncio.timeout(30):
        await forwarding
    with pytest.raises(UpstreamError) as broken:
        await response.read()
    assert broken.value.kind == "timeout"
