"""The words of ASGI, and an extension to it by which our own server and a turn talk."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CLIENT = "moongate.client"
"""The ASGI extension of our own server: a `Client`."""


class Client(Protocol):
    """The client of one request, for what ASGI's messages can't say or cost more for."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The one that answers the request."""
        ...

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """The request's header values by name in lower case, the first one of each."""
        ...

    async def whole_body(self, limit: int, pause_s: float) -> bytes | None:
        """The whole body, None if the client left. Instead of `receive`.

        Raises PayloadTooLarge beyond `limit` bytes (0: no limit), RequestTimeout where nothing of it comes
        for `pause_s` seconds (0: no limit).
        """
        ...

    def start(self, status: int, headers: Headers, *, alone: bool = True) -> None:
        """The answer's head, names in lower case. Not `alone`: it goes out with the body's first piece."""
        ...

    def write(self, piece: bytes, more: bool = True) -> None:
        """A piece of the body, the last one unless there is `more`. Nothing once the client left."""
        ...

    @property
    def full(self) -> bool:
        """Whether the client has to read before it should be sent more."""
        ...

    async def room(self) -> None:
        """Wait until it has, or left."""
        ...

    def last(self) -> None:
        """Ask the client, with the answer's head, for another connection next time."""
        ...

    def abort(self) -> None:
        """Drop the connection at once, so that nothing of the answer looks whole.

        Closing it would wait until the client took all that was written.
        """
        ...

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """What to call when the client leaves before its answer is complete, None: nothing any more.

        `receive` would tell it, too, but to a task more for every turn.
        """
        ...
