"""Bodies of the admin API, read whole and no larger than they may be, before a framework reads them."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import PayloadTooLarge, send_error


class Bounded:
    """`app` with bodies of at most `limit` bytes (0: no limit); larger ones are answered with 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts, size, more = list[bytes](), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if self._limit and size > self._limit:
                error = PayloadTooLarge(f"the body is larger than {self._limit} bytes")
                await send_error(error, scope, send)
                return
            more = message.get("more_body", False)
        unread: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def receive_rest() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_rest, send)
