"""What a worker says of itself, read whole: within a number of bytes and of seconds, whatever it sends."""

import asyncio

import httpx

_PLAIN = {"accept-encoding": "identity"}


class PageTooLong(httpx.HTTPError):
    """More bytes than a page of its kind can have."""


class CodedPage(httpx.HTTPError):
    """Compressed, though it was to be plain."""


async def read_page(
    client: httpx.AsyncClient, method: str, url: str, *, timeout_s: float, limit: int, content: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of at most `limit` bytes. Raises TimeoutError, httpx.HTTPError.

    Compressed ones are not asked for nor read: 3 KB, packed twice, unpack to 2 GB in one step. httpx's own
    time limits are for one read each, and it keeps all that comes: a worker that never ends its answer would
    be waited for, and kept, for ever.
    """
    try:
        request = client.stream(method, url, content=content, headers=_PLAIN)
        async with asyncio.timeout(timeout_s), request as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise CodedPage("compressed, against what was asked for")
            parts, size = list[bytes](), 0
            async for part in response.aiter_raw():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise PageTooLong(f"more than {limit} bytes")
    except httpx.TimeoutException:
        raise TimeoutError from None
    return response.status_code, b"".join(parts)
