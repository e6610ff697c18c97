"""uvicorn's HTTP protocol, with what it leaves open towards clients that are slow, odd or gone."""

import asyncio
import math
from collections import deque
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from gateway import errors
from gateway.asgi import CLIENT, Headers
from gateway.cycle import Cycle
from gateway.settings import Settings

# Agents' heads have 1 to 3 KB; what vLLM's own server takes.
_HEAD_BYTES = 1 << 16
# Requests read ahead of the answer that is under way; each costs some KB.
_PIPELINED = 1024
# A connection that has been idle for so long is closed for a new one where there is no room; one that is idle
# for less may have its next request under way.
_SETTLED_S = 1.0
# Nobody should be told that the gateway is gone while it is full, nor be kept from looking why.
_SPARED = ("/health", "/ready", "/metrics", "/admin/")
# What a request says of another protocol that it would rather go on in.
_UPGRADING = frozenset((b"connection", b"upgrade", b"http2-settings"))
_BY_HTTP = {"upgrade": "HTTP/1.1", "connection": "upgrade"}


class Room:
    """For clients' connections, so that descriptors are left for those to workers.

    most: how many there may be, 0: no limit. refused: how many found none since somebody looked.
    """

    __slots__ = ("most", "refused")

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.refused = 0


class Protocol(asyncio.Protocol):
    """One client's connection: llhttp reads its requests, one after the other is answered.

    * What is no HTTP is answered in our shape.
    * A request's head has a limit in bytes and, from its first byte on, in time (`head_s`, 0: none); so have
      trailers and all that frames a body, which nothing else counts.
    * An idle connection ends after a while whatever comes that begins no request, and whatever the client
      left unread of its last answer.
    * A client's leaving is noticed whatever it sent before: reading goes on behind a request that waits. What
      is read ahead has a limit (`ahead_bytes`, 0: none): a client that sends more behind a request that is
      being answered is cut off.
    * Where there is no room for a connection, the one that is idle longest goes; where all are busy, the new
      one's request is refused.
    * Offers of another protocol are passed over, as RFC 9110 7.8 allows: Java's client and `curl --http2`
      offer HTTP/2 and go on in HTTP/1.1. The parser would take their bodies for that protocol's bytes.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        head_s: float,
        ahead_bytes: int,
        room: Room,
    ) -> None:
        """As uvicorn's server makes it, which also calls `shutdown`."""
        self._app: ASGIApp = cast(ASGIApp, config.loaded_app)
        self._server = server_state
        self._state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._head_s = head_s
        self._ahead_bytes = ahead_bytes
        self._room = room
        self._has_room = True
        self._refused = False
        self._idle_s = config.timeout_keep_alive
        self._transport: asyncio.Transport
        self._flow: FlowControl
        self._addresses: dict[str, Any] = {}
        self._parser: Any = _parser(self)
        self._in_head = False
        self._in_body = False
        # Since the head began, or since the last of the body.
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        # Loop time since when nothing is under way, None while something is.
        self._idle_since: float | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._url = b""
        self._headers: Headers = []
        # The request that is being read or was last.
        self._cycle: Cycle | None = None
        self._answered: Cycle | None = None
        self._waiting: deque[Cycle] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flow = FlowControl(self._transport)
        self._has_room = self._make_room()
        self._server.connections.add(self)  # type: ignore[arg-type]
        server, client = get_local_addr(self._transport), get_remote_addr(self._transport)
        self._addresses = {"server": server, "client": client}
        self._is_idle()
        self._look_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)  # type: ignore[arg-type]
        self._stop_head_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._tell_that_it_is_gone()
        self._flow.resume_writing()
        # They refer to this object, which refers to them.
        self._parser = self._cycle = self._answered = None
        self._waiting.clear()

    def shutdown(self) -> None:
        """No further request is wanted; one that is under way may end."""
        if self._cycle is None or self._cycle.response_complete:
            self._transport.close()
        else:
            self._cycle.last()

    def pause_writing(self) -> None:
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def _make_room(self) -> bool:
        clients = cast("set[Protocol]", self._server.connections)
        if not self._room.most or len(clients) < self._room.most:
            return True
        before = self._loop.time() - _SETTLED_S
        idle = min(clients, key=Protocol.idle_since)
        if idle.idle_since() > before:
            return False
        idle.shutdown()
        return True

    def _has_now(self) -> bool:
        self._has_room = len(self._server.connections) <= self._room.most
        return self._has_room

    def idle_since(self) -> float:
        """Loop time; inf while something is under way, or when it is to be closed."""
        if self._idle_since is None or self._transport.is_closing():
            return math.inf
        return self._idle_since

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as offer:
                    data = self._without_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(errors.InvalidRequest(_what_else(data)))
            return
        if self._waiting and self._is_too_far_ahead():
            self._refuse(errors.InvalidRequest("too much was sent ahead of an answer"))
            return
        if self._refused:
            self._refuse(errors.Overloaded("the gateway has no room for more connections", retry_after_s=1))
            return
        if not self._in_head:
            if self._head_timer is not None:
                self._stop_head_timer()
            if self._in_body and self._head_bytes > _HEAD_BYTES:
                self._refuse(errors.HeadTooLarge(f"more than {_HEAD_BYTES} bytes without any of the body"))
            return
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(errors.HeadTooLarge(f"the request's head is larger than {_HEAD_BYTES} bytes"))
        elif self._head_timer is None and self._head_s and not self._is_answering():
            self._head_timer = self._loop.call_later(self._head_s, self._head_did_not_come)

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._idle_since = None
        self._in_head = True
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is no header: it would come after all that was decided by them.
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, headers = self._parser, self._headers
        if parser.should_upgrade():
            # `data_received` deals with it.
            return
        url = httptools.parse_url(self._url)
        path: str = url.path.decode("ascii")
        if not (self._has_room or self._has_now() or path.startswith(_SPARED)):
            self._room.refused += 1
            self._refused = True
            return
        version: str = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "scheme": "http",
            "root_path": "",
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": self._state.copy(),
            **self._addresses,
        }
        fields = dict(reversed(headers))
        if fields.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            # Of another coding the worker would not be told: the header line stays on this hop.
            raise httptools.HttpParserError("a transfer coding that is not spoken here")
        cycle = self._cycle = Cycle(
            scope,
            fields,
            self._transport,
            self._flow,
            self._server.default_headers,
            self._answer_ended,
            version != "1.0" and parser.should_keep_alive(),
            version != "1.0" and b"expect" in fields and fields[b"expect"].lower() == b"100-continue",
        )
        scope["extensions"] = {CLIENT: cycle}
        self._in_body = True
        self._head_bytes = 0
        if self._is_answering():
            self._waiting.append(cycle)
        else:
            self._answer(cycle)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        cycle = self._cycle
        if cycle is None or self._parser.should_upgrade() or cycle.response_complete:
            return
        # Who reads a body decides how fast it comes; one that waits for its turn has nobody yet.
        if cycle.took(body) and cycle is self._answered:
            self._flow.pause_reading()

    def on_message_complete(self) -> None:
        self._in_body = False
        if self._cycle is not None and not self._parser.should_upgrade():
            self._cycle.took_all()
            # Also behind a body whose end came with more than its reader had room for.
            self._flow.resume_reading()

    def _answer(self, cycle: Cycle) -> None:
        self._idle_since = None
        self._unread = 0
        self._answered = cycle
        cycle.task = self._loop.create_task(cycle.run(self._app, self._server.tasks))
        self._server.tasks.add(cycle.task)

    def _answer_ended(self) -> None:
        if not self._transport.is_closing():
            self._flow.resume_reading()
            if self._waiting:
                self._answer(self._waiting.popleft())
                return
        self._is_idle()

    def _is_idle(self) -> None:
        self._idle_since = self._loop.time()

    def _look_if_idle(self) -> None:
        """One timer for a connection, not one for each of its requests."""
        now = self._loop.time()
        idle_s = 0.0 if self._idle_since is None else now - self._idle_since
        if idle_s >= self._idle_s:
            # Also where the client has not read all: a closing connection waits for that, for ever.
            unread = self._transport.get_write_buffer_size()
            if unread and unread == self._unread:
                self._transport.abort()
                return
            if not unread:
                self._transport.close()
                return
            self._unread = unread
            self._idle_since, idle_s = now, 0.0
        self._idle_timer = self._loop.call_later(self._idle_s - idle_s, self._look_if_idle)

    def _is_too_far_ahead(self) -> bool:
        ahead = sum(cycle.size for cycle in self._waiting)
        return len(self._waiting) > _PIPELINED or 0 < self._ahead_bytes < ahead

    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _without_offer(self, rest: bytes) -> bytes:
        """The request whose head was just read as if it had made no offer; `rest` is what follows."""
        offered = b", ".join(value for name, value in self._headers if name == b"upgrade").lower()
        method: str = self._parser.get_method().decode("ascii")
        if method == "CONNECT":
            self._refuse(errors.MethodNotAllowed("CONNECT is not allowed here: this is no forward proxy"))
            return b""
        if b"websocket" in offered:
            # Codex tries one first, goes on by HTTP after a 426, and gives up after a 400.
            answer = errors.NoWebSocket("WebSockets are not served here: use HTTP requests", headers=_BY_HTTP)
            self._refuse(answer)
            return b""
        version = self._parser.get_http_version()
        lines = [f"{method} ".encode() + self._url + f" HTTP/{version}".encode()]
        lines += [name + b": " + value for name, value in self._headers if name not in _UPGRADING]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self._headers):
            lines.append(b"connection: close")
        self._parser = _parser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _head_did_not_come(self) -> None:
        self._head_timer = None
        if not self._transport.is_closing():
            self._refuse(errors.RequestTimeout("the rest of the request's head did not come"))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: errors.ApiError) -> None:
        """Answer and close. An answer to an earlier request that is under way is cut instead."""
        self._stop_head_timer()
        under_way = self._answered if self._is_answering() else None
        is_its_body = under_way is self._cycle and self._in_body
        if under_way is None or (is_its_body and not under_way.response_started):
            content = errors.body(error, "openai")
            head = [b"HTTP/1.1 %d %b" % (error.status, error.code.replace("_", " ").encode())]
            head += [b"%b: %b" % line for line in errors.head(error, content)]
            self._transport.write(b"\r\n".join([*head, b"connection: close", b"", content]))
        self._tell_that_it_is_gone()
        self._transport.close()
        self._is_idle()

    def _tell_that_it_is_gone(self) -> None:
        if self._answered is not None:
            self._answered.gone()


def speaking(settings: Settings, room: Room) -> type[asyncio.Protocol]:
    """The protocol with its limits, as uvicorn's configuration takes it."""
    head_s, ahead_bytes = settings.timeouts.head_s, settings.limits.max_body_bytes
    made = partial(Protocol, head_s=head_s, ahead_bytes=ahead_bytes, room=room)
    return cast(type[asyncio.Protocol], made)


def _parser(protocol: Protocol) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    # An answer under way must be complete before what comes behind the last request is refused.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _what_else(data: bytes) -> str:
    """What was sent instead of a request in HTTP/1.1."""
    if data.startswith(b"PRI * HTTP/2"):
        return "HTTP/2 is not spoken here: use HTTP/1.1"
    if data.startswith(b"\x16\x03"):
        return "this port speaks plain HTTP, not TLS: use an http:// URL"
    return "the request is not valid HTTP"
