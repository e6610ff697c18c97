"""Talking to workers: one narrow interface, and aiohttp behind it.

aiohttp carries the hot path because it costs a tenth of httpx's CPU per request at 1 KB, a fifth at 350 KB
(16 in flight); httpx stays where requests are few (probes, discovery, the command line).
"""

import asyncio
import errno
from collections.abc import AsyncGenerator
from typing import Protocol

import aiohttp
from yarl import URL

from gateway.exchange import Headers

# Shorter than the 5 s after which uvicorn, and so vLLM, closes an idle connection.
_KEEPALIVE_S = 4.0
_READ_BUFFER_BYTES = 1 << 16
# Connecting failed for want of something on this side: no worker is to blame.
_OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


class UpstreamError(Exception):
    """The worker could not be talked to.

    kind: connect, connect_timeout, timeout, reset, or descriptors: this process has none left.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class UpstreamResponse(Protocol):
    """A worker's answer: status and headers are there, the body is still to be read."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers:
        """Raw header lines, names in lower case, in the worker's order."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Body bytes as they come. Raises UpstreamError when the worker breaks off or falls silent."""
        ...

    async def aclose(self) -> None:
        """Give the connection back if the body was read to its end, else cut it off at once."""
        ...


class Transport(Protocol):
    async def open(self, method: str, url: str, headers: Headers, body: bytes) -> UpstreamResponse:
        """Send a request and wait for the response's head, as long as it takes. Raises UpstreamError."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse, between_chunks_s: float) -> None:
        self._response = response
        self._between_chunks_s = between_chunks_s
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        content = self._response.content
        try:
            while True:
                async with asyncio.timeout(self._between_chunks_s or None):
                    chunk = await content.readany()
                if not chunk:
                    return
                yield chunk
        except TimeoutError:
            raise UpstreamError("timeout") from None
        except (aiohttp.ClientError, OSError):
            raise UpstreamError("reset") from None

    async def aclose(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def _text(value: bytes) -> str:
    """A header's value as aiohttp, which writes UTF-8, sends the same bytes where it can."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class AiohttpTransport:
    """Pooled connections to all workers, without limit on their number and without touching bodies."""

    def __init__(self, *, connect_s: float, between_chunks_s: float) -> None:
        self._connect_s = connect_s
        self._between_chunks_s = between_chunks_s
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=_READ_BUFFER_BYTES,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
            trust_env=False,
        )

    async def open(self, method: str, url: str, headers: Headers, body: bytes) -> AiohttpResponse:
        assert self._session is not None
        lines = [(name.decode("latin-1"), _text(value)) for name, value in headers]
        try:
            response = await self._session.request(
                method,
                URL(url, encoded=True),
                headers=lines,
                data=body or None,
                allow_redirects=False,
            )
        except aiohttp.ConnectionTimeoutError:
            raise UpstreamError("connect_timeout") from None
        except aiohttp.ClientConnectorError as error:
            raise UpstreamError("descriptors" if error.errno in _OUR_OWN else "connect") from None
        except (aiohttp.ClientError, OSError):
            raise UpstreamError("reset") from None
        return AiohttpResponse(response, self._between_chunks_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
