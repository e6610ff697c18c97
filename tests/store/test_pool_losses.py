import sys
import time
from pathlib import Path

import httpx
import pytest

from store.mooncake_http import MasterAway, MasterRefused
from store.pool import PoolView
from tests.store.pools import LAYOUT, PORTS, blocks, chain_of, storing, until, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.launch.process import Process
from workers.sim.pool import SimPool


async def test_blocks_of_a_dead_worker_count_for_nothing_before_the_master_notices(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("dead", 6)
    workers[0].put(chain.digests[:4])
    workers[1].put(chain.digests[4:])
    assert await blocks(view, chain) == 6
    segment = workers[1]._segment  # pyright: ignore[reportPrivateUsage]
    view.lost(segment)
    assert await blocks(view, chain) == 4
    assert [each.lost for each in view.status().segments if each.name == segment] == [True]
    view.back(segment)
    assert await blocks(view, chain) == 6


async def test_a_killed_workers_blocks_are_forgotten_when_the_master_forgets_them(tmp_path: Path) -> None:
    master = MooncakeMaster(
        rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log", client_ttl_s=2
    )
    await master.start()
    chain, segment = chain_of("unmounted", 4), f"127.0.0.1:{next(PORTS)}"
    script = f"""
import time
import uuid
from store.keys import KeyLayout
from workers.sim.pool import SimPool
pool = SimPool({master.address!r}, {segment!r}, KeyLayout("tiny"), segment_bytes=16 << 20)
assert all(pool.put({list(chain.digests)!r}))
print("stored", flush=True)
time.sleep(60)
"""
    worker = Process([sys.executable, "-c", script], log=tmp_path / "worker.log")
    worker.start()

    async def stored() -> bool:
        return "stored" in worker.last_lines(3)

    await worker.wait_ready(stored, budget_s=60)
    async with viewing(master.address, master.http_port) as view:
        assert await blocks(view, chain) == 4
        worker.kill()

        async def forgotten() -> bool:
            return await blocks(view, chain) == 0

        await until(forgotten)
        assert view.segments() == []
    await master.stop()


async def test_b066_objects_removed_behind_our_back_are_noticed(own_master: MooncakeMaster) -> None:
    chain = chain_of("removed", 4)
    now = [0.0]
    async with (
        viewing(own_master.address, own_master.http_port, clock=lambda: time.monotonic() + now[0]) as view,
        storing(own_master) as pool,
    ):
        pool.put(chain.digests)
        assert await blocks(view, chain) == 4
        now[0] += 20  # older than what a pool with losses is trusted for
        asked = view.status().asked
        assert await blocks(view, chain) == 4
        assert view.status().asked == asked
        async with httpx.AsyncClient(base_url=own_master.http_url) as http:
            await http.post("/api/v1/remove_all?force=true")

        async def looked() -> bool:
            return await blocks(view, chain) == 0

        await until(looked, budget_s=15)


class Later:
    """The real clock, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


async def test_a_failed_pull_takes_credit_from_its_segment_until_one_works(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    chain, clock = chain_of("failed", 6), Later()
    workers[0].put(chain.digests[:4])
    workers[1].put(chain.digests[4:])
    segment = workers[1]._segment  # pyright: ignore[reportPrivateUsage]
    async with viewing(master.address, master.http_port, clock=clock) as view:
        assert await blocks(view, chain) == 6
        view.pull_failed(segment)
        assert await blocks(view, chain) == 4
        assert [each.failing for each in view.status().segments if each.name == segment] == [True]
        clock.ahead += 3
        assert await blocks(view, chain) == 6  # the trial
        assert await blocks(view, chain) == 4  # everybody else waits for how it went
        view.pull_failed(segment)
        clock.ahead += 3
        assert await blocks(view, chain) == 4  # twice as long
        clock.ahead += 2
        assert await blocks(view, chain) == 6
        view.pull_worked(segment)
        assert [await blocks(view, chain) for _ in range(3)] == [6, 6, 6]


async def test_pulls_that_fail_anywhere_take_credit_from_the_pool(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    chain, clock = chain_of("anywhere", 3), Later()
    workers[0].put(chain.digests)
    async with viewing(master.address, master.http_port, clock=clock) as view:
        view.pull_failed()
        assert not (await view.prefix(chain, LAYOUT)).known
        assert view.status().pulls_failing
        clock.ahead += 3
        assert await blocks(view, chain) == 3
        assert not (await view.prefix(chain, LAYOUT)).known
        view.pull_worked()
        assert await blocks(view, chain) == 3


async def test_a_drained_segment_hands_its_blocks_on(own_master: MooncakeMaster) -> None:
    chain = chain_of("drained", 8)
    async with (
        storing(own_master) as leaving,
        storing(own_master) as staying,
        viewing(own_master.address, own_master.http_port) as view,
    ):
        leaving.put(chain.digests)
        names = [pool._segment for pool in (leaving, staying)]  # pyright: ignore[reportPrivateUsage]
        assert (await view.prefix(chain, LAYOUT)).held(names[0]) == 8
        job = await view.drain(names[0])

        async def done() -> bool:
            drain = await view.drained(job)
            assert drain.failed == 0
            return drain.moved == 8

        await until(done)

        async def moved() -> bool:
            return (await view.prefix(chain, LAYOUT)).held(names[1]) == 8

        await until(moved)
        assert [each.status for each in view.segments() if each.name == names[0]] != ["OK"]

        # Of the one that takes no more the master says 0 from the start, with all its blocks in it.
        def used() -> dict[str, int | None]:
            return {each.name: each.used for each in view.status().segments}

        async def told() -> bool:
            return bool(used()[names[1]])

        await until(told)
        assert used()[names[0]] is None
        with pytest.raises(MasterRefused):
            await view.drain(names[0])
        with pytest.raises(KeyError):
            await view.drain("10.0.0.1:1")
        with pytest.raises(ValueError, match="no other segment"):
            await view.drain(names[1])
        with pytest.raises(MasterRefused):
            await view.drained("1-2")


async def test_draining_without_a_master_is_an_error_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with viewing("127.0.0.1:1", 2) as view:
        # Also one that never answered: what may be wrong is where it is looked for.
        (said,) = [r.message for r in caplog.records if "cannot be asked" in r.message]
        assert said.endswith(
            "cannot be asked: refused; its admin HTTP (mooncake.http_port) was tried at "
            "127.0.0.1:2, 127.0.0.1:1"
        )
        with pytest.raises(MasterAway, match="refused"):
            await view.drained("1-2")
