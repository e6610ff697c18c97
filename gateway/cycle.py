"""One request and its answer on uvicorn's connection: ASGI's messages, and what a turn needs besides them.

uvicorn's own stops reading for every 64 KiB of a body and copies it three times, and it writes the head of an
answer by itself.
"""

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.asgi import BODY_FOLLOWS, Headers, Message
from gateway.deadline import Deadline
from gateway.errors import PayloadTooLarge, RequestTimeout

# Bytes up to which one copy is cheaper than one more buffer in a write.
_SMALL = 1 << 14
_OF_THE_CONNECTION = frozenset((b"content-length", b"transfer-encoding", b"connection"))


class Cycle(RequestResponseCycle):
    """Also a `gateway.asgi.Client`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._first = b""
        self._whole: BytesIO | None = None
        # Of the body that came and was not received.
        self.size = 0
        self._room = HIGH_WATER_LIMIT
        self._waits_for_all = False
        self._came = 0.0
        self._head = b""
        self._until_close = False
        self._on_gone: Callable[[], None] | None = None

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
            self.message_event.set()
        return full

    def gone(self) -> None:
        """The client left, or has to go."""
        if not self.response_complete:
            self.disconnected = True
            self.message_event.set()
            if self._on_gone is not None:
                self._on_gone()

    # ASGI.

    async def receive(self) -> Any:
        self._ask_for_body()
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._taken(), "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start(message)
        else:
            self._send(message.get("body", b""), message.get("more_body", False))

    # gateway.asgi.Client.

    async def whole_body(self, limit: int, pause_s: float) -> bytes | None:
        self._ask_for_body()
        if self.more_body and not self.disconnected:
            await self._all_came(limit, pause_s)
        if self.disconnected:
            return None
        if limit and self.size > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes")
        self.message_event.clear()
        return self._taken()

    @property
    def full(self) -> bool:
        return self.flow.write_paused

    def write(self, chunk: bytes) -> None:
        if not self.disconnected:
            self._send(chunk, more=True)

    def abort(self) -> None:
        self.transport.abort()

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_gone = callback
        if callback is not None and self.disconnected:
            callback()

    def _ask_for_body(self) -> None:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False

    async def _all_came(self, limit: int, pause_s: float) -> None:
        """Wait until the body is there, too large, or the client gone. Raises RequestTimeout."""
        self._waits_for_all = True
        self._room = limit or (1 << 62)
        self.flow.resume_reading()
        loop, event = asyncio.get_running_loop(), self.message_event
        self._came = loop.time()
        while self.more_body and self.size <= self._room and not self.disconnected:
            event.clear()
            try:
                with Deadline(self._came + pause_s if pause_s else None):
                    await event.wait()
            except TimeoutError:
                if loop.time() >= self._came + pause_s:
                    raise RequestTimeout("the rest of the body did not come") from None

    def _taken(self) -> bytes:
        taken = self._first if self._whole is None else self._whole.getvalue()
        self._first, self._whole, self.size = b"", None, 0
        return taken

    def _start(self, message: Message) -> None:
        if self.response_started:
            raise RuntimeError("the response has started")
        self.response_started = True
        self.waiting_for_100_continue = False
        head = self._head_bytes(message["status"], [*self.default_headers, *message.get("headers", ())])
        if message.get(BODY_FOLLOWS):
            self._head = head
        else:
            self.transport.write(head)

    def _head_bytes(self, status: int, headers: Headers) -> bytes:
        """Raises RuntimeError where a value would break out of its line."""
        lines = [STATUS_LINE[status]]
        closes = False
        for name, value in headers:
            if name not in _OF_THE_CONNECTION:
                pass
            elif name == b"content-length":
                if self.chunked_encoding is None:
                    self.expected_content_length = int(value)
                    self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length = 0
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in value.lower():
                closes = True
                self.keep_alive = False
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            # A client older than chunks takes the end of the connection for that of the body.
            self.chunked_encoding = self.scope["http_version"] != "1.0"
            self._until_close = not self.chunked_encoding
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise RuntimeError("a line break in a header line")
        return head

    def _send(self, body: bytes, more: bool) -> None:
        if not self.response_started or self.response_complete:
            raise RuntimeError("no body belongs here")
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            parts = (head,)
        elif self.chunked_encoding:
            end = b"" if more else b"0\r\n\r\n"
            parts = (head, b"%x\r\n" % len(body), body, b"\r\n" + end) if body else (head, end)
        elif self._until_close:
            parts = (head, body)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("a body longer than its content-length")
            parts = (head, body)
        if len(body) > _SMALL:
            self.transport.writelines(parts)
        else:
            self.transport.write(b"".join(parts))
        if not more:
            self._complete()

    def _complete(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("a body shorter than its content-length")
        self.response_complete = True
        # They refer to this object, which refers to them.
        self.scope.pop("extensions", None)
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
