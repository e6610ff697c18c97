"""uvicorn's HTTP protocol, with what it leaves open towards clients that are slow, odd or gone."""

import asyncio
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import errors
from gateway.asgi import CLIENT
from gateway.cycle import Cycle
from gateway.settings import Settings

# Agents' heads have 1 to 3 KB; what vLLM's own server takes.
_HEAD_BYTES = 1 << 16
# Requests read ahead of the answer that is under way; each costs some KB.
_PIPELINED = 1024
# What a request says of another protocol that it would rather go on in.
_UPGRADING = frozenset((b"connection", b"upgrade", b"http2-settings"))


class Protocol(HttpToolsProtocol):
    """Answers in our shape what is no HTTP, and:

    * a request's head has a limit in bytes and, from its first byte on, in time (`head_s`, 0: none);
    * so have trailers and all that frames a body, which nothing else counts;
    * an idle connection ends after a while whatever comes that begins no request, and whatever the client
      left unread of its last answer;
    * a client's leaving is noticed whatever it sent before: uvicorn stops reading behind a request that
      waits, and behind more than 64 KiB of a body. What is read ahead has a limit (`ahead_bytes`, 0: none):
      a client that sends more behind a request that is being answered is cut off;
    * offers of another protocol are passed over, as RFC 9110 7.8 allows: Java's client and `curl --http2`
      offer HTTP/2 and go on in HTTP/1.1. uvicorn's parser would take their bodies for that protocol's bytes.
    """

    def __init__(self, *args: Any, head_s: float, ahead_bytes: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head_s = head_s
        self._ahead_bytes = ahead_bytes
        self._in_head = False
        self._in_body = False
        # Since the head began, or since the last of the body.
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._answered: Cycle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn would wait for ever for the first byte of the first request.
        self._end_later_if_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._tell_that_it_is_gone()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as offer:
                    data = self._without_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(errors.InvalidRequest(_what_else(data)))
            return
        if self._is_too_far_ahead():
            self._refuse(errors.InvalidRequest("too much was sent ahead of an answer"))
            return
        if not self._in_head:
            self._stop_head_timer()
            if self._in_body and self._head_bytes > _HEAD_BYTES:
                self._refuse(errors.HeadTooLarge(f"more than {_HEAD_BYTES} bytes without any of the body"))
            return
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(errors.HeadTooLarge(f"the request's head is larger than {_HEAD_BYTES} bytes"))
        elif self._head_timer is None and self._head_s and not self._is_answering():
            self._head_timer = self.loop.call_later(self._head_s, self._head_did_not_come)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head = True
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is no header: it would come after all that was decided by them.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser: Any = self.parser
        scope: Any = self.scope
        scope["method"] = parser.get_method().decode("ascii")
        version = scope["http_version"] = parser.get_http_version()
        if parser.should_upgrade():
            return
        url = httptools.parse_url(self.url)
        scope["raw_path"] = url.path
        path: str = url.path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["query_string"] = url.query or b""
        cycle = self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        scope["extensions"] = {CLIENT: cycle}
        self._in_body = True
        self._head_bytes = 0
        app = cast(ASGIApp, self.app)
        if self._is_answering():
            self.pipeline.appendleft((cycle, app))  # type: ignore[arg-type]
        else:
            self._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        cycle: Any = self.cycle
        if self.parser.should_upgrade() or cycle.response_complete:
            return
        # Who reads a body decides how fast it comes; one that waits for its turn has nobody yet.
        if cycle.took(body) and cycle is self._answered:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        if not self.parser.should_upgrade():
            # Also behind a body whose end came with more than its reader had room for.
            self.flow.resume_reading()

    def _should_upgrade(self) -> bool:
        """That `data_received` deals with a request that offers another protocol, no callback does."""
        return True

    def _start_asgi_task(self, cycle: Cycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._unset_keepalive_if_required()
        self._unread = 0
        self._answered = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_later_if_idle()

    def timeout_keep_alive_handler(self) -> None:
        """Also where the client has not read all: a closing connection waits for that, for ever."""
        unread = self.transport.get_write_buffer_size()
        if unread and unread != self._unread:
            self._unread = unread
            self._end_later_if_idle()
        elif unread:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _end_later_if_idle(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _is_too_far_ahead(self) -> bool:
        if not self.pipeline:
            return False
        waiting = sum(cast(Cycle, cycle).size for cycle, _ in self.pipeline)
        return len(self.pipeline) > _PIPELINED or 0 < self._ahead_bytes < waiting

    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _without_offer(self, rest: bytes) -> bytes:
        """The request whose head was just read as if it had made no offer; `rest` is what follows."""
        offered = b", ".join(value for name, value in self.headers if name == b"upgrade").lower()
        method = self.scope["method"]
        if self._is_answering() or method == "CONNECT" or b"websocket" in offered:
            if method == "CONNECT":
                self._refuse(errors.MethodNotAllowed("CONNECT is not allowed here: this is no forward proxy"))
            else:
                self._refuse(errors.InvalidRequest("WebSockets are not served here: use HTTP requests"))
            return b""
        version = self.parser.get_http_version()
        lines = [f"{method} ".encode() + self.url + f" HTTP/{version}".encode()]
        lines += [name + b": " + value for name, value in self.headers if name not in _UPGRADING]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _head_did_not_come(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(errors.RequestTimeout("the rest of the request's head did not come"))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: errors.ApiError) -> None:
        """Answer and close. An answer to an earlier request that is under way is cut instead."""
        self._stop_head_timer()
        under_way = self._answered if self._is_answering() else None
        is_its_body = under_way is self.cycle and not self._in_head
        if under_way is None or (is_its_body and not under_way.response_started):
            content = errors.body(error, "openai")
            head = [b"HTTP/1.1 %d %b" % (error.status, error.code.replace("_", " ").encode())]
            head += [b"%b: %b" % line for line in errors.head(error, content)]
            self.transport.write(b"\r\n".join([*head, b"connection: close", b"", content]))
        self._tell_that_it_is_gone()
        self.transport.close()
        self._unset_keepalive_if_required()
        self._end_later_if_idle()

    def _tell_that_it_is_gone(self) -> None:
        """uvicorn tells the last request only, not one before it that is being answered."""
        if self._answered is not None:
            self._answered.gone()


def speaking(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol with its limits, as uvicorn's configuration takes it."""
    limits = {"head_s": settings.timeouts.head_s, "ahead_bytes": settings.limits.max_body_bytes}
    return cast(type[asyncio.Protocol], partial(Protocol, **limits))


def _what_else(data: bytes) -> str:
    """What was sent instead of a request in HTTP/1.1."""
    if data.startswith(b"PRI * HTTP/2"):
        return "HTTP/2 is not spoken here: use HTTP/1.1"
    if data.startswith(b"\x16\x03"):
        return "this port speaks plain HTTP, not TLS: use an http:// URL"
    return "the request is not valid HTTP"
