"""A port that serves an ASGI application, can stop listening and can break its connections in every way."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Final, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Listener:
    """Listens on `host:port` from `open` to `close`, any number of times; connections outlive `close`."""

    def __init__(self, app: Callable[..., Any], host: str, port: int) -> None:
        self._config: Final = Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_keep_alive=5,  # vLLM's
        )
        self._config.load()
        self._state: Final = ServerState()
        self._second = 0
        self._host: Final = host
        self._port: Final = port
        self._server: asyncio.Server | None = None
        self._transports: Final[dict[tuple[str, int], asyncio.Transport]] = {}
        self.resetting = False

    async def open(self) -> None:
        """Raises OSError when the port is taken."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                self._protocol, self._host, self._port, reuse_address=True, backlog=2048
            )

    def close(self) -> None:
        """From now on connections are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def transport(self, client: tuple[str, int]) -> asyncio.Transport | None:
        return self._transports.get(client)

    def reset_all(self) -> None:
        for transport in list(self._transports.values()):
            reset(transport)

    def _protocol(self) -> asyncio.Protocol:
        return _Watched(self, self._config, self._state)

    def look_at_clock(self) -> None:
        """As vLLM's, answers tell the time."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            date = formatdate(second, usegmt=True).encode()
            self._state.default_headers = [(b"date", date), (b"server", b"uvicorn")]

    def accepted(self, transport: asyncio.Transport) -> None:
        self._transports[transport.get_extra_info("peername")[:2]] = transport
        if self.resetting:
            reset(transport)

    def lost(self, transport: asyncio.Transport) -> None:
        self._transports.pop(transport.get_extra_info("peername")[:2], None)


class _Watched(HttpToolsProtocol):
    """uvicorn's protocol, which tells its listener about its connection."""

    def __init__(self, listener: Listener, config: Config, state: ServerState) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.accepted(transport)

    def data_received(self, data: bytes) -> None:
        self._listener.look_at_clock()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.lost(self.transport)
        super().connection_lost(exc)


def reset(transport: asyncio.Transport) -> None:
    """RST: what was not sent yet is lost."""
    connection = cast("socket.socket | None", transport.get_extra_info("socket"))
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def end(transport: asyncio.Transport) -> None:
    """FIN after what was written, whatever the response lacks."""
    transport.close()
