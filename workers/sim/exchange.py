"""One HTTP request and its response, with the faults that apply to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

from workers.sim.faults import Die, Faults, Hang, Seen
from workers.sim.listener import end, reset

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Gone(Exception):
    """The connection has ended, by the client or by a fault: there is nobody to answer."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how: Final = how


class Exchange:
    """Sends a response so that `seen` tells what happened to it. `changed` is set when the client leaves."""

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        faults: Faults,
        transport: asyncio.Transport | None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._faults = faults
        self._transport = transport
        self.method: Final[str] = scope["method"]
        self.path: Final[str] = scope["path"]
        self.headers: Final[list[tuple[bytes, bytes]]] = scope["headers"]
        self.changed: Final = asyncio.Event()
        self._leaving: Final = asyncio.Event()
        self._hang: Hang | None = None
        self._die: Die | None = None
        self._watch: asyncio.Task[None] | None = None
        self._request_id = self.header(b"x-request-id")
        self._number = 0
        self.seen: Seen | None = None

    @property
    def left(self) -> bool:
        return self._leaving.is_set()

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)

    async def body(self) -> bytes:
        """The whole body as received. Raises Gone."""
        parts: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone("gone")
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def meet_faults(self) -> bool:
        """What comes before anything is answered. True when the request has been answered by a fault."""
        self._watch = asyncio.create_task(self._await_leaving())
        status = self._faults.take("status", self.path)
        if status is not None:
            headers = [(name.lower().encode(), value.encode()) for name, value in status.headers.items()]
            if all(name != b"content-type" for name, _ in headers):
                headers.append((b"content-type", b"application/json"))
            await self._respond(status.status, headers, status.body.encode())
            return True
        self._hang = self._faults.take("hang", self.path)
        self._die = self._faults.take("die", self.path)
        if self._hang is not None and self._hang.after_chunks is None:
            await self._stop(self._hang)
        if self._die is not None and self._die.after_chunks is None:
            self._break(self._die)
        return False

    async def answer(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        more: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """A response in one piece."""
        headers = [(b"content-type", content_type.encode()), *more] if body or status != 200 else []
        if self._die is not None and len(body) > 1:
            await self._start(status, [(b"content-length", b"%d" % len(body)), *headers])
            await self._write(body[: len(body) // 2])
            self._break(self._die)
        await self._respond(status, headers, body)

    async def open_stream(self) -> None:
        await self._start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])

    async def write(self, chunk: bytes) -> None:
        """One piece of a stream. Raises Gone."""
        await self._before_chunk()
        await self._write(chunk)

    async def close_stream(self) -> None:
        await self._before_chunk()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    async def _respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        await self._start(status, [(b"content-length", b"%d" % len(body)), *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.left:
            raise Gone("gone")
        if self.seen is not None:
            self.seen.status = status
        if self._request_id is not None:
            headers = [*headers, (b"x-request-id", self._request_id.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _before_chunk(self) -> None:
        if self.left:
            raise Gone("gone")
        number = self._number
        self._number += 1
        if self._hang is not None and self._hang.after_chunks == number:
            await self._stop(self._hang)
        if self._die is not None and self._die.after_chunks == number:
            # What was written before must reach the client before the connection breaks.
            await asyncio.sleep(0.02)
            self._break(self._die)

    async def _write(self, chunk: bytes) -> None:
        if self.seen is not None:
            self.seen.chunks += 1
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _stop(self, fault: Hang) -> None:
        try:
            async with asyncio.timeout(fault.seconds):
                await self._leaving.wait()
        except TimeoutError:
            return
        raise Gone("gone")

    def _break(self, fault: Die) -> None:
        if self._transport is not None:
            (reset if fault.how == "reset" else end)(self._transport)
        raise Gone("fault")

    async def _await_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leaving.set()
        self.changed.set()
