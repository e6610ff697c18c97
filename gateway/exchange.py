"""One HTTP exchange with a client over ASGI: its request, its body, and every way its response can go."""

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from gateway.errors import PayloadTooLarge, RequestTimeout

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# ASGI extension of our own server: a function that drops the client's connection at once.
ABORT = "moongate.abort"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client closed its connection before its response was complete."""


class Exchange:
    """A client's request and the response to it.

    `started` is true once response headers went out, `finished` once the last byte did; `sent_at` is the loop
    time at which the last piece before that was sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope.get("raw_path") or self.path.encode()
        self.query: bytes = scope.get("query_string", b"")
        self.headers: Headers = scope["headers"]
        self.client: str = (scope.get("client") or ("", 0))[0]
        self.started = False
        self.finished = False
        self.stalled = False
        self.sent_at = 0.0
        self._sending_since: float | None = None
        self._abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
        self._receive = receive
        self._send = send
        given = self.header(b"x-request-id")
        self.request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header `name` (lower case)."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def target(self) -> bytes:
        """Path and query exactly as the client wrote them."""
        path = self.raw_path.split(b"?", 1)[0]
        return path + b"?" + self.query if self.query else path

    async def read_body(self, limit: int, pause_s: float = 0.0) -> bytes:
        """The whole body. Raises PayloadTooLarge beyond `limit` bytes (0: no limit), ClientGone.

        RequestTimeout where nothing of it comes for `pause_s` seconds (0: no limit).
        """
        declared = self.header(b"content-length")
        if limit and declared and declared.isdigit() and int(declared) > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes")
        chunks: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(pause_s or None):
                    message = await self._receive()
            except TimeoutError:
                raise RequestTimeout("the rest of the body did not come") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if limit and size > limit:
                raise PayloadTooLarge(f"the body is larger than {limit} bytes")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @asynccontextmanager
    async def connected(self, stall_s: float = 0.0) -> AsyncGenerator[None, None]:
        """Run the body only while the client listens; its leaving raises ClientGone inside, at any await.

        So does a client that takes nothing of what is sent for `stall_s` seconds (0: it may); `stalled` is
        true then. Call after `read_body`: from then on the only message a client can still send is its
        disconnect.
        """
        task = asyncio.current_task()
        assert task is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.finished and not gone:
                gone = True
                task.cancel()

        def look_at_sending() -> None:
            nonlocal gone, looking
            since = self._sending_since
            if gone:
                return
            if since is not None and loop.time() - since >= stall_s:
                gone = self.stalled = True
                task.cancel()
            else:
                looking = loop.call_later(stall_s / 4, look_at_sending)

        loop = asyncio.get_running_loop()
        # One timer for a turn, not one for each chunk.
        looking = loop.call_later(stall_s / 4, look_at_sending) if stall_s else None
        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()
            if looking is not None:
                looking.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes) -> None:
        """Returns once the client's socket can take more: a slow reader slows the worker, not our memory."""
        self.sent_at = self._sending_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending_since = None

    def abort(self) -> None:
        """Drop the connection with whatever is still to be written: to a client that does not read."""
        if self._abort is not None:
            self._abort()

    async def finish(self, chunk: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
