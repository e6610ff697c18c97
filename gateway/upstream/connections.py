"""Connections to all workers, kept alive between turns."""

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections import deque
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from gateway.asgi import Headers
from gateway.deadline import Deadline
from gateway.upstream.http1 import Connection, Response, UpstreamError, request_head
from workers.connecting import why_not

# Shorter than the 5 s after which uvicorn, and so vLLM, closes an idle connection.
_KEEPALIVE_S = 4.0
# Idle connections to one worker; what is more is closed when its answer is through.
_IDLE = 1024
# Names are looked up in a thread each time otherwise: agents' turns come seldom enough for a new connection.
_ADDRESSES_S = 30.0
# Connecting failed for want of something on this side: no worker is to blame.
_OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
# Between two looks for some.
_NONE_LEFT_S = 0.02


@dataclass(slots=True, eq=False)
class _Origin:
    """A worker's address, and its idle connections with the latest at the right.

    url: as it is registered. literal: its host is an address. authority: the Host line's value.
    prefix: what its URL has before every path. until: loop time up to which `addresses` are good.
    """

    url: str
    host: str
    literal: bool
    port: int
    secure: bool
    authority: bytes
    prefix: bytes
    addresses: list[str] = field(default_factory=list[str])
    until: float = 0.0
    used: float = 0.0
    idle: deque[Connection] = field(default_factory=deque[Connection])


class Connections:
    """The transport to workers. No limit on connections in use: each is a turn's, and those are limited."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext,
        connect_s: float,
        between_chunks_s: float,
        keepalive_s: float = _KEEPALIVE_S,
    ) -> None:
        """tls: what https:// workers are verified by. connect_s: for all that connecting takes but what this
        process is held up for.

        between_chunks_s: of a body, 0: no limit.
        """
        self._tls = tls
        self._connect_s = connect_s
        self._between_chunks_s = between_chunks_s
        self._keepalive_s = keepalive_s
        self._origins: dict[str, _Origin] = {}
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._tidy()

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()
        self._origins.clear()

    async def open(self, method: str, worker: str, target: bytes, headers: Headers, body: bytes) -> Response:
        """As `Transport.open` has it.

        A request that finds its idle connection closed under it goes out once more, on a new one: the worker
        closed that one for its age, before it saw the request.
        """
        origin = self._origins.get(worker) or self._origin(worker)
        head = request_head(method, origin.prefix + target, origin.authority, headers, len(body))
        loop = asyncio.get_running_loop()
        origin.used = loop.time()
        while origin.idle:
            connection = origin.idle.pop()
            if connection.closed or origin.used - connection.idle_since >= self._keepalive_s:
                connection.abort()
                continue
            try:
                return await connection.ask(method, head, body, self._between_chunks_s).begun()
            except UpstreamError:
                if not connection.stale:
                    raise
                break
        connection = await self._connect(origin)
        return await connection.ask(method, head, body, self._between_chunks_s).begun()

    def _origin(self, worker: str) -> _Origin:
        parts = urlsplit(worker)
        secure = parts.scheme == "https"
        origin = self._origins[worker] = _Origin(
            worker,
            host=parts.hostname or "",
            literal=_is_address(parts.hostname or ""),
            port=parts.port or (443 if secure else 80),
            secure=secure,
            authority=parts.netloc.encode(),
            prefix=parts.path.rstrip("/").encode(),
        )
        return origin

    async def _connect(self, origin: _Origin) -> Connection:
        """Raises UpstreamError. Waits for descriptors as for a worker: refused clients give theirs back."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._connect_s
        while True:
            try:
                return await self._once_connected(origin)
            except UpstreamError as error:
                if error.kind != "descriptors" or loop.time() >= until:
                    raise
            await asyncio.sleep(_NONE_LEFT_S)

    async def _once_connected(self, origin: _Origin) -> Connection:
        """Raises UpstreamError."""
        try:
            return await self._connected(origin)
        except TimeoutError:
            origin.until = 0.0
            raise UpstreamError("connect_timeout") from None
        except ssl.SSLError as error:
            raise UpstreamError("tls", why_not(error)) from None
        except OSError as error:
            origin.until = 0.0
            kind = "descriptors" if error.errno in _OUR_OWN else "connect"
            raise UpstreamError(kind, why_not(error)) from None

    async def _connected(self, origin: _Origin) -> Connection:
        """By the first of its addresses that takes it; each gets its share of the time. Raises OSError."""
        with Deadline.after_looking(self._connect_s):
            return await self._first_that_takes(origin, await self._addresses(origin))

    async def _first_that_takes(self, origin: _Origin, addresses: list[str]) -> Connection:
        loop = asyncio.get_running_loop()
        failed = OSError(errno.EHOSTUNREACH, "no address")
        for address in addresses:
            try:
                with Deadline.after_looking(self._connect_s / len(addresses)):
                    _, connection = await loop.create_connection(
                        lambda: Connection(lambda free: self._keep(origin, free), self._open.discard),
                        address,
                        origin.port,
                        ssl=self._tls if origin.secure else None,
                        server_hostname=origin.host if origin.secure else None,
                    )
            except OSError as error:
                failed = error
                continue
            if not connection.closed:
                self._open.add(connection)
            # The next one begins here: of those before it each may have cost its share of the time.
            origin.addresses = _first(address, addresses)
            return connection
        raise failed

    async def _addresses(self, origin: _Origin) -> list[str]:
        """Raises OSError."""
        if origin.literal:
            # Nothing to look up, so nothing that could keep a turn waiting for a thread.
            return [origin.host]
        loop = asyncio.get_running_loop()
        if loop.time() >= origin.until:
            try:
                # So that a name server that says nothing leaves time for addresses that are known.
                with Deadline.after_looking(self._connect_s / 2):
                    found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
                origin.addresses = _first(origin.addresses[0], addresses) if origin.addresses else addresses
            except OSError:
                # Name servers are away more often than workers move.
                if not origin.addresses:
                    raise
            origin.until = loop.time() + _ADDRESSES_S
        return origin.addresses

    def _keep(self, origin: _Origin, connection: Connection) -> None:
        if self._origins.get(origin.url) is origin and len(origin.idle) < _IDLE:
            origin.idle.append(connection)
        else:
            connection.abort()

    def _tidy(self) -> None:
        """Close what has been idle for too long, and forget workers that nobody has asked for a while."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for name, origin in list(self._origins.items()):
            while origin.idle and (
                origin.idle[0].closed or now - origin.idle[0].idle_since >= self._keepalive_s
            ):
                origin.idle.popleft().abort()
            if not origin.idle and now - origin.used > _ADDRESSES_S:
                del self._origins[name]
        self._sweep = loop.call_later(self._keepalive_s / 4, self._tidy)


def _first(address: str, addresses: list[str]) -> list[str]:
    """`addresses`, the one that worked last before the others if it is still among them."""
    return sorted(addresses, key=lambda other: other != address)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
