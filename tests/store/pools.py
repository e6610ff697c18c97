"""Pool views over a real Mooncake master, and what stands between the two when a test wants it to."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, Literal

import pytest

from store.hashing import Chain, Digests
from store.keys import KeyLayout
from store.pool import PoolView
from tests.ports import ports
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool

PORTS = ports(above=21_240)
Lookup = Literal["http", "rpc"]
LAYOUT = KeyLayout("tiny")
TWO_RANKS = KeyLayout("tiny", tp_ranks=2)
# Where a test asks what is true, not how fast: this machine may be busy.
PATIENT_S = 2.0


def chain_of(name: str, blocks: int) -> Chain:
    return Chain.of(
        Digests(b"".join(hashlib.sha256(f"{name}{n}".encode()).digest() for n in range(blocks)), 32)
    )


async def until(condition: Callable[[], Awaitable[bool]], budget_s: float = 30.0) -> None:
    """For what another process does in its own time."""
    async with asyncio.timeout(budget_s):
        while not await condition():
            await asyncio.sleep(0.02)


@contextmanager
def patient_watches() -> Iterator[None]:
    """Meanwhile a master that takes half a second to answer a watch counts as one that answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.master_watch._TIMEOUT_S", 20.0)
        yield


@asynccontextmanager
async def viewing(
    address: str, http_port: int, budget_s: float = PATIENT_S, lookup: Lookup = "http", **more: Any
) -> AsyncIterator[PoolView]:
    view = PoolView(address, http_port=http_port, budget_s=budget_s, lookup=lookup, **more)
    with patient_watches() if budget_s >= PATIENT_S else nullcontext():
        await view.start()
        try:
            yield view
        finally:
            await view.close()


async def blocks(view: PoolView, chain: Chain, layout: KeyLayout = LAYOUT, limit: int | None = None) -> int:
    """What a look finds; a master that did not answer in time is asked again."""
    async with asyncio.timeout(60):
        while True:
            found = await view.prefix(chain, layout, limit=limit)
            if found.known and found.exact:
                return found.blocks
            await asyncio.sleep(0.02)


@asynccontextmanager
async def storing(master: MooncakeMaster, layout: KeyLayout = LAYOUT) -> AsyncIterator[SimPool]:
    pool = SimPool(
        master.address, f"127.0.0.1:{next(PORTS)}", layout, block_bytes=1024, segment_bytes=16 << 20
    )
    assert pool.connect()
    yield pool
    pool.close()


@asynccontextmanager
async def counting(master: MooncakeMaster) -> AsyncIterator[tuple[list[int], int]]:
    """A proxy that counts look-ups."""
    counted: list[int] = []
    async with proxying(
        master, on_request=lambda data: counted.append(data.count(b"/batch_query_keys"))
    ) as port:
        yield counted, port


@asynccontextmanager
async def proxying(
    master: MooncakeMaster,
    *,
    on_request: Callable[[bytes], None] = lambda data: None,
    delay: Callable[[], float] = lambda: 0.0,
) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: bool) -> None:
        while data := await reader.read(1 << 20):
            if requests:
                on_request(data)
            elif delay():
                await asyncio.sleep(delay())
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(master.host, master.http_port)
        for one in (pump(reader, upstream_writer, True), pump(upstream_reader, writer, False)):
            tasks.add(asyncio.create_task(one))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def recovered(view: PoolView) -> None:
    async def well() -> bool:
        return not view.degraded

    await until(well)
