"""One HTTP/1.1 connection to a worker: a request's bytes out, the answer's status, headers and body back.

llhttp parses, strictly: conflicting lengths, folded or broken header lines and broken chunks are errors. What
it leaves to its user is here: which statuses and codings make sense, and where a body ends.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.asgi import Headers

# Bytes of a body that wait to be read before the worker has to pause; one read of the socket more may come.
_WAITING_BYTES = 1 << 16
# Bytes up to which one copy is cheaper than one more buffer in a write.
_SMALL = 1 << 14
# A head with its interim responses, or chunk framing and trailers without a byte of body.
_FRAMING_BYTES = 1 << 17
# A connection that the worker closes as it is used again is closed within a round trip.
_STALE_S = 1.0
_NO_BODY = frozenset((204, 304))
_LENGTHLESS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class UpstreamError(Exception):
    """The worker could not be talked to.

    kind: connect, tls: no such connection can be made, or not to whom it should be; connect_timeout, timeout,
    reset, protocol: what it said is not HTTP/1.1, or descriptors: this process has none left.
    why: in words for operators, where the kind does not say it all.
    """

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.why = why


def request_head(method: str, target: bytes, host: bytes, headers: Headers, length: int) -> bytes:
    """The bytes before a body of `length` bytes. Raises ValueError where a value would break out of its line.

    headers: names in lower case, without those that frame a body.
    """
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), target, host)]
    lines += [b"%b: %b\r\n" % line for line in headers]
    if length or method not in _LENGTHLESS:
        lines.append(b"content-length: %d\r\n" % length)
    lines.append(b"\r\n")
    head = b"".join(lines)
    ends = len(lines) + 1
    if head.count(b"\n") != ends or head.count(b"\r") != ends:
        raise ValueError("a line break in a header line")
    # Of bytes `in` costs 5,000 instructions, as it first tries whether they are a number.
    if head.count(b"\0") or target.count(b" "):
        raise ValueError("a byte that no header line can have")
    return head


class Response(msgspec.Struct, eq=False):
    """A worker's answer, filled by its connection as it comes.

    pause_s: how long no byte of the body may come while one is waited for, 0: for ever.
    bodiless: whatever its head says of a body. headers: lines, names in lower case.
    fields: their values by name, those of a repeated one in one.
    """

    _connection: "Connection | None"
    _loop: asyncio.AbstractEventLoop
    _pause_s: float
    bodiless: bool
    status: int = 0
    headers: Headers = []
    fields: dict[bytes, bytes] = {}
    until_close: bool = False
    complete: bool = False
    _parts: list[bytes] = []
    _size: int = 0
    _take: Callable[[bytes], bool] | None = None
    _error: UpstreamError | None = None
    _waiter: asyncio.Future[None] | None = None
    _since: float = 0.0
    _clock: asyncio.TimerHandle | None = None

    async def begun(self) -> "Response":
        """Wait for status and headers, as long as it takes. Raises UpstreamError.

        Whoever does not wait to the end wants no more of it.
        """
        try:
            while not self.status:
                if self._error is not None:
                    raise self._error
                self._waiter = self._loop.create_future()
                await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._waiter = None
        return self

    async def read(self) -> bytes:
        """What has come of the body since the last call, waiting if it is nothing; b"" at its end.

        Raises UpstreamError when the worker breaks off or falls silent.
        """
        while self.waits:
            await self._more()
        return self.taken()

    def taken(self) -> bytes:
        """As `read`, where it does not wait."""
        parts = self._parts
        if not parts:
            if self._error is not None:
                raise self._error
            return b""
        self._parts, self._size = [], 0
        if self._connection is not None:
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        """Give `take` what comes of the body as it comes, without waking a task for it: 8 us a chunk.

        Until that says False, or the last bytes came: those, the end and errors are for `read`.
        """
        if not self.waits:
            return
        self._take = take
        try:
            await self._more()
        finally:
            self._take = None

    @property
    def waits(self) -> bool:
        """Whether `read` would have to wait."""
        return not (self._parts or self.complete or self._error is not None)

    @property
    def read_whole(self) -> bool:
        """Whether the body's end is known to have been read: `read` would give b"" at once."""
        return self.complete and not self._parts

    def close(self) -> None:
        """No more of it is wanted: a connection that is not through with it is cut at once."""
        self._stop_clock()
        if self._connection is not None:
            self._connection.abort()

    def passed(self, part: bytes) -> bool:
        """Whether these bytes of the body, not its last ones, were forwarded."""
        if self._take is None:
            return False
        self._since = self._loop.time()
        if not self._take(part):
            self._take = None
            self.wake()
        return True

    def feed(self, part: bytes) -> bool:
        """The next bytes of the body. Whether no more should come before these are read."""
        self._parts.append(part)
        self._size += len(part)
        return self._size > _WAITING_BYTES

    def end(self, error: UpstreamError | None = None) -> None:
        """It is complete, or broken off. The connection is free or gone."""
        self._connection = None
        self.complete = error is None
        self._error = error
        self._stop_clock()

    def wake(self) -> None:
        """Let who waits look at what came."""
        if self._waiter is not None and not self._waiter.done() and (self._take is None or not self.waits):
            self._waiter.set_result(None)

    async def _more(self) -> None:
        if self._pause_s and self._clock is None:
            self._clock = self._loop.call_later(self._pause_s, self._look)
        self._since = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """One timer for a body, not one for each chunk."""
        now = self._loop.time()
        until = (self._since if self._waiter is not None else now) + self._pause_s
        if until > now:
            self._clock = self._loop.call_at(until, self._look)
        elif self._connection is not None:
            self._connection.fail("timeout")

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class Connection(asyncio.Protocol):
    """Takes one request at a time. `on_free` hears when it can take another, `on_gone` when it never will."""

    def __init__(
        self, on_free: Callable[["Connection"], None], on_gone: Callable[["Connection"], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_free = on_free
        self._on_gone = on_gone
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._response: Response | None = None
        self._body: list[bytes] = []
        self._keep = False
        self._ended = False
        self._paused = False
        self._framing = 0
        self._asked_at = 0.0
        self.closed = False
        # Closed as it was used, before a byte came back: most likely it had been idle for too long.
        self.stale = False
        self.idle_since = 0.0

    def ask(self, method: str, head: bytes, body: bytes, pause_s: float) -> Response:
        """Send a request. Raises UpstreamError where the connection is closed.

        The body is in memory as a whole: nothing is saved by waiting until the socket took it, and a worker
        may well answer before it has read it all.
        """
        transport = self._transport
        if transport is None or self.closed:
            raise UpstreamError("reset")
        assert self._response is None
        response = self._response = Response(self, self._loop, pause_s, method == "HEAD")
        self._ended = self.stale = False
        self._framing = 0
        self._asked_at = self._loop.time()
        if len(body) > _SMALL:
            transport.writelines((head, body))
        else:
            transport.write(head + body)
        return response

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the socket at once, whatever is still to be written or read."""
        self._gone("reset")
        if self._transport is not None:
            self._transport.abort()

    def fail(self, kind: str) -> None:
        """End the response with an error, and the connection with it."""
        self._gone(kind)
        self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response, parser = self._response, self._parser
        if response is None or parser is None:
            # Nobody asked.
            self.abort()
            return
        self._framing += len(data)
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if not self._ended:
                self.fail("protocol")
                return
            self._keep = False
        if self._body:
            parts, self._body = self._body, []
            self._framing = 0
            part = parts[0] if len(parts) == 1 else b"".join(parts)
            if not self._ended and response.passed(part):
                return
            if response.feed(part) and not self._ended:
                self._pause()
        if self._ended:
            self._free(response)
        elif self._framing > _FRAMING_BYTES:
            self.fail("protocol")
        response.wake()

    def eof_received(self) -> None:
        self._gone("reset", clean=True)
        # A transport with bytes to write would wait until the worker took them.
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        # Without `eof_received`: of a TLS connection whose end nobody signed, so anybody may have cut it.
        self._gone("reset")
        self._transport = None

    def on_message_begin(self) -> None:
        if self._ended:
            # More than was asked for: whose answer it is nobody knows.
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._response
        # Trailers end here: they are for this hop, and ASGI has no place for them.
        if response is not None and not response.status and not self._ended:
            response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        response, parser = self._response, self._parser
        if response is None or parser is None or self._ended:
            return
        status = parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            response.headers = []
            return
        version = parser.get_http_version()
        fields = response.fields = _by_name(response.headers)
        coding = fields.get(b"transfer-encoding", b"chunked").strip().lower()
        # Of any other coding the client would not be told: the header line stays on this hop.
        if not 200 <= status < 600 or version not in ("1.1", "1.0") or coding != b"chunked":
            raise HttpParserError("an answer that makes no sense")
        self._keep = version == "1.1" and parser.should_keep_alive()
        if response.bodiless or status in _NO_BODY:
            self._ended = True
            if status in _NO_BODY:
                # Servers on the way to the client take a length for a promise.
                response.headers = [line for line in response.headers if line[0] != b"content-length"]
            # This one would take what follows for a body.
            self._parser = HttpResponseParser(self)
        else:
            response.until_close = not (b"transfer-encoding" in fields or b"content-length" in fields)
        response.status = status

    def on_body(self, body: bytes) -> None:
        if self._ended:
            self._keep = False
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status:
            self._ended = True

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _free(self, response: Response) -> None:
        """The answer is complete."""
        transport, self._response = self._transport, None
        response.end()
        if not self._keep or transport is None or transport.get_write_buffer_size():
            # Also when the worker answered without having read all of the request.
            self.abort()
            return
        self.resume()
        self.idle_since = self._loop.time()
        self._on_free(self)

    def _gone(self, kind: str, *, clean: bool = False) -> None:
        response, self._response = self._response, None
        if response is not None:
            self.stale = (
                not response.status and not self._framing and self._loop.time() - self._asked_at < _STALE_S
            )
            whole = clean and response.until_close
            response.end(None if whole else UpstreamError(kind))
            response.wake()
        if not self.closed:
            self.closed = True
            # It refers to this object, which refers to it.
            self._parser = None
            self._on_gone(self)


def _by_name(headers: Headers) -> dict[bytes, bytes]:
    fields = dict(headers)
    if len(fields) != len(headers):
        for name in fields:
            fields[name] = b", ".join(value for other, value in headers if other == name)
    return fields
