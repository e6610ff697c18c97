"""One request and its answer on a client's connection: what a turn needs of them, and ASGI's messages."""

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Literal

import msgspec
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway import errors
from gateway.asgi import Headers, Message, Scope
from gateway.deadline import Deadline

# Bytes up to which one copy is cheaper than one more buffer in a write.
_SMALL = 1 << 14
# Closing sends a reset, whatever was still to be sent.
_RESET = struct.pack("ii", 1, 0)
_BREAKS = b"\r\n\0"
_BODILESS = frozenset((204, 304))


class Cycle(msgspec.Struct, eq=False, weakref=True):
    """Also a `gateway.asgi.Client`. As a struct it is made without a line of Python for its many defaults.

    standing: header lines that every answer has. ended: is called when the answer is complete or cut.
    size: of the body that came and was not taken.
    """

    scope: Scope
    fields: Mapping[bytes, bytes]
    transport: asyncio.Transport
    flow: FlowControl
    standing: Headers
    ended: Callable[[], None]
    keep_alive: bool = True
    asks_first: bool = False
    more_body: bool = True
    disconnected: bool = False
    response_started: bool = False
    response_complete: bool = False
    size: int = 0
    task: asyncio.Task[None] | None = None
    _first: bytes = b""
    _whole: BytesIO | None = None
    _room: int = HIGH_WATER_LIMIT
    _waits_for_all: bool = False
    _came: float = 0.0
    _is_news: bool = False
    _waiter: asyncio.Future[None] | None = None
    _head: bytes = b""
    _framing: Literal["length", "chunks", "close", "none"] = "close"
    # Bytes that are still to come of a body with a length.
    _left: int = 0
    _on_gone: Callable[[], None] | None = None

    async def run(self, app: ASGIApp, running: set[asyncio.Task[None]]) -> None:
        """Let `app` answer, in `task`, one of the `running`.

        What it raises is answered; what it leaves undone ends the connection.
        """
        try:
            await app(self.scope, self.receive, self.send)
        except errors.ResponseCut:
            pass
        except errors.ApiError as error:
            self._fail(error)
        except Exception as error:
            errors.log_fault(error, self.scope["method"])
            self._fail(errors.fault())
        finally:
            if self.task is not None:
                running.discard(self.task)
            if not self.response_complete and not self.disconnected:
                self._cut()

    # What the connection says.

    def took(self, piece: bytes) -> bool:
        """The next bytes of the body. Whether the ones after them should wait in the socket."""
        if not self.size:
            self._first = piece
        else:
            # Joining 64 MiB at the end would hold up everybody for 40 ms, and take the memory twice.
            if self._whole is None:
                self._whole = BytesIO()
                self._whole.write(self._first)
            self._whole.write(piece)
        self.size += len(piece)
        full = self.size > self._room
        if self._waits_for_all and not full:
            # Nobody is woken for a piece.
            self._came = asyncio.get_running_loop().time()
        else:
            self._wake()
        return full

    def took_all(self) -> None:
        """The body is there as a whole."""
        self.more_body = False
        self._wake()

    def gone(self) -> None:
        """The client left, or has to go."""
        if not self.response_complete:
            self.disconnected = True
            self._wake()
            if self._on_gone is not None:
                self._on_gone()

    # ASGI.

    async def receive(self) -> Message:
        self._ask_for_body()
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._is_news:
                await self._wait()
            self._is_news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._taken(), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if self.full:
            await self.room()
        if message["type"] == "http.response.start":
            self.start(message["status"], list(message.get("headers", ())))
        else:
            self.write(message.get("body", b""), message.get("more_body", False))

    # gateway.asgi.Client.

    async def whole_body(self, limit: int, pause_s: float) -> bytes | None:
        self._ask_for_body()
        if self.more_body and not self.disconnected:
            await self._all_came(limit, pause_s)
        if self.disconnected:
            return None
        if limit and self.size > limit:
            raise errors.PayloadTooLarge(f"the body is larger than {limit} bytes")
        self._is_news = False
        return self._taken()

    def start(self, status: int, headers: Headers, *, alone: bool = True) -> None:
        if self.disconnected:
            return
        if self.response_started:
            raise RuntimeError("the response has started")
        self.response_started = True
        self.asks_first = False
        head = self._head_of(status, headers)
        if alone:
            self.transport.write(head)
        else:
            self._head = head

    def write(self, piece: bytes, more: bool = True) -> None:
        if self.disconnected:
            return
        if not self.response_started or self.response_complete:
            raise RuntimeError("no body belongs here")
        before, behind, framing = self._head, b"", self._framing
        if before:
            self._head = b""
        if framing == "chunks":
            if piece:
                before += b"%x\r\n" % len(piece)
                behind = b"\r\n"
            if not more:
                behind += b"0\r\n\r\n"
        elif framing == "none":
            piece = b""
        elif framing == "length":
            self._left -= len(piece)
            if self._left < 0:
                raise RuntimeError("a body longer than its content-length")
        if len(piece) > _SMALL:
            self.transport.writelines((before, piece, behind))
        else:
            self.transport.write(before + piece + behind)
        if not more:
            self._complete()

    @property
    def full(self) -> bool:
        return self.flow.write_paused and not self.disconnected

    async def room(self) -> None:
        await self.flow.drain()

    def last(self) -> None:
        self.keep_alive = False

    def abort(self) -> None:
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        # Closed already where the turn did this and so left its answer undone.
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_gone = callback
        if callback is not None and self.disconnected:
            callback()

    def _fail(self, error: errors.ApiError) -> None:
        if not self.response_started:
            content = errors.body(error, errors.shape_of(self.scope["path"]))
            self.start(error.status, errors.head(error, content), alone=False)
            self.write(content, more=False)

    def _ask_for_body(self) -> None:
        if self.asks_first and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.asks_first = False

    async def _all_came(self, limit: int, pause_s: float) -> None:
        """Wait until the body is there, too large, or the client gone. Raises RequestTimeout."""
        self._waits_for_all = True
        self._room = limit or (1 << 62)
        self.flow.resume_reading()
        loop = asyncio.get_running_loop()
        self._came = loop.time()
        while self.more_body and self.size <= self._room and not self.disconnected:
            try:
                with Deadline(self._came + pause_s if pause_s else None):
                    await self._wait()
            except TimeoutError:
                if loop.time() >= self._came + pause_s:
                    raise errors.RequestTimeout("the rest of the body did not come") from None

    def _taken(self) -> bytes:
        taken = self._first if self._whole is None else self._whole.getvalue()
        self._first, self._whole, self.size = b"", None, 0
        return taken

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        self._is_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _head_of(self, status: int, headers: Headers) -> bytes:
        """Raises RuntimeError where a value would break out of its line."""
        said = dict(headers)
        lines = [b"%b: %b\r\n" % line for line in [*self.standing, *headers]]
        if b"connection" in said and b"close" in said[b"connection"].lower():
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            self._framing = "none"
        elif b"content-length" in said:
            self._framing, self._left = "length", int(said[b"content-length"])
        # A client older than chunks takes the end of the connection for that of the body.
        elif self.scope["http_version"] != "1.0":
            self._framing = "chunks"
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines))
        # Two for each line, the status and the end.
        if len(head) - len(head.translate(None, _BREAKS)) != 2 * len(lines) + 4:
            raise RuntimeError("a line break in a header line")
        return head

    def _cut(self) -> None:
        if self.response_started and self._framing == "close":
            # The connection's end would pass for the body's.
            self.abort()
        else:
            self.transport.close()
        self.ended()

    def _complete(self) -> None:
        if self._left:
            raise RuntimeError("a body shorter than its content-length")
        self.response_complete = True
        # They refer to this object, which refers to them.
        self.scope.pop("extensions", None)
        self._wake()
        if not self.keep_alive:
            self.transport.close()
        self.ended()
