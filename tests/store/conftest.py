import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from store.pool import PoolView
from store.streams import EventStreams
from tests.store.following import Rig, Watched
from tests.store.kv_publisher import free_port
from tests.store.pools import LAYOUT, PORTS, recovered, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    log = tmp_path_factory.mktemp("master") / "master.log"
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=log)
    asyncio.run(master.start())
    yield master
    asyncio.run(master.stop())


@pytest.fixture(scope="module")
def workers(master: MooncakeMaster) -> Iterator[tuple[SimPool, SimPool]]:
    pools = tuple(
        SimPool(master.address, f"127.0.0.1:{next(PORTS)}", LAYOUT, block_bytes=1024, segment_bytes=16 << 20)
        for _ in range(2)
    )
    assert all(pool.connect() for pool in pools)
    yield pools[0], pools[1]
    for pool in pools:
        pool.close()


@pytest.fixture
async def own_master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    """For tests that hurt it."""
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log")
    await master.start()
    yield master
    if master.process.alive:
        os.kill(master.process.pid or 0, signal.SIGCONT)
    await master.stop()


@pytest.fixture
async def view(master: MooncakeMaster, workers: tuple[SimPool, SimPool]) -> AsyncIterator[PoolView]:
    async with viewing(master.address, master.http_port) as view:
        await recovered(view)
        yield view


@pytest.fixture
async def rpc_view(master: MooncakeMaster, workers: tuple[SimPool, SimPool]) -> AsyncIterator[PoolView]:
    async with viewing(master.address, master.http_port, lookup="rpc") as view:
        await recovered(view)
        yield view


@pytest.fixture(params=["http", "rpc"])
def either(request: pytest.FixtureRequest) -> PoolView:
    """What both ways to look must agree on."""
    return request.getfixturevalue("view" if request.param == "http" else "rpc_view")


@pytest.fixture
def silence_s() -> float:
    """After which a replay is given up. Publishers answer at once; the machine may be busy."""
    return 10.0


@pytest.fixture
async def rig(silence_s: float) -> AsyncIterator[Rig]:
    sink = Watched()
    streams = EventStreams(sink, proof_interval_s=0.2, replay_silence_s=silence_s)
    await streams.start()
    rig = Rig(sink, streams, free_port(), free_port())
    yield rig
    await streams.close()
    for publisher in rig.alive:
        publisher.close()
