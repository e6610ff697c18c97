import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from store.keys import KeyLayout, parse_key
from tests.ports import ports
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool

PORTS = ports(above=21_220)
LAYOUT = KeyLayout("tiny")


def digests(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[MooncakeMaster]:
    """For tests that hurt it."""
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "master.log")
    await master.start()
    yield master
    await master.stop()


def make(master: MooncakeMaster, layout: KeyLayout = LAYOUT, *, block_bytes: int = 4096) -> SimPool:
    segment = f"127.0.0.1:{next(PORTS)}"
    return SimPool(master.address, segment, layout, block_bytes=block_bytes, segment_bytes=16 << 20)


@dataclass(frozen=True)
class Shared:
    master: MooncakeMaster
    one: SimPool
    two: SimPool


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """One for most tests: a client takes 2 s to close. Each test has blocks of its own."""
    log = tmp_path_factory.mktemp("master") / "master.log"
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=log)
    asyncio.run(master.start())
    one, two = make(master), make(master)
    assert one.connect()
    assert two.connect()
    yield Shared(master, one, two)
    one.close()
    two.close()
    asyncio.run(master.stop())


async def segments(master: MooncakeMaster) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=master.http_url) as http:
        detail = (await http.get("/get_segments_detail")).json()
    return {each["segment_name"]: each["allocator_used_bytes"] for each in detail["segments"]}


def test_blocks_put_by_one_worker_are_loaded_by_another(shared: Shared) -> None:
    one, two = shared.one, shared.two
    assert one.put(digests(1, 2, 3)) == [True, True, True]
    assert two.exists(digests(1, 2, 3, 4)) == [True, True, True, False]
    assert two.prefix(digests(1, 2, 9, 3)) == 2
    assert two.get(digests(1, 2, 3, 4)) == [True, True, True, False]
    assert two.put(digests(3, 4)) == [False, True]


async def test_objects_carry_the_names_vllm_gives_them(shared: Shared) -> None:
    layout = KeyLayout("tiny", tp_ranks=2, cache_prefix="team")
    pool = make(shared.master, layout)
    pool.put(digests(1, 2))
    async with httpx.AsyncClient(base_url=shared.master.http_url) as http:
        keys = [key for key in (await http.get("/get_all_keys")).text.split() if key.startswith("team")]
    pool.close()
    assert sorted(keys) == sorted(key for digest in digests(1, 2) for key in layout.keys(digest))
    assert all(parse_key(key) is not None for key in keys)


async def test_each_worker_keeps_its_blocks_in_its_own_segment(shared: Shared) -> None:
    shared.two.clear()
    shared.one.put(digests(*range(10)))
    shared.two.put(digests(*range(100, 105)))
    assert sorted((await segments(shared.master)).values()) == [5 * 4096, 10 * 4096]


def test_a_block_counts_only_with_every_rank(shared: Shared) -> None:
    half, whole = shared.one, make(shared.master, KeyLayout("tiny", tp_ranks=2))
    half.put(digests(201))
    whole.put(digests(202))
    assert whole.exists(digests(201, 202)) == [False, True]
    assert whole.put(digests(201, 202)) == [True, False]
    whole.close()


def test_a_full_pool_stores_less_and_says_so(shared: Shared) -> None:
    big = make(shared.master, block_bytes=1 << 20)
    stored = big.put(digests(*range(300, 400)))
    assert 10 < sum(stored) < 100
    # Above its high-water mark the master may have evicted some of them by now.
    there = big.exists(digests(*range(300, 400)))
    assert sum(there) > 10
    assert not [number for number, (has, put) in enumerate(zip(there, stored, strict=True)) if has > put]
    big.clear()
    big.close()


async def test_b065_without_a_master_everything_is_a_miss_at_once(master: MooncakeMaster) -> None:
    pool = make(master)
    assert pool.put(digests(1)) == [True]
    master.kill()
    began = time.monotonic()
    for _ in range(20):
        assert pool.exists(digests(1)) == [False]
        assert pool.get(digests(1)) == [False]
        assert pool.put(digests(1)) == [False]
    # 60 calls, of which each that waited would take a second or more.
    assert time.monotonic() - began < 15


async def test_b065_a_restarted_master_is_used_again(master: MooncakeMaster) -> None:
    pool = make(master)
    assert pool.put(digests(1)) == [True]
    master.kill()
    assert pool.exists(digests(1)) == [False]
    await master.start()
    async with asyncio.timeout(60):
        while pool.put(digests(1)) != [True]:
            await asyncio.sleep(0.1)
    assert pool.get(digests(1)) == [True]


async def test_b065_a_worker_may_start_before_its_master(master: MooncakeMaster) -> None:
    await master.stop()
    pool = make(master)
    assert not pool.connect()
    assert pool.put(digests(1)) == [False]
    await master.start()
    assert pool.put(digests(1)) == [True]


def test_a_segment_below_what_the_client_can_mount_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        SimPool("127.0.0.1:1", "127.0.0.1:2", LAYOUT, segment_bytes=1 << 20)


def test_clear_empties_the_pool_for_everybody(shared: Shared) -> None:
    shared.one.put(digests(501, 502))
    shared.two.clear()
    assert shared.one.exists(digests(501, 502)) == [False, False]
