import asyncio
import random
import uuid

import pytest

from store.keys import KeyLayout
from store.pool import PoolView
from tests.store.pools import LAYOUT, PORTS, blocks, chain_of, counting, storing, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool


async def test_only_leading_blocks_count(either: PoolView, workers: tuple[SimPool, SimPool]) -> None:
    view = either
    chain = chain_of("leading", 8)
    workers[0].put([chain.digests[n] for n in (0, 1, 2, 4, 5)])
    assert await blocks(view, chain) == 3
    headless = chain_of("headless", 8)
    workers[0].put(headless.digests[1:])
    assert await blocks(view, headless) == 0


async def test_b061_models_and_prefixes_do_not_see_each_other(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("disjoint", 3)
    workers[0].put(chain.digests)
    assert await blocks(view, chain, KeyLayout("/some/where/tiny")) == 3
    assert await blocks(view, chain, KeyLayout("other")) == 0
    assert await blocks(view, chain, KeyLayout("tiny", cache_prefix="team")) == 0


@pytest.mark.parametrize("model", ["we@ird", "100%25+ü &#?=", "a;b"])
async def test_b061_odd_names_are_found(master: MooncakeMaster, view: PoolView, model: str) -> None:
    layout, chain = KeyLayout(model), chain_of("odd", 2)
    async with storing(master, layout) as pool:
        pool.put(chain.digests)
        assert await blocks(view, chain, layout) == 2


async def test_b061_a_name_that_cannot_be_asked_for_is_unknown_not_absent(view: PoolView) -> None:
    assert not (await view.prefix(chain_of("comma", 2), KeyLayout("a,b"))).known


async def test_b062_an_object_still_being_written_does_not_count(
    either: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    view = either
    chain = chain_of(f"halfway{uuid.uuid4()}", 2)
    client = workers[0]._client()  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    keys = [LAYOUT.keys(digest)[0] for digest in chain.digests]
    client.batch_put_session_start(keys, [1024, 1024])  # pyright: ignore
    assert await blocks(view, chain) == 0
    client.batch_put_session_end(keys)  # pyright: ignore
    view.announced(chain.digests, LAYOUT)
    assert await blocks(view, chain) == 2


async def test_looking_takes_no_lease(view: PoolView, workers: tuple[SimPool, SimPool]) -> None:
    chain = chain_of("lease", 2)
    workers[0].put(chain.digests)
    client = workers[0]._client()  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    assert await blocks(view, chain) == 2
    assert client.remove(LAYOUT.keys(chain.digests[0])[0]) == 0  # pyright: ignore
    assert workers[1].exists(chain.digests) == [False, True]  # this takes one
    assert client.remove(LAYOUT.keys(chain.digests[1])[0]) == -706  # pyright: ignore


async def test_what_was_seen_is_not_asked_again(view: PoolView, workers: tuple[SimPool, SimPool]) -> None:
    chain = chain_of("again", 20)
    workers[0].put(chain.digests)
    assert await blocks(view, chain) == 20
    asked = view.status().asked
    assert await blocks(view, chain) == 20
    assert view.status().asked == asked


async def test_an_announcement_spares_the_question_and_ends_absence(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("announced", 10)
    assert await blocks(view, chain) == 0
    workers[0].put(chain.digests)
    assert view.status().announced_s is None
    view.announced(chain.keys[:4], LAYOUT)
    view.announced(chain.digests[4:], LAYOUT)
    assert view.status().announced == 10
    assert (view.status().announced_s or 0) < 5
    asked = view.status().asked
    assert await blocks(view, chain) == 10
    assert view.status().asked == asked


async def test_an_announcement_of_one_model_is_no_credit_for_another(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain, other = chain_of("two models", 4), KeyLayout("other")
    assert await blocks(view, chain) == 0
    assert await blocks(view, chain, other) == 0
    workers[0].put(chain.digests)
    view.announced(chain.keys, LAYOUT)
    assert await blocks(view, chain, other) == 0
    assert await blocks(view, chain) == 4


async def test_random_holes_in_long_chains_are_found_exactly(
    either: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    view = either
    draw = random.Random(7)
    for number in range(12):
        length = draw.choice([1, 31, 256, 257, 300, 1500, 2500])
        chain = chain_of(f"holes{number}", length)
        holes = set(draw.sample(range(length), draw.choice([0, 0, 1, 1, 3]) if length > 3 else 0))
        for worker in workers:
            worker.put([digest for n, digest in enumerate(chain.digests) if n not in holes])
        assert await blocks(view, chain) == min(holes, default=length), (number, length, sorted(holes))
        async with asyncio.timeout(30):
            assert await blocks(view, chain) == min(holes, default=length)


async def test_no_more_is_asked_than_needed(
    view: PoolView, workers: tuple[SimPool, SimPool], master: MooncakeMaster
) -> None:
    """One request for the first round, one for each 320 keys of the second."""
    chain = chain_of("trips", 1200)
    workers[0].put(chain.digests)
    async with counting(master) as (counted, port), viewing(f"127.0.0.1:{port}", port) as other:
        assert (
            await blocks(other, chain_of("trips", 1)) == 1
        )  # one more, over how many ranks blocks are spread
        counted.clear()
        assert await blocks(other, chain) == 1200
        assert sum(counted) == 4
        counted.clear()
        assert await blocks(other, chain_of("nothing", 1200)) == 0
        assert sum(counted) == 1


async def test_blocks_are_placed_in_the_segment_and_host_that_hold_them(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("places", 10)
    workers[0].put(chain.digests[:6])
    workers[1].put(chain.digests[6:])
    await view.prefix(chain, LAYOUT)
    found = await view.prefix(chain, LAYOUT)
    first, second = (worker._segment for worker in workers)  # pyright: ignore[reportPrivateUsage]
    assert (found.held(first), found.held(second), found.held("127.0.0.1")) == (6, 4, 10)
    assert (found.held(first, start=4), found.held(second, start=8), found.held("10.0.0.1")) == (2, 2, 0)


async def test_the_admin_address_may_be_given_instead(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("admin", 2)
    workers[0].put(chain.digests)
    async with viewing(f"127.0.0.1:{master.http_port}", next(PORTS)) as view:
        assert await blocks(view, chain) == 2


async def test_b066_the_wheels_master_is_seen_to_publish_no_events(view: PoolView) -> None:
    assert view.status().master_events is False
    assert view.status().announced_s is None


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":9003", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        PoolView(address)


async def test_a_look_through_the_client_takes_leases_as_an_engine_does(
    rpc_view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("rpc lease", 2)
    workers[0].put(chain.digests)
    client = workers[0]._client()  # pyright: ignore[reportPrivateUsage]
    assert client is not None
    assert await blocks(rpc_view, chain) == 2
    assert client.remove(LAYOUT.keys(chain.digests[0])[0]) == -706  # pyright: ignore
