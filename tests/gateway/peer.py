"""A worker made of raw sockets: it does to a connection exactly what a test says, byte by byte."""

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Received:
    """A request as it came over the wire."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class _Reader(asyncio.StreamReader):
    """Tells when the other side has left, also while nobody reads. Clients here never pipeline."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self.gone.set()


@dataclass
class Connection:
    """One request's connection. `gone` is set when the other side closes it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def start_stream(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        await self.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Break the connection with a RST."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


ADMIN = {"authorization": "Bearer admin-token"}

PROBED = ("/health", "/metrics", "/v1/models", "/kv_event_sources", "/is_sleeping")

Handler = Callable[[Received, Connection], Awaitable[None]]


class Peer:
    """Answers probes by itself (unless told not to) and hands every other request to `handler`."""

    def __init__(self, handler: Handler, model: str = "m") -> None:
        self.handler = handler
        self.pages = {
            "/health": b"",
            "/v1/models": json.dumps(
                {"object": "list", "data": [{"id": model, "root": "/nowhere", "extra": 1}]}
            ).encode(),
        }
        self.silent = False
        self.renders = True
        """Whether `handler` sees what asks for prompts' tokens; else that is refused, as stock vLLM does."""
        self.received: list[Received] = []
        self.open: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> "Peer":
        self._scheme = "https" if tls else "http"
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(limit=1 << 20), self._serve),  # type: ignore[arg-type]
            "127.0.0.1",
            port,
            backlog=2048,
            ssl=tls,
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Close the listener and cut every connection, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while request := await _read_request(reader):
                if request.method == "GET" and request.target in PROBED:
                    if self.silent:
                        await asyncio.sleep(3600)
                    page = self.pages.get(request.target)
                    await Connection(reader, writer).answer(404 if page is None else 200, page or b"")
                    continue
                if not self.renders and request.target.endswith("/render"):
                    await Connection(reader, writer).answer(403, b"")
                    continue
                self.received.append(request)
                connection = Connection(reader, writer, reader.gone)
                self.open.add(connection)
                try:
                    await self.handler(request, connection)
                finally:
                    self.open.discard(connection)
                if writer.is_closing() or connection.gone.is_set():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    __hash__ = object.__hash__


Connection.__hash__ = object.__hash__  # type: ignore[method-assign]


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: list[tuple[str, str]] = []
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").rstrip("\r\n").partition(":")
        headers.append((name, value.strip()))
    found = {name.lower(): value for name, value in headers}
    if found.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    else:
        body = await reader.readexactly(int(found.get("content-length", "0")))
    return Received(method, target, headers, body)
