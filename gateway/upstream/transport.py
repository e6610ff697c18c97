"""Talking to workers, as turns see it: one narrow interface. Behind it: `gateway.upstream.connections`.

Own code on a parser of nodejs's, because it carries the hot path: it costs half of aiohttp's CPU at 1 KB, a
tenth of httpx's. Those stay where requests are few (probes, discovery, the pool, the command line).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.asgi import Headers
from gateway.upstream.http1 import UpstreamError as UpstreamError


class UpstreamResponse(Protocol):
    """A worker's answer: status and headers are there, the body is still to be read."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers:
        """Header lines, names in lower case, in the worker's order."""
        ...

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        """Their values by name, those of a repeated one joined by commas."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the next `read` would have to wait."""
        ...

    @property
    def read_whole(self) -> bool:
        """Whether the next `read` would give b"" without waiting."""
        ...

    async def read(self) -> bytes:
        """The next bytes of the body, as soon as there are any; b"" at its end.

        Raises UpstreamError when the worker breaks off or falls silent.
        """
        ...

    def taken(self) -> bytes:
        """As `read`, where that would not wait."""
        ...

    async def forward(self, take: Callable[[bytes], bool]) -> None:
        """Give `take` the next bytes of the body whenever some come, until it says False.

        Ends before, where `read` would not wait or raises: at the last bytes, or when the worker breaks off.
        """
        ...

    def close(self) -> None:
        """No more will be read. Cuts the connection at once if the body is not at its end."""
        ...


class Transport(Protocol):
    async def open(
        self, method: str, worker: str, target: bytes, headers: Headers, body: bytes
    ) -> UpstreamResponse:
        """Send a request and wait for the answer's status and headers, as long as it takes.

        worker: its URL. target: path and query. headers: without Host, and without lines that frame the body.
        Raises UpstreamError.
        """
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...
