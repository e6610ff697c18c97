"""One HTTP exchange with a client over ASGI: its request, its body, and every way its response can go."""

import asyncio
import random
import re
from collections.abc import Callable
from types import TracebackType

from gateway.asgi import BODY_FOLLOWS, CLIENT, Client, Headers, Scope, Send
from gateway.errors import PayloadTooLarge

# Their own generator, seeded by the system: ids have to be unique, nobody has to be unable to guess them.
_ids = random.Random()
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _new_id() -> str:
    return f"{_ids.getrandbits(128):032x}"


class ClientGone(Exception):
    """The client closed its connection before its response was complete."""


class Exchange:
    """A client's request and the response to it.

    `started` is true once response headers went out, `finished` once the last byte did; `sent_at` is the loop
    time at which the last piece before that was sent.
    """

    started = False
    finished = False
    stalled = False
    sent_at = 0.0
    _watch: Callable[[], None] | None = None
    _sending_since: float | None = None

    def __init__(self, scope: Scope, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope.get("raw_path") or self.path.encode()
        self.query: bytes = scope.get("query_string", b"")
        self.headers: Headers = scope["headers"]
        self.client: str = (scope.get("client") or ("", 0))[0]
        self._first = dict(reversed(self.headers))
        self._loop = asyncio.get_running_loop()
        self._client: Client = scope["extensions"][CLIENT]
        self._send = send
        given = self.header(b"x-request-id")
        self.request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else _new_id()

    def header(self, name: bytes) -> bytes | None:
        """The first value of the header `name` (lower case)."""
        return self._first.get(name)

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
        body = await self._client.whole_body(limit, pause_s)
        if body is None:
            raise ClientGone
        return body

    def connected(self, stall_s: float = 0.0) -> "_Connected":
        """Run a block only while the client listens; its leaving raises ClientGone inside, at any await.

        So does a client that takes nothing of what is sent for `stall_s` seconds (0: it may); `stalled` is
        true then. Call after `read_body`.
        """
        return _Connected(self, self._client, stall_s)

    def watched(self, begin: Callable[[], None] | None) -> None:
        """`begin` is called whenever the client has to read before it can be sent more. None: no more."""
        self._watch = begin

    def silent_for(self, now: float) -> float:
        """For how many seconds the client has taken nothing of what is being sent to it."""
        return 0.0 if self._sending_since is None else now - self._sending_since

    async def start(self, status: int, headers: Headers, *, alone: bool = False) -> None:
        """`alone`: the body's first piece may be long in coming."""
        self.started = True
        await self._send(
            {"type": "http.response.start", "status": status, "headers": headers, BODY_FOLLOWS: not alone}
        )

    async def send(self, chunk: bytes) -> None:
        """Returns once the client's socket can take more: a slow reader slows the worker, not our memory."""
        self.sent_at = self._loop.time()
        self._expects_reading()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sending_since = None

    def pass_on(self, chunk: bytes) -> bool:
        """As `send`, for who can't wait; whether it may be called again before `send` was."""
        self.sent_at = self._loop.time()
        self._client.write(chunk)
        return not self._client.full

    def abort(self) -> None:
        """Drop the connection with whatever is still to be written: to a client that does not read."""
        self._client.abort()

    async def finish(self, chunk: bytes = b"") -> None:
        self._expects_reading()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
        self.finished = True

    @property
    def full(self) -> bool:
        """Whether `send` would wait."""
        return self._client.full

    @property
    def is_sending(self) -> bool:
        """Whether a piece waits until the client read."""
        return self._sending_since is not None

    def _expects_reading(self) -> None:
        """The next piece waits until the client read, if it has to."""
        if self._client.full:
            self._sending_since = self._loop.time()
            if self._watch is not None:
                self._watch()


class _Connected:
    """The context manager of `Exchange.connected`."""

    __slots__ = ("_client", "_exchange", "_gone", "_stall_s", "_task", "_timer")

    def __init__(self, exchange: Exchange, client: Client, stall_s: float) -> None:
        self._exchange = exchange
        self._client = client
        self._stall_s = stall_s
        self._gone = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._stall_s:
            self._exchange.watched(self._look_later)
        self._client.on_gone(self._leave)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.on_gone(None)
        self._exchange.watched(None)
        if self._timer is not None:
            self._timer.cancel()
        if (
            self._gone
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
            and not self._task.uncancel()
        ):
            raise ClientGone from None

    def _leave(self) -> None:
        if not self._exchange.finished and not self._gone:
            self._gone = True
            self._task.cancel()

    def _look_later(self) -> None:
        """One timer for a turn, not one for each chunk; most turns never need it."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._stall_s / 4, self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._timer = None
        silent_s = self._exchange.silent_for(asyncio.get_running_loop().time())
        if silent_s >= self._stall_s and not self._gone:
            self._exchange.stalled = self._gone = True
            self._task.cancel()
        elif silent_s:
            self._look_later()
