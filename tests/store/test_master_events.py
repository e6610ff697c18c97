"""The pool view on the event stream of a master, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from store.keys import KeyLayout
from store.pool import PoolView
from store.sightings import BUSY_S
from tests.store.kv_publisher import free_port
from tests.store.master_publisher import PublishingMaster, event, publishing_master
from tests.store.pools import chain_of

LAYOUT = KeyLayout("tiny")
HOUR = 3600.0


class Clock:
    """Goes as time does, and further when told."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


class Rig:
    def __init__(self, master: PublishingMaster, view: PoolView, clock: Clock) -> None:
        self.master, self.view, self.clock = master, view, clock

    async def blocks(self, name: str, blocks: int = 4) -> int:
        found = await self.view.prefix(chain_of(name, blocks), LAYOUT)
        assert found.known
        return found.blocks

    async def until(self, condition: Callable[[], Awaitable[bool] | bool]) -> None:
        async with asyncio.timeout(60):
            while True:
                met = condition()
                if met if isinstance(met, bool) else await met:
                    return
                await asyncio.sleep(0.01)

    def state(self) -> str:
        assert self.view.events is not None
        return self.view.events.state

    def why(self) -> str:
        assert self.view.events is not None
        return self.view.events.why

    def gaps(self) -> int:
        assert self.view.events is not None
        return self.view.events.gaps

    async def following(self) -> None:
        await self.until(lambda: self.state() == "following")

    async def asks(self, name: str, blocks: int = 4) -> bool:
        """Whether a turn waits for the master. Where blocks lie may be asked with nobody waiting."""
        before = self.view.status().asked
        await self.blocks(name, blocks)
        return self.view.status().asked > before


def keys(name: str, blocks: int = 4) -> list[str]:
    return [key for digest in chain_of(name, blocks).digests for key in LAYOUT.keys(digest)]


@asynccontextmanager
async def rigged(master: PublishingMaster, endpoint: str) -> AsyncGenerator[Rig]:
    clock = Clock()
    view = PoolView(
        "127.0.0.1:1",
        http_port=master.http_port,
        budget_s=2.0,
        remove_dead=False,
        events=endpoint,
        clock=clock,
    )
    await view.start()
    try:
        yield Rig(master, view, clock)
    finally:
        await view.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with publishing_master() as master, rigged(master, master.bind()) as rig:
        master.objects |= {*keys("ranks", 1)}
        await rig.following()
        assert await rig.blocks("ranks", 1) == 1  # the layout is known from here on
        yield rig


async def test_b066_what_the_master_publishes_needs_no_look_up(rig: Rig) -> None:
    assert await rig.blocks("new") == 0
    rig.master.put(*keys("new"))
    await rig.until(lambda: rig.view.events is not None and rig.view.events.stored == 4)
    # No time limit: what an event does not take back holds, there or missing.
    assert await rig.blocks("new") == 4
    assert await rig.asks("new", 5)
    for _ in range(2):
        rig.clock.ahead += HOUR
        await rig.blocks("new")  # ranks are looked at again, once a minute
        assert not await rig.asks("new")
        assert not await rig.asks("new", 5)
    rig.master.put(*keys("new", 5)[4:])
    await rig.until(lambda: rig.view.events is not None and rig.view.events.stored == 5)
    assert not await rig.asks("new", 5)
    assert await rig.blocks("new", 5) == 5
    rig.master.evict(*keys("new")[1:2])
    await rig.until(lambda: rig.view.events is not None and rig.view.events.removed == 1)
    assert await rig.blocks("new") == 1
    assert not await rig.asks("new")


async def test_b066_lost_batches_are_seen_and_nothing_is_believed_on_their_account(rig: Rig) -> None:
    rig.master.put(*keys("lost"))
    assert await rig.blocks("lost") == 4
    rig.master.evict(*keys("lost"), lost=True)
    rig.master.put(*keys("other", 1))
    await rig.until(lambda: rig.gaps() == 1)
    assert await rig.blocks("lost") == 0
    await rig.following()


async def test_b066_events_dropped_in_the_masters_queue_are_seen(rig: Rig) -> None:
    rig.master.put(*keys("dropped"))
    assert await rig.blocks("dropped") == 4
    rig.master.objects.clear()
    rig.master.drop()
    await rig.until(lambda: rig.gaps() == 1)
    assert await rig.blocks("dropped") == 0
    await rig.following()
    # The number that was given away is no loss of its own.
    rig.master.put(*keys("after"))
    await rig.until(lambda: rig.view.events is not None and rig.view.events.stored >= 8)
    await rig.following()


async def test_b066_a_loss_that_nothing_follows_is_seen_by_the_masters_count(rig: Rig) -> None:
    rig.master.put(*keys("tail"))
    assert await rig.blocks("tail") == 4
    rig.master.evict(*keys("tail"), lost=True)
    await rig.until(lambda: rig.gaps() == 1)
    assert "did not arrive" in rig.why()
    assert await rig.blocks("tail") == 0
    # Until it is heard of again, its silence proves nothing.
    before = rig.master.batches
    rig.master.put(*keys("tail"), lost=True)
    await rig.until(lambda: rig.view.status().checked_s is not None and rig.state() == "lost")
    rig.master.put(*keys("heard"))
    await rig.following()
    assert rig.master.batches == before + 2


async def test_b014_a_batch_that_cannot_be_read_is_a_loss(rig: Rig) -> None:
    rig.master.put(*keys("unread"))
    assert await rig.blocks("unread") == 4
    rig.master.objects.clear()
    rig.master.publish(raw=b"\xc1 not msgpack")
    await rig.until(lambda: rig.gaps() == 1)
    assert await rig.blocks("unread") == 0
    rig.master.publish(event("removed", None))
    await rig.until(lambda: "kv_events_emit_object_key" in rig.why())
    rig.master.put(*keys("unread"))
    await rig.following()


async def test_all_objects_can_go_at_once(rig: Rig) -> None:
    rig.master.put(*keys("cleared"))
    assert await rig.blocks("cleared") == 4
    rig.master.clear()
    await rig.until(lambda: rig.view.events is not None and rig.view.events.cleared == 1)
    assert await rig.blocks("cleared") == 0
    assert rig.state() == "following"


async def test_b066_a_stream_that_breaks_off_is_relied_on_no_longer() -> None:
    port = free_port()
    async with publishing_master() as master, rigged(master, master.bind(port)) as rig:
        master.objects |= {*keys("ranks", 1)}
        await rig.following()
        assert await rig.blocks("ranks", 1) == 1
        master.put(*keys("broken"))
        await rig.until(lambda: rig.view.events is not None and rig.view.events.stored == 4)
        master._pub.unbind(f"tcp://127.0.0.1:{port}")  # pyright: ignore[reportPrivateUsage]
        master._pub.close()  # pyright: ignore[reportPrivateUsage]
        await rig.until(lambda: rig.state() != "following")
        master.objects.clear()
        master.evicted += 5
        rig.clock.ahead += BUSY_S

        async def gone() -> bool:
            return await rig.blocks("broken") == 0

        await rig.until(gone)


async def test_a_master_that_publishes_nothing_is_asked_as_ever() -> None:
    async with publishing_master() as master, rigged(master, master.bind()) as rig:
        master.enabled = False
        master.objects |= {*keys("quiet")}
        await rig.until(lambda: "publishes no events" in rig.why())
        assert await rig.blocks("quiet") == 4
        assert rig.state() == "lost"


async def test_workers_announcements_are_older_than_the_masters_events(rig: Rig) -> None:
    """A worker's come with its next step: by then the block may be gone."""
    rig.master.put(*keys("late"))
    assert await rig.blocks("late") == 4
    rig.master.evict(*keys("late"))
    await rig.until(lambda: rig.view.events is not None and rig.view.events.removed == 4)
    rig.view.announced(list(chain_of("late", 4).keys), LAYOUT)
    assert await rig.blocks("late") == 0
