"""Over how many ranks blocks are spread, where the master takes its time to say, or nobody needs to ask."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from store.hashing import Chain
from store.keys import KeyLayout
from store.pool import PoolView
from tests.store.master_publisher import PublishingMaster, publishing_master
from tests.store.pools import chain_of

LAYOUT = KeyLayout("tiny")
TWO = KeyLayout("tiny", tp_ranks=2)


class SlowMaster:
    """Answers questions about a second rank only when it is told to. asked: such a question has come."""

    def __init__(self, master: PublishingMaster) -> None:
        self.objects = master.objects
        self.asked, self.answering = asyncio.Event(), asyncio.Event()
        self._answer, master.answer = master.answer, self.answer

    async def answer(self, request: web.Request) -> web.Response:
        if "@tp_rank:1@" in request.query.get("keys", ""):
            self.asked.set()
            await self.answering.wait()
        return await self._answer(request)


@asynccontextmanager
async def slow() -> AsyncGenerator[tuple[SlowMaster, PoolView]]:
    async with publishing_master() as master:
        slow = SlowMaster(master)
        view = PoolView("127.0.0.1:1", http_port=master.http_port, budget_s=0.25, remove_dead=False)
        await view.start()
        try:
            yield slow, view
        finally:
            slow.answering.set()
            await view.close()


def put(master: SlowMaster, chain: Chain, layout: KeyLayout) -> None:
    master.objects |= {key for digest in chain.digests for key in layout.keys(digest)}


async def test_b060_an_answer_about_ranks_that_comes_late_serves_the_next_turn() -> None:
    async with slow() as (master, view):
        chain = chain_of("ranks", 4)
        put(master, chain, TWO)
        master.objects.discard(TWO.keys(chain.digests[2])[1])
        # Which ranks a block needs is not known in time: no credit, and no blame.
        assert not (await view.prefix(chain, LAYOUT)).known
        assert master.asked.is_set()
        assert not (await view.prefix(chain, LAYOUT)).known
        master.answering.set()
        async with asyncio.timeout(30):
            while not (found := await view.prefix(chain, LAYOUT)).known:
                await asyncio.sleep(0.01)
        assert (found.blocks, view.status().layouts[0].tp_ranks) == (2, 2)


async def test_b060_no_answer_about_ranks_is_waited_for_longer_than_its_budget() -> None:
    async with slow() as (master, view):
        chain = chain_of("ranks", 4)
        put(master, chain, LAYOUT)
        assert not (await view.prefix(chain, LAYOUT)).known
        learning = view._learning  # pyright: ignore[reportPrivateUsage]
        assert learning is not None
        async with asyncio.timeout(30):  # 2 s
            await learning
        # The next turn asks anew.
        master.asked.clear()
        assert not (await view.prefix(chain, LAYOUT)).known
        assert master.asked.is_set()


async def test_b061_ranks_that_are_set_are_not_asked_for() -> None:
    async with slow() as (master, view):
        chain = chain_of("given", 4)
        put(master, chain, LAYOUT)
        one = replace(LAYOUT, given=True)
        assert (await view.prefix(chain, one)).blocks == 4
        assert not master.asked.is_set()
        assert view.status().layouts[0].found
