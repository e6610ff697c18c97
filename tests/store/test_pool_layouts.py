"""Blocks that are spread over ranks and KV groups: real objects on a real master."""

import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import product
from typing import Any
from uuid import uuid4

import pytest

from store.hashing import Chain, Digests
from store.keys import KeyLayout
from store.pool import PoolView
from store.ranks import Ranks
from tests.store.pools import PORTS, blocks, chain_of, counting, recovered, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool

SWA, FULL = 0, 1


@pytest.fixture(scope="module")
def client(master: MooncakeMaster) -> Iterator[Any]:
    """The store client of a worker."""
    own = f"127.0.0.1:{next(PORTS)}"
    pool = SimPool(master.address, own, KeyLayout("any"), block_bytes=1024, segment_bytes=16 << 20)
    assert pool.connect()
    yield pool._client()  # pyright: ignore[reportPrivateUsage]
    pool.close()


@pytest.fixture(params=["http", "rpc"])
async def view(
    request: pytest.FixtureRequest, master: MooncakeMaster, client: Any
) -> AsyncIterator[PoolView]:
    """What both ways to look must agree on."""
    async with viewing(master.address, master.http_port, lookup=request.param) as view:
        await recovered(view)
        yield view


def fresh(blocks: int) -> Chain:
    return chain_of(f"{uuid4()}", blocks)


def put(client: Any, prefixes: Iterable[str], chain: Chain, numbers: Iterable[int]) -> None:
    """The objects with these prefixes of some of a chain's blocks."""
    keys = [prefix + chain.digests[number].hex() for prefix, number in product(prefixes, numbers)]
    if keys:
        assert client.put_batch(keys, [b"x"] * len(keys)) == 0


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param({"tp_ranks": 2}, id="TP 2, 2 KV heads"),
        pytest.param({"tp_ranks": 1}, id="TP 2, 1 KV head, or MLA"),
        pytest.param({"tp_ranks": 8, "pp_ranks": 2}, id="TP 8, PP 2"),
        pytest.param({"tp_ranks": 4, "dcp_ranks": 2}, id="TP 4, DCP 2"),
        pytest.param({"tp_ranks": 2, "pcp_ranks": 2}, id="TP 2, PCP 2"),
    ],
)
async def test_b060_over_how_many_ranks_blocks_are_spread_is_read_off_stored_ones(
    view: PoolView, client: Any, request: pytest.FixtureRequest, spread: dict[str, int]
) -> None:
    model = f"spread{request.node.name}".translate({ord(c): "_" for c in "[], "})
    layout = KeyLayout(model, **spread)
    *others, last = layout.prefixes()
    whole, broken, headless = (fresh(6) for _ in range(3))
    put(client, layout.prefixes(), whole, range(6))
    put(client, others, broken, range(6))
    put(client, [last], broken, [0, 1, 3, 4, 5])
    put(client, others, headless, range(6))
    guess = KeyLayout(model)
    assert await blocks(view, broken, guess) == 2
    assert await blocks(view, whole, guess) == 6
    assert await blocks(view, headless, guess) == 0


async def test_b060_a_first_block_evicted_in_part_does_not_hide_its_ranks(
    view: PoolView, client: Any
) -> None:
    chain, two = fresh(9), KeyLayout("partly", tp_ranks=2)
    rank0, rank1 = two.prefixes()
    put(client, [rank0], chain, range(9))
    put(client, [rank1], chain, range(1, 9))
    assert await blocks(view, chain, KeyLayout("partly")) == 0


async def test_b060_a_block_without_one_full_group_ends_the_prefix(view: PoolView, client: Any) -> None:
    chain = fresh(6)
    first, second = KeyLayout("fulls", groups=(0, 1)).prefixes()
    put(client, [first], chain, range(6))
    put(client, [second], chain, [0, 1, 3, 4, 5])
    assert await blocks(view, chain, KeyLayout("fulls", groups=(0, 1))) == 2
    assert await blocks(view, chain, KeyLayout("fulls")) == 6
    assert await blocks(view, chain, KeyLayout("fulls", groups=(0, 1, 2))) == 0


def longest(full: set[int], windows: Sequence[tuple[set[int], int]], end: int) -> int:
    """By definition: every block in the full group, the last `need` (or all) in every window group."""
    return max(
        n
        for n in range(end + 1)
        if set(range(n)) <= full and all(set(range(max(0, n - need), n)) <= held for held, need in windows)
    )


@pytest.mark.parametrize("needs", [(2,), (5,), (2, 7)])
async def test_b060_a_hybrid_models_pool_prefix_is_what_all_its_groups_allow(
    view: PoolView, client: Any, needs: tuple[int, ...]
) -> None:
    draw = random.Random(f"{needs}")
    full = len(needs)
    layout = KeyLayout(
        f"hybrid{len(needs)}{needs[0]}",
        groups=tuple(range(full + 1)),
        windows=tuple(enumerate(needs)),
    )
    prefixes = layout.prefixes()
    found: list[int] = []
    for number in range(25):
        length = draw.choice([1, 2, 3, 12, 40, 90])
        chain = fresh(length)
        end = draw.choice([length, length, max(0, length - 1)])
        held = set(range(draw.choice([length, length, length * 3 // 4])))
        windows: list[tuple[set[int], int]] = []
        for need in needs:
            tails: set[int] = set()
            for _ in range(draw.choice([1, 1, 2, 4])):
                stop = draw.choice([len(held), draw.randint(0, length)])
                tails |= set(range(max(0, stop - draw.choice([need, need, need - 1, 2 * need])), stop))
            windows.append((tails, need))
        put(client, [prefixes[full]], chain, held)
        for prefix, (tails, _) in zip(prefixes, windows, strict=False):
            put(client, [prefix], chain, tails)
        found.append(await blocks(view, chain, layout, limit=end))
        assert found[-1] == longest(held, windows, end), (number, length, end, held, windows)
    assert len(set(found)) > 5


async def test_a_long_hybrid_chain_takes_two_round_trips(
    view: PoolView, client: Any, master: MooncakeMaster
) -> None:
    """The window of a prefix that ends anywhere is found by every need-th block, then looked at closely."""
    layout = KeyLayout("long", groups=(SWA, FULL), windows=((SWA, 16),))
    longer = fresh(401)
    chain = Chain.of(Digests(b"".join(longer.digests[:400]), 32))
    window, full = layout.prefixes()
    put(client, [full], chain, range(230))
    put(client, [window], chain, range(184, 200))
    async with counting(master) as (counted, port), viewing(f"127.0.0.1:{port}", port) as other:
        assert await blocks(other, chain, layout) == 200
        counted.clear()
        assert await blocks(other, longer, layout) == 200
        assert sum(counted) <= 4  # two groups, two rounds


async def test_b067_announcements_count_for_their_group_alone(view: PoolView, client: Any) -> None:
    layout = KeyLayout("said", groups=(SWA, FULL), windows=((SWA, 2),))
    window, full = layout.prefixes()
    chain = fresh(10)
    put(client, [full], chain, range(10))
    put(client, [window], chain, [8, 9])
    assert await blocks(view, chain, layout) == 10  # whole, and its ranks are known from here on
    again = fresh(10)
    assert await blocks(view, again, layout) == 0
    put(client, [full], again, range(10))
    view.announced(again.keys, layout, FULL)
    assert (await view.prefix(again, layout)).blocks == 0
    put(client, [window], again, [8, 9])
    view.announced(again.keys[8:], layout, SWA)
    asked = view.status().asked
    assert await blocks(view, again, layout) == 10
    assert view.status().asked == asked


async def test_a_prompt_of_exactly_n_blocks_of_a_hybrid_model_finds_its_own_boundary(
    view: PoolView, client: Any
) -> None:
    """The engine computes one token at least, so it keeps the window before block n - 1, not before n."""
    layout = KeyLayout("exactly", groups=(SWA, FULL), windows=((SWA, 2),))
    window, full = layout.prefixes()
    chain = fresh(10)
    put(client, [full], chain, range(10))
    put(client, [window], chain, [7, 8])
    assert await blocks(view, chain, layout, limit=9) == 9


def test_ranks_are_read_again_after_a_while_for_a_fleet_may_have_others() -> None:
    now = [0.0]
    ranks, guess = Ranks(lambda: now[0]), KeyLayout("m")
    digest = bytes(32)
    assert not ranks.due(guess, 0)
    assert ranks.due(guess, 1)
    ranks.learn(guess, KeyLayout("m", tp_ranks=4).keys(digest))
    assert ranks.of(guess) == KeyLayout("m", tp_ranks=4)
    assert not ranks.due(guess, 5)
    now[0] = 61.0
    assert ranks.due(guess, 0)
    ranks.learn(guess, [])  # no block of this chain is there: another one will do
    assert ranks.of(guess) == KeyLayout("m", tp_ranks=4)
    assert not ranks.due(guess, 0)
    now[0] = 62.5
    assert ranks.due(guess, 0)
    ranks.learn(guess, guess.keys(digest))
    assert ranks.of(guess) == guess


def test_another_names_blocks_say_nothing() -> None:
    ranks, guess = Ranks(lambda: 0.0), KeyLayout("m")
    ranks.learn(guess, KeyLayout("other", tp_ranks=4).keys(bytes(32)))
    assert ranks.of(guess) == guess
    assert not ranks.known(guess)
