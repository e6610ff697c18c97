import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from store.keys import KeyLayout, parse_key
from workers.launch.mooncake import MooncakeMaster
from workers.launch.ports import free_ports
from workers.sim.pool import SimPool

PORTS = free_ports(above=21_220)
LAYOUT = KeyLayout("tiny")


def digests(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log")
    await master.start()
    yield master
    await master.stop()


class Pools:
    def __init__(self, master: MooncakeMaster) -> None:
        self._master = master
        self.made: list[SimPool] = []

    def __call__(self, layout: KeyLayout = LAYOUT, *, block_bytes: int = 4096) -> SimPool:
        segment = f"127.0.0.1:{next(PORTS)}"
        pool = SimPool(self._master.address, segment, layout, block_bytes=block_bytes, segment_bytes=16 << 20)
        self.made.append(pool)
        return pool


@pytest.fixture
def pools(master: MooncakeMaster) -> Iterator[Pools]:
    made = Pools(master)
    yield made
    with ThreadPoolExecutor() as closing:  # the client takes 2 s to end its threads
        list(closing.map(SimPool.close, made.made))


async def segments(master: MooncakeMaster) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=master.http_url) as http:
        detail = (await http.get("/get_segments_detail")).json()
    return {each["segment_name"]: each["allocator_used_bytes"] for each in detail["segments"]}


async def test_blocks_put_by_one_worker_are_loaded_by_another(pools: Pools) -> None:
    one, two = pools(), pools()
    assert one.put(digests(1, 2, 3)) == [True, True, True]
    assert two.exists(digests(1, 2, 3, 4)) == [True, True, True, False]
    assert two.prefix(digests(1, 2, 9, 3)) == 2
    assert two.get(digests(1, 2, 3, 4)) == [True, True, True, False]
    assert two.put(digests(3, 4)) == [False, True]


async def test_objects_carry_the_names_vllm_gives_them(master: MooncakeMaster, pools: Pools) -> None:
    layout = KeyLayout("tiny", tp_ranks=2, cache_prefix="team")
    pools(layout).put(digests(1, 2))
    async with httpx.AsyncClient(base_url=master.http_url) as http:
        keys = (await http.get("/get_all_keys")).text.split()
    assert sorted(keys) == sorted(key for digest in digests(1, 2) for key in layout.keys(digest))
    assert all(parse_key(key) is not None for key in keys)


async def test_each_worker_keeps_its_blocks_in_its_own_segment(master: MooncakeMaster, pools: Pools) -> None:
    one, two = pools(), pools()
    assert one.connect()
    assert two.connect()
    one.put(digests(*range(10)))
    two.put(digests(*range(100, 105)))
    assert sorted((await segments(master)).values()) == [5 * 4096, 10 * 4096]


async def test_a_block_counts_only_with_every_rank(pools: Pools) -> None:
    half, whole = pools(KeyLayout("tiny")), pools(KeyLayout("tiny", tp_ranks=2))
    half.put(digests(1))
    whole.put(digests(2))
    assert whole.exists(digests(1, 2)) == [False, True]
    assert whole.put(digests(1, 2)) == [True, False]


async def test_a_full_pool_stores_less_and_says_so(pools: Pools) -> None:
    stored = pools(block_bytes=1 << 20).put(digests(*range(60)))
    assert 10 < sum(stored) < 60


async def test_b065_without_a_master_everything_is_a_miss_at_once(
    master: MooncakeMaster, pools: Pools
) -> None:
    pool = pools()
    assert pool.put(digests(1)) == [True]
    master.kill()
    began = time.monotonic()
    for _ in range(20):
        assert pool.exists(digests(1)) == [False]
        assert pool.get(digests(1)) == [False]
        assert pool.put(digests(1)) == [False]
    assert time.monotonic() - began < 3


async def test_b065_a_restarted_master_is_used_again(master: MooncakeMaster, pools: Pools) -> None:
    pool = pools()
    assert pool.put(digests(1)) == [True]
    master.kill()
    assert pool.exists(digests(1)) == [False]
    await master.start()
    async with asyncio.timeout(20):
        while pool.put(digests(1)) != [True]:  # noqa: ASYNC110 (the client mounts its segment again by itself)
            await asyncio.sleep(0.1)
    assert pool.get(digests(1)) == [True]


async def test_b065_a_worker_may_start_before_its_master(master: MooncakeMaster, pools: Pools) -> None:
    await master.stop()
    pool = pools()
    assert not pool.connect()
    assert pool.put(digests(1)) == [False]
    await master.start()
    assert pool.put(digests(1)) == [True]


def test_a_segment_below_what_the_client_can_mount_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        SimPool("127.0.0.1:1", "127.0.0.1:2", LAYOUT, segment_bytes=1 << 20)


async def test_clear_empties_the_pool_for_everybody(pools: Pools) -> None:
    one, two = pools(), pools()
    one.put(digests(1, 2))
    two.clear()
    assert one.exists(digests(1, 2)) == [False, False]
