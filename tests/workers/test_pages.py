"""Questions that the gateway asks by itself, of a worker or a master whose answer never ends."""

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
import pytest_asyncio

from gateway.prompts.rendering import NotRendered, WorkerRenderer
from store.mooncake_http import MasterAway, MooncakeHttp
from workers.connecting import trusting
from workers.fleet import Fleet
from workers.pages import CodedPage, PageTooLong, read_page
from workers.probe import Probe

MB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Endless:
    """Answers whatever it is asked with chunks of `size` bytes, `pause_s` apart, until nobody listens."""

    def __init__(self, size: int, pause_s: float) -> None:
        self.chunk = b"%x\r\n" % size + b"[" * size + b"\r\n"
        self.pause_s = pause_s
        self.sent = 0
        self.left = asyncio.Event()
        self.port = 0

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(HEAD)
            while True:
                writer.write(self.chunk)
                await writer.drain()
                self.sent += len(self.chunk)
                await asyncio.sleep(self.pause_s)
        except ConnectionError:
            self.left.set()
        finally:
            writer.close()


@pytest_asyncio.fixture
async def endless() -> AsyncIterator[Callable[[int, float], Awaitable[Endless]]]:
    servers: list[asyncio.Server] = []

    async def start(size: int, pause_s: float) -> Endless:
        peer = Endless(size, pause_s)
        servers.append(await asyncio.start_server(peer.answer, "127.0.0.1", 0))
        peer.port = servers[-1].sockets[0].getsockname()[1]
        return peer

    yield start
    for server in servers:
        server.close()


async def test_a_page_ends_at_its_limit_of_bytes_and_of_seconds(endless) -> None:
    fast, slow = await endless(MB, 0.0), await endless(1, 0.001)
    async with httpx.AsyncClient(timeout=5.0) as client:
        with pytest.raises(PageTooLong):
            await read_page(client, "GET", f"http://127.0.0.1:{fast.port}/", timeout_s=60.0, limit=3 * MB)
        with pytest.raises(TimeoutError):
            await read_page(client, "GET", f"http://127.0.0.1:{slow.port}/", timeout_s=0.1, limit=3 * MB)
        # They are cut, not drained.
        async with asyncio.timeout(30):
            await fast.left.wait()
            await slow.left.wait()


async def test_b098_what_unpacks_without_end_is_not_unpacked() -> None:
    packed = gzip.compress(gzip.compress(bytes(256 * MB), 1), 9)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip, gzip\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(packed) + packed)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    tracemalloc.start()
    async with httpx.AsyncClient() as client:
        with pytest.raises(CodedPage):
            await read_page(client, "GET", url, timeout_s=60.0, limit=3 * MB)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    server.close()
    assert b"accept-encoding: identity" in asked[0].lower()
    assert most < 16 * MB


async def test_b098_a_probe_of_an_endless_worker_ends_and_the_worker_is_down(endless) -> None:
    peer = await endless(MB, 0.0)
    fleet = Fleet()
    worker = fleet.add(f"http://127.0.0.1:{peer.port}")
    probe = Probe(fleet, tls=trusting(), timeout_s=60.0)
    await probe.probe(worker)
    await probe.close()
    assert worker.state != "up"
    assert worker.reason == "/health: PageTooLong"
    assert peer.sent < 64 * MB


@pytest.mark.parametrize(("size", "pause_s", "reason"), [(MB, 0.0, "unreadable"), (1, 0.001, "slow")])
async def test_b098_rendering_by_an_endless_worker_ends(
    endless, size: int, pause_s: float, reason: str
) -> None:
    peer = await endless(size, pause_s)
    renderer = WorkerRenderer("", trusting(), timeout_s=60.0 if reason == "unreadable" else 0.1)
    with pytest.raises(NotRendered, match=reason):
        await renderer.tokens(f"http://127.0.0.1:{peer.port}", "/v1/chat/completions", b"{}")
    await renderer.close()
    assert peer.sent < 64 * MB


@pytest.mark.parametrize(("size", "pause_s", "reason"), [(MB, 0.0, "garbage"), (1, 0.001, "timeout")])
async def test_b098_an_endless_master_is_away(endless, size, pause_s, reason) -> None:
    peer = await endless(size, pause_s)
    async with MooncakeHttp("127.0.0.1", peer.port) as master:
        with pytest.raises(MasterAway, match=reason):
            await master.health(60.0 if reason == "garbage" else 0.1)
    assert peer.sent < 64 * MB
