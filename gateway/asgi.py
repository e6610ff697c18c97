"""The words of ASGI, and two extensions to it by which our own server and a turn talk."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# ASGI extensions of our own server: a function that drops the client's connection at once, and one that takes
# what is to be called when the client leaves before its answer is complete (None: nothing any more).
# `receive` would tell it, too, but to a task more for every turn.
ABORT = "moongate.abort"
ON_GONE = "moongate.on_gone"
OnGone = Callable[[Callable[[], None] | None], None]
