"""A dead worker's objects go before the master notices: a real master, processes that are really killed."""

import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from store.dead_segments import DeadSegments
from store.hashing import Chain
from store.keys import KeyLayout
from store.mooncake_http import MasterAway, Replicas, Segment
from store.mooncake_rpc import MooncakeRpc
from store.pool import PoolView
from store.segments import Segments
from tests.clock import unhindered
from tests.store.pools import PATIENT_S, PORTS, blocks, chain_of, recovered, until, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.launch.process import Process
from workers.sim.pool import SimPool

LAYOUT = KeyLayout("tiny")


class Removals:
    """As much of a store client as a removal takes; says `away` while that is set."""

    away = ""

    async def remove(self, keys: Sequence[str], before: float, timeout_s: float) -> int:
        if self.away:
            raise MasterAway(self.away)
        return len(keys)


async def test_that_objects_can_not_be_removed_is_said_once_by_segment_and_that_they_are_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    endpoint, segments, client = segment(), Segments(), Removals()
    segments.told([Segment("10.0.0.1:7", endpoint, "", "OK", 1, 1)], 0.0)
    segments.died(endpoint, 0.0)
    dead = DeadSegments("m", segments, clock=lambda: 0.0, died=lambda: None, client=cast(MooncakeRpc, client))
    copies = Replicas(frozenset((endpoint,)), False)
    client.away = "8 calls wait for the master already"
    for _ in range(11):
        assert await dead.bury({"a": copies, "b": copies}, 0.0) == 0
    client.away = ""
    assert [await dead.bury({"a": copies}, 0.0) for _ in range(2)] == [1, 1]
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        (
            "WARNING",
            "objects of which the dead pool segment 10.0.0.1:7 had the last copy can't be removed now "
            "(8 calls wait for the master already): the next turn that finds some tries again",
        ),
        ("INFO", "objects of dead pool segments are removed again, which failed for 22"),
    ]
    await dead.close()


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    """Offers a dead worker's objects for so long that these tests end before it notices."""
    master = MooncakeMaster(
        rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log", client_ttl_s=30
    )
    await master.start()
    yield master
    await master.stop()


@pytest.fixture
async def healthy(master: MooncakeMaster) -> AsyncIterator[SimPool]:
    pool = SimPool(master.address, segment(), LAYOUT, block_bytes=1024, segment_bytes=16 << 20)
    assert pool.connect()
    yield pool
    pool.close()


def segment() -> str:
    return f"127.0.0.1:{next(PORTS)}"


class Store(Process):
    """A worker's store client in a process of its own. `copies`: in how many segments each object lies."""

    def __init__(
        self,
        master: str,
        own: str,
        digests: Sequence[bytes],
        log: Path,
        *,
        copies: int = 1,
        model: str = "tiny",
    ) -> None:
        script = f"""
import time
from store.keys import KeyLayout
from workers.sim.pool import SimPool
pool = SimPool({master!r}, {own!r}, KeyLayout({model!r}), block_bytes=1024, segment_bytes=16 << 20)
pool._replicate.replica_num = {copies}
assert all(pool.put({list(digests)!r}))
print("stored", flush=True)
time.sleep(120)
"""
        super().__init__([sys.executable, "-c", script], log=log)

    async def stored(self) -> None:
        self.start()

        async def said() -> bool:
            return "stored" in self.last_lines(3)

        await self.wait_ready(said, budget_s=60)


@asynccontextmanager
async def seeing(master: MooncakeMaster, *, remove_dead: bool = True) -> AsyncIterator[PoolView]:
    async with viewing(master.address, master.http_port, remove_dead=remove_dead) as view:
        await recovered(view)
        yield view


async def met(view: PoolView, own: str) -> None:
    """Until the view has heard the segment's process."""

    async def heard() -> bool:
        dead = view._dead  # pyright: ignore[reportPrivateUsage]
        assert dead is not None
        listened = dead._listened  # pyright: ignore[reportPrivateUsage]
        return any(each.name == own and each.endpoint in listened for each in view.segments())

    await until(heard)


async def ended(worker: Process) -> None:
    worker.kill()
    await worker.wait()


async def removed(view: PoolView, number: int) -> None:
    async def so_many() -> bool:
        return view.status().removed >= number

    await until(so_many)


async def test_what_only_a_dead_worker_held_is_gone_before_a_turn_goes_on(
    master: MooncakeMaster, healthy: SimPool, tmp_path: Path
) -> None:
    for attempt in range(
        4
    ):  # a removal is sent at once or not at all: a busy machine may be too late for one
        chain, own = chain_of(f"dead {attempt}", 600), segment()
        worker = Store(master.address, own, chain.digests[3:], tmp_path / f"worker-{attempt}.log")
        healthy.put(chain.digests[:3])
        await worker.stored()
        async with seeing(master) as view:
            await met(view, own)
            assert await blocks(view, chain) == 600
            await ended(worker)
            view.lost(own)
            assert await blocks(view, chain) == 3
            # An engine that looks now finds the living blocks, stops there, and loads without a failure.
            began = unhindered()
            if healthy.prefix(chain.digests) > 3:
                continue
            assert healthy.get(chain.digests[:3]) == [True] * 3
            if unhindered() - began > 0.5:
                continue

            async def gone(view: PoolView = view, chain: Chain = chain) -> bool:
                await blocks(view, chain)
                return view.status().removed >= 597

            # The rest follows, so that the chain can be stored anew while the old memory is still listed.
            await until(gone)
            assert all(healthy.put(chain.digests[3:]))
            view.announced(chain.digests, LAYOUT)
            assert await blocks(view, chain) == 600
            assert [each.lost for each in view.status().segments if each.name == own] == [True]
            return
    pytest.fail("of four dead workers' objects none were removed in time")


async def test_turns_that_were_looked_up_before_the_death_are_freed_too(
    master: MooncakeMaster, healthy: SimPool, tmp_path: Path
) -> None:
    chain, own = chain_of("under way", 50), segment()
    worker = Store(master.address, own, chain.digests, tmp_path / "worker.log")
    await worker.stored()
    async with seeing(master) as view:
        await met(view, own)
        assert await blocks(view, chain) == 50
        worker.kill()
        view.lost(own)
        await removed(view, 50)
        assert healthy.prefix(chain.digests) == 0


async def stays(view: PoolView, own: str, chain: Chain, healthy: SimPool) -> None:
    """`view` gives no credit for blocks in `own`, and yet removes nothing."""
    view.lost(own)
    assert await blocks(view, chain) == 0
    await view._dead.settled(PATIENT_S)  # pyright: ignore
    assert await blocks(view, chain) == 0
    assert view.status().removed == 0
    assert healthy.prefix(chain.digests) == 20


async def test_objects_of_a_worker_whose_process_lives_or_hangs_are_never_removed(
    master: MooncakeMaster, healthy: SimPool, tmp_path: Path
) -> None:
    chain, own = chain_of("alive", 20), segment()
    worker = Store(master.address, own, chain.digests, tmp_path / "worker.log")
    await worker.stored()
    async with seeing(master) as view:
        await met(view, own)
        await stays(view, own, chain, healthy)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        await stays(view, own, chain, healthy)
        os.kill(worker.pid, signal.SIGCONT)
        view.back(own)
        assert await blocks(view, chain) == 20
    worker.kill()


async def test_an_endpoint_that_was_never_heard_is_not_dead_when_it_refuses(
    master: MooncakeMaster, healthy: SimPool, tmp_path: Path
) -> None:
    chain, own = chain_of("never heard", 20), segment()
    worker = Store(master.address, own, chain.digests, tmp_path / "worker.log")
    await worker.stored()
    worker.kill()
    async with seeing(master) as view:
        await stays(view, own, chain, healthy)


async def test_an_object_with_a_living_copy_is_kept(
    master: MooncakeMaster, healthy: SimPool, tmp_path: Path
) -> None:
    chain, own = chain_of("two copies", 20), segment()
    worker = Store(master.address, own, chain.digests, tmp_path / "worker.log", copies=2)
    await worker.stored()
    async with seeing(master) as view:
        await met(view, own)
        worker.kill()
        view.lost(own)
        assert await blocks(view, chain) == 20
        assert view.status().removed == 0
        assert healthy.prefix(chain.digests) == 20


async def test_removal_can_be_switched_off(master: MooncakeMaster, healthy: SimPool, tmp_path: Path) -> None:
    chain, own = chain_of("kept", 20), segment()
    worker = Store(master.address, own, chain.digests, tmp_path / "worker.log")
    await worker.stored()
    async with seeing(master, remove_dead=False) as view:
        worker.kill()
        view.lost(own)
        assert await blocks(view, chain) == 0
        assert healthy.prefix(chain.digests) == 20
