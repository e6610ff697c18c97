"""One HTTP exchange with a client: its request, its body, and every way its response can go."""

import asyncio
import random
import re

from gateway.asgi import CLIENT, Client, Headers, Scope
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

    fields: the first value of each header, by its name in lower case.
    `started` is true once response headers went out, `finished` once the last byte did; `sent_at` is the loop
    time at which the last piece before that was sent. `stalled`: the client took nothing for too long.
    `task` is the one that answers.
    """

    started = False
    finished = False
    stalled = False
    sent_at = 0.0
    _gone = False
    _interrupts = False
    _stall_s = 0.0
    _timer: asyncio.TimerHandle | None = None
    _sending_since: float | None = None

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self._scope = scope
        self._client: Client = scope["extensions"][CLIENT]
        task = self._client.task
        assert task is not None
        self.task = task
        # Asking which loop runs would ask the kernel which process this is.
        self._loop = task.get_loop()
        self.fields = self._client.fields
        given = self.fields.get(b"x-request-id")
        self.request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else _new_id()

    @property
    def now(self) -> float:
        """Loop time."""
        return self._loop.time()

    @property
    def target(self) -> bytes:
        """Path and query exactly as the client wrote them."""
        path, query = self._scope["raw_path"], self._scope["query_string"]
        return path + b"?" + query if query else path

    async def read_body(self, limit: int, pause_s: float = 0.0) -> bytes:
        """The whole body. Raises PayloadTooLarge beyond `limit` bytes (0: no limit), ClientGone.

        RequestTimeout where nothing of it comes for `pause_s` seconds (0: no limit).
        """
        declared = self.fields.get(b"content-length")
        if limit and declared and declared.isdigit() and int(declared) > limit:
            raise PayloadTooLarge(f"the body is larger than {limit} bytes")
        body = await self._client.whole_body(limit, pause_s)
        if body is None:
            raise ClientGone
        return body

    def interrupts(self, stall_s: float = 0.0) -> None:
        """From now on the client's leaving cancels the task, at any await, until `lets_be`.

        So does a client that takes nothing of what is sent for `stall_s` seconds (0: it may). Call after
        `read_body`.
        """
        self._interrupts = True
        self._stall_s = stall_s
        self._client.on_gone(self._leave)

    def lets_be(self) -> None:
        self._interrupts = False
        self._client.on_gone(None)
        if self._timer is not None:
            self._timer.cancel()

    def raise_if_gone(self) -> None:
        """Where the task was cancelled: raises ClientGone if its client did that, and nobody else."""
        if self._gone and not self.task.uncancel():
            raise ClientGone from None

    def start(self, status: int, headers: Headers, *, alone: bool = False) -> None:
        """`alone`: the body's first piece may be long in coming."""
        self.started = True
        self._client.start(status, headers, alone=alone)

    async def send(self, chunk: bytes) -> None:
        """Returns once the client's socket can take more: a slow reader slows the worker, not our memory."""
        self.sent_at = self._loop.time()
        if self._client.full:
            await self._room()
        self._client.write(chunk)

    def pass_on(self, chunk: bytes) -> bool:
        """As `send`, for who can't wait; whether it may be called again before `send` was."""
        self.sent_at = self._loop.time()
        self._client.write(chunk)
        return not self._client.full

    def abort(self) -> None:
        """Drop the connection with whatever is still to be written: to a client that does not read."""
        self._client.abort()

    async def finish(self, chunk: bytes = b"") -> None:
        if self._client.full:
            await self._room()
        self._client.write(chunk, more=False)
        self.finished = True

    @property
    def full(self) -> bool:
        """Whether `send` would wait."""
        return self._client.full

    @property
    def is_sending(self) -> bool:
        """Whether a piece waits until the client read."""
        return self._sending_since is not None

    async def _room(self) -> None:
        """Wait until the client read."""
        self._sending_since = self._loop.time()
        self._look_later()
        await self._client.room()
        self._sending_since = None

    def _leave(self) -> None:
        if self._interrupts and not self.finished and not self._gone:
            self._gone = True
            self.task.cancel()

    def _look_later(self) -> None:
        """One timer for a turn, not one for each chunk; most turns never need it."""
        if self._timer is None and self._stall_s and self._interrupts:
            self._timer = self._loop.call_later(self._stall_s / 4, self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._timer = None
        if self._sending_since is None:
            return
        if self._loop.time() - self._sending_since >= self._stall_s:
            self.stalled = True
            self._leave()
        else:
            self._look_later()
