"""One HTTP/1.1 connection to a worker: a request's bytes out, the answer's status, headers and body back.

llhttp parses, strictly: conflicting lengths, folded or broken header lines and broken chunks are errors. What
it leaves to its user is here: which statuses and codings make sense, and where a body ends.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.asgi import Headers

# Bytes of a body that wait to be read before the worker has to pause; one read of the socket more may come.
_WAITING_BYTES = 1 << 16
# A head with its interim responses, or chunk framing and trailers without a byte of body.
_FRAMING_BYTES = 1 << 17
# A connection that the worker closes as it is used again is closed within a round trip.
_STALE_S = 1.0
_NO_BODY = frozenset((204, 304))
_LENGTHLESS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class UpstreamError(Exception):
    """The worker could not be talked to.

    kind: connect, connect_timeout, timeout, reset, protocol: what it said is not HTTP/1.1, or descriptors:
    this process has none left.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


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
    if head.count(b"\r\n") != ends or head.count(b"\n") != ends or head.count(b"\r") != ends:
        raise ValueError("a line break in a header line")
    if b"\0" in head or target.count(b" "):
        raise ValueError("a byte that no header line can have")
    return head


class Response:
    """A worker's answer, filled by its connection as it comes."""

    __slots__ = (
        "_clock",
        "_connection",
        "_error",
        "_loop",
        "_parts",
        "_pause_s",
        "_since",
        "_size",
        "_take",
        "_waiter",
        "bodiless",
        "complete",
        "headers",
        "status",
        "until_close",
    )

    def __init__(
        self, connection: "Connection", method: str, pause_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        """pause_s: how long no byte of the body may come while one is waited for, 0: for ever."""
        self.status = 0
        self.headers: Headers = []
        self.bodiless = method == "HEAD"
        self.until_close = False
        self.complete = False
        self._connection: Connection | None = connection
        self._pause_s = pause_s
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0
        self._take: Callable[[bytes], bool] | None = None
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._clock: asyncio.TimerHandle | None = None

    async def begun(self) -> None:
        """Wait for status and headers, as long as it takes. Raises UpstreamError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._news()

    async def read(self) -> bytes:
        """What has come of the body since the last call, waiting if it is nothing; b"" at its end.

        Raises UpstreamError when the worker breaks off or falls silent.
        """
        while not self._parts:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._more()
        parts, self._parts, self._size = self._parts, [], 0
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

    def feed(self, parts: list[bytes], *, last: bool) -> bool:
        """The next bytes of the body. Whether no more should come before these are read."""
        if self._take is not None and not last:
            self._since = self._loop.time()
            if not self._take(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._take = None
                self.wake()
            return False
        self._parts += parts
        self._size += sum(map(len, parts))
        self.wake()
        return self._size > _WAITING_BYTES

    def end(self, error: UpstreamError | None = None) -> None:
        """It is complete, or broken off. The connection is free or gone."""
        self._connection = None
        self.complete = error is None
        self._error = error
        self._stop_clock()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        if self._pause_s and self._clock is None:
            self._clock = self._loop.call_later(self._pause_s, self._look)
        await self._news()

    async def _news(self) -> None:
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

    async def ask(self, method: str, head: bytes, body: bytes, pause_s: float) -> Response:
        """Send a request and wait for the head of its answer. Raises UpstreamError.

        The body is in memory as a whole: nothing is saved by waiting until the socket took it, and a worker
        may well answer before it has read it all.
        """
        transport = self._transport
        if transport is None or self.closed:
            raise UpstreamError("reset")
        assert self._response is None
        response = self._response = Response(self, method, pause_s, self._loop)
        self._ended = self.stale = False
        self._framing = 0
        self._asked_at = self._loop.time()
        if body:
            transport.writelines((head, body))
        else:
            transport.write(head)
        try:
            await response.begun()
        except BaseException:
            self.abort()
            raise
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
            if response.feed(parts, last=self._ended) and not self._ended:
                self._pause()
        if self._ended:
            self._free(response)
        elif self._framing > _FRAMING_BYTES:
            self.fail("protocol")

    def eof_received(self) -> None:
        self._gone("reset", clean=True)
        # A transport with bytes to write would wait until the worker took them.
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone("reset", clean=exc is None)
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
        coded = [value.strip().lower() for name, value in response.headers if name == b"transfer-encoding"]
        # Of any other coding the client would not be told: the header line stays on this hop.
        if not 200 <= status < 600 or version not in ("1.1", "1.0") or coded not in ([], [b"chunked"]):
            raise HttpParserError("an answer that makes no sense")
        self._keep = version == "1.1" and parser.should_keep_alive()
        if response.bodiless or status in _NO_BODY:
            self._ended = True
            if status in _NO_BODY:
                # Servers on the way to the client take a length for a promise.
                response.headers = [line for line in response.headers if line[0] != b"content-length"]
            # This one would take what follows for a body.
            self._parser = HttpResponseParser(self)
        elif not coded:
            response.until_close = not any(name == b"content-length" for name, _ in response.headers)
        response.status = status
        response.wake()

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
        if not self.closed:
            self.closed = True
            # It refers to this object, which refers to it.
            self._parser = None
            self._on_gone(self)
