import asyncio
import hashlib
import os
import random
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from store.hashing import Chain, Digests
from store.keys import KeyLayout
from store.mooncake_http import MasterAway, MasterRefused
from store.pool import PoolPrefix, PoolView
from tests.ports import ports
from workers.launch.mooncake import MooncakeMaster
from workers.launch.process import Process
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


async def until(condition: Callable[[], Awaitable[bool]], budget_s: float = 10.0) -> None:
    """For what another process does in its own time."""
    async with asyncio.timeout(budget_s):
        while not await condition():
            await asyncio.sleep(0.02)


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


@asynccontextmanager
async def viewing(
    address: str, http_port: int, budget_s: float = PATIENT_S, lookup: Lookup = "http"
) -> AsyncIterator[PoolView]:
    view = PoolView(address, http_port=http_port, budget_s=budget_s, lookup=lookup)
    await view.start()
    try:
        yield view
    finally:
        await view.close()


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


async def blocks(view: PoolView, chain: Chain, layout: KeyLayout = LAYOUT) -> int:
    found = await view.prefix(chain, layout)
    assert found.known
    assert found.exact
    return found.blocks


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


@asynccontextmanager
async def storing(master: MooncakeMaster, layout: KeyLayout = LAYOUT) -> AsyncIterator[SimPool]:
    pool = SimPool(
        master.address, f"127.0.0.1:{next(PORTS)}", layout, block_bytes=1024, segment_bytes=16 << 20
    )
    assert pool.connect()
    yield pool
    pool.close()


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
        async with asyncio.timeout(5):
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

    await worker.wait_ready(stored, budget_s=20)
    async with viewing(master.address, master.http_port) as view:
        assert await blocks(view, chain) == 4
        worker.kill()

        async def forgotten() -> bool:
            return await blocks(view, chain) == 0

        await until(forgotten)
        assert view.segments() == []
    await master.stop()


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


async def test_b065_a_client_that_hangs_holds_no_turn(own_master: MooncakeMaster) -> None:
    async with viewing(own_master.address, own_master.http_port, 0.005, "rpc") as view:
        await recovered(view)
        while not (await view.prefix(chain_of("warm", 1), LAYOUT)).known:
            await asyncio.sleep(0.05)  # the client is set up by the first call
        assert own_master.process.pid is not None
        os.kill(own_master.process.pid, signal.SIGSTOP)
        took, answers = await latencies(view, 200)
        assert took[198] < 0.020
        assert not any(answer.known for answer in answers)
        os.kill(own_master.process.pid, signal.SIGCONT)
        await recovered(view)

        async def known() -> bool:
            return (await view.prefix(chain_of("thawed", 3), LAYOUT)).known

        await until(known)


# --- faults -----------------------------------------------------------------------------------------------


async def latencies(
    view: PoolView, turns: int, layout: KeyLayout = LAYOUT
) -> tuple[list[float], list[PoolPrefix]]:
    """Of turns one after the other, each a prompt of its own of 500 blocks."""
    chains = [chain_of(f"fault{number}.{random.random()}", 500) for number in range(turns)]
    took: list[float] = []
    answers: list[PoolPrefix] = []
    for chain in chains:
        began = time.perf_counter()
        answers.append(await view.prefix(chain, layout))
        took.append(time.perf_counter() - began)
    return sorted(took), answers


async def recovered(view: PoolView) -> None:
    async def well() -> bool:
        return not view.degraded

    await until(well)


async def test_b065_a_frozen_master_costs_a_few_budgets_then_nothing_and_comes_back(
    own_master: MooncakeMaster,
) -> None:
    async with viewing(own_master.address, own_master.http_port, budget_s=0.005) as view:
        await recovered(view)
        assert own_master.process.pid is not None
        os.kill(own_master.process.pid, signal.SIGSTOP)
        took, answers = await latencies(view, 300)
        assert took[int(len(took) * 0.99)] < 0.020
        assert took[len(took) // 2] < 0.001
        assert not any(answer.known or answer.blocks for answer in answers)
        assert view.degraded
        assert view.status().reason in ("slow", "timeout")
        os.kill(own_master.process.pid, signal.SIGCONT)
        await recovered(view)


async def test_b065_a_killed_master_costs_nothing_and_what_it_knew_is_forgotten(
    own_master: MooncakeMaster,
) -> None:
    chain = chain_of("killed", 30)
    async with viewing(own_master.address, own_master.http_port) as view, storing(own_master) as pool:
        pool.put(chain.digests)
        assert await blocks(view, chain) == 30
        own_master.kill()

        async def down() -> bool:
            return view.degraded

        await until(down, budget_s=1)
        assert view.status().remembered == 0
        took, answers = await latencies(view, 100)
        assert took[98] < 0.020
        assert not any(answer.known for answer in answers)
        await own_master.start()
        await recovered(view)
        assert await blocks(view, chain) == 0
        assert view.status().outages == 1


async def test_b065_a_master_restarted_between_two_turns_is_not_believed(own_master: MooncakeMaster) -> None:
    """Nobody asks while it is down: only the ended connection tells."""
    chain = chain_of("between", 5)
    async with viewing(own_master.address, own_master.http_port) as view, storing(own_master) as pool:
        pool.put(chain.digests)
        assert await blocks(view, chain) == 5
        own_master.kill()
        await own_master.start()
        await recovered(view)
        assert await blocks(view, chain) == 0


async def test_b065_a_slow_master_degrades_and_recovers(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    lag = [0.0]
    async with (
        proxying(master, delay=lambda: lag[0]) as port,
        viewing(f"127.0.0.1:{port}", port, budget_s=0.010) as view,
    ):
        await recovered(view)
        lag[0] = 0.1
        took, answers = await latencies(view, 100)
        assert took[98] < 0.020
        assert not any(answer.known for answer in answers)
        assert view.status().reason == "slow"
        lag[0] = 0.0
        await recovered(view)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@asynccontextmanager
async def misbehaving(how: str) -> AsyncIterator[int]:
    """A port where something listens that is no master."""
    held: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    loop = asyncio.get_running_loop()
    answers = {
        "garbage": b"\x00\xff\x17 not http at all\r\n\r\n",
        "html": b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>",
        "error": b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        "endless": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{",
    }

    async def accept() -> None:
        while True:
            connection, _ = await loop.sock_accept(server)
            if how == "reset":
                reset(connection)
                continue
            held.append(connection)
            if how in answers:
                await loop.sock_sendall(connection, answers[how])

    task = asyncio.create_task(accept())
    yield server.getsockname()[1]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    for connection in held:
        connection.close()


@pytest.mark.parametrize("how", ["deaf", "reset", "garbage", "html", "error", "endless"])
async def test_b065_what_is_no_master_never_delays_a_turn(how: str) -> None:
    async with misbehaving(how) as port:
        began = time.monotonic()
        async with viewing(f"127.0.0.1:{port}", port, budget_s=0.005) as view:
            assert time.monotonic() - began < 2
            took, answers = await latencies(view, 50)
            assert took[-1] < 0.020
            assert not any(answer.known for answer in answers)
            assert view.degraded
            assert view.status().reason


async def test_b065_a_master_that_is_not_there_yet_is_found_when_it_is(tmp_path: Path) -> None:
    master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=tmp_path / "log")
    async with viewing(master.address, master.http_port) as view:
        assert view.degraded
        await master.start()
        await recovered(view)
        assert await blocks(view, chain_of("late", 3)) == 0
    await master.stop()


async def test_a_chain_beyond_the_budget_is_proven_in_part_and_remembered(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    chain = chain_of("beyond", 6000)
    for worker in workers:
        worker.put(chain.digests)
    async with viewing(master.address, master.http_port, budget_s=0.005) as view:
        await recovered(view)
        first = await view.prefix(chain, LAYOUT)
        assert first.blocks < 6000
        assert not first.exact

        async def whole() -> bool:
            found = await view.prefix(chain, LAYOUT)
            return found.blocks == 6000 and found.exact

        await until(whole)
        took = time.perf_counter()
        assert (await view.prefix(chain, LAYOUT)).exact
        assert time.perf_counter() - took < 0.02


async def test_a_cancelled_turn_leaves_nothing_behind(
    view: PoolView, workers: tuple[SimPool, SimPool]
) -> None:
    turns = [asyncio.create_task(view.prefix(chain_of(f"cancel{n}", 2000), LAYOUT)) for n in range(10)]
    await asyncio.sleep(0)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)

    async def idle() -> bool:
        return view._lookups.idle  # pyright: ignore[reportPrivateUsage]

    await until(idle)
    assert await blocks(view, chain_of("after", 3)) == 0


async def test_b066_objects_removed_behind_our_back_are_noticed(own_master: MooncakeMaster) -> None:
    chain = chain_of("removed", 4)
    now = [0.0]
    view = PoolView(
        own_master.address,
        http_port=own_master.http_port,
        budget_s=PATIENT_S,
        clock=lambda: time.monotonic() + now[0],
    )
    await view.start()
    async with storing(own_master) as pool:
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

        await until(looked, budget_s=5)
    await view.close()


# --- failed pulls and drain -------------------------------------------------------------------------------


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
    view = PoolView(master.address, http_port=master.http_port, budget_s=PATIENT_S, clock=clock)
    await view.start()
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
    await view.close()


async def test_pulls_that_fail_anywhere_take_credit_from_the_pool(
    master: MooncakeMaster, workers: tuple[SimPool, SimPool]
) -> None:
    chain, clock = chain_of("anywhere", 3), Later()
    workers[0].put(chain.digests)
    view = PoolView(master.address, http_port=master.http_port, budget_s=PATIENT_S, clock=clock)
    await view.start()
    view.pull_failed()
    assert not (await view.prefix(chain, LAYOUT)).known
    assert view.status().pulls_failing
    clock.ahead += 3
    assert await blocks(view, chain) == 3
    assert not (await view.prefix(chain, LAYOUT)).known
    view.pull_worked()
    assert await blocks(view, chain) == 3
    await view.close()


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
        with pytest.raises(MasterRefused):
            await view.drain(names[0])
        with pytest.raises(KeyError):
            await view.drain("10.0.0.1:1")
        with pytest.raises(ValueError, match="no other segment"):
            await view.drain(names[1])
        with pytest.raises(MasterRefused):
            await view.drained("1-2")


async def test_draining_without_a_master_is_an_error_with_its_reason() -> None:
    async with viewing("127.0.0.1:1", 2) as view:
        with pytest.raises(MasterAway, match="refused"):
            await view.drained("1-2")
