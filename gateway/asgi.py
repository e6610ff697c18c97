"""The words of ASGI, and an extension to it by which our own server and a turn talk."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CLIENT = "moongate.client"
"""The ASGI extension of our own server: a `Client`."""
BODY_FOLLOWS = "moongate.body_follows"
"""In a message that starts a response: its body's first piece is sent next, so both may go out as one."""


class Client(Protocol):
    """The client of one request, for what ASGI's messages can't say or cost more for."""

    async def whole_body(self, limit: int, pause_s: float) -> bytes | None:
        """The whole body, None if the client left. Instead of `receive`.

        Raises PayloadTooLarge beyond `limit` bytes (0: no limit), RequestTimeout where nothing of it comes
        for `pause_s` seconds (0: no limit).
        """
        ...

    @property
    def full(self) -> bool:
        """Whether the client has to read before it can be sent more."""
        ...

    def write(self, chunk: bytes) -> None:
        """As sending a piece of a body that is not the last one, without waiting for room."""
        ...

    def abort(self) -> None:
        """Drop the connection at once. Closing it would wait until the client took all that was written."""
        ...

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """What to call when the client leaves before its answer is complete, None: nothing any more.

        `receive` would tell it, too, but to a task more for every turn.
        """
        ...
