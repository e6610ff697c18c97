"""What a worker says of itself, read whole: within a number of bytes and of seconds, whatever it sends."""

import asyncio

import httpx


class PageTooLong(httpx.HTTPError):
    """More bytes than a page of its kind can have."""


async def read_page(
    client: httpx.AsyncClient, method: str, url: str, *, timeout_s: float, limit: int, content: bytes = b""
) -> tuple[int, bytes]:
    """Status and body of at most `limit` bytes, after decompression. Raises TimeoutError, httpx.HTTPError.

    httpx's own time limits are for one read each, and it keeps all that comes: a worker that never ends its
    answer would be waited for, and kept, for ever.
    """
    try:
        async with asyncio.timeout(timeout_s), client.stream(method, url, content=content) as response:
            parts, size = list[bytes](), 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise PageTooLong(f"more than {limit} bytes")
    except httpx.TimeoutException:
        raise TimeoutError from None
    return response.status_code, b"".join(parts)
