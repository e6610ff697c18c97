import asyncio
import os
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from store.keys import KeyLayout
from store.pool import PoolPrefix, PoolView
from tests.clock import once_in_time, unhindered
from tests.store.pools import LAYOUT, PORTS, blocks, chain_of, proxying, recovered, storing, until, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool


async def test_b065_a_client_that_hangs_holds_no_turn(own_master: MooncakeMaster) -> None:
    async with viewing(own_master.address, own_master.http_port, 0.005, "rpc") as view:
        await recovered(view)
        while not (await view.prefix(chain_of("warm", 1), LAYOUT)).known:
            await asyncio.sleep(0.05)  # the client is set up by the first call

        async def hang() -> list[tuple[float, float]]:
            async with frozen(own_master):
                took, answers = await latencies(view, 200)
            assert not any(answer.known for answer in answers)
            await recovered(view)

            async def known() -> bool:
                return (await view.prefix(chain_of("thawed", 3), LAYOUT)).known

            await until(known)
            return [(took[198], 0.020)]

        await once_in_time(hang)


@asynccontextmanager
async def frozen(master: MooncakeMaster) -> AsyncIterator[None]:
    assert master.process.pid is not None
    os.kill(master.process.pid, signal.SIGSTOP)
    yield
    os.kill(master.process.pid, signal.SIGCONT)


async def latencies(
    view: PoolView, turns: int, layout: KeyLayout = LAYOUT
) -> tuple[list[float], list[PoolPrefix]]:
    """Of turns one after the other, each a prompt of its own of 500 blocks."""
    chains = [chain_of(f"fault{number}.{random.random()}", 500) for number in range(turns)]
    took: list[float] = []
    answers: list[PoolPrefix] = []
    for chain in chains:
        began = unhindered()
        answers.append(await view.prefix(chain, layout))
        took.append(unhindered() - began)
    return sorted(took), answers


async def test_b065_a_frozen_master_costs_a_few_budgets_then_nothing_and_comes_back(
    own_master: MooncakeMaster,
) -> None:
    async with viewing(own_master.address, own_master.http_port, budget_s=0.005) as view:

        async def freeze() -> list[tuple[float, float]]:
            await recovered(view)
            async with frozen(own_master):
                took, answers = await latencies(view, 300)
                assert not any(answer.known or answer.blocks for answer in answers)
                assert view.degraded
                assert view.status().reason in ("slow", "timeout")
            return [(took[int(len(took) * 0.99)], 0.020), (took[len(took) // 2], 0.001)]

        await once_in_time(freeze)
        await recovered(view)


async def test_b065_a_killed_master_costs_nothing_and_what_it_knew_is_forgotten(
    own_master: MooncakeMaster,
) -> None:
    chain = chain_of("killed", 30)
    async with viewing(own_master.address, own_master.http_port) as view, storing(own_master) as pool:
        pool.put(chain.digests)
        assert await blocks(view, chain) == 30

        async def down() -> bool:
            return view.degraded

        async def die() -> list[tuple[float, float]]:
            before = view.status().outages
            own_master.kill()
            await until(down)
            assert view.status().remembered == 0
            took, answers = await latencies(view, 100)
            assert not any(answer.known for answer in answers)
            await own_master.start()
            await recovered(view)
            assert await blocks(view, chain) == 0
            assert view.status().outages == before + 1
            return [(took[98], 0.020)]

        await once_in_time(die)


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

        async def slow_down() -> list[tuple[float, float]]:
            await recovered(view)
            lag[0] = 0.1
            took, answers = await latencies(view, 100)
            assert not any(answer.known for answer in answers)
            assert view.status().reason == "slow"
            lag[0] = 0.0
            return [(took[98], 0.020)]

        await once_in_time(slow_down)
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
    async def ask() -> list[tuple[float, float]]:
        began = time.monotonic()
        async with misbehaving(how) as port, viewing(f"127.0.0.1:{port}", port, budget_s=0.005) as view:
            started = time.monotonic() - began
            took, answers = await latencies(view, 50)
            assert not any(answer.known for answer in answers)
            assert view.degraded
            assert view.status().reason
        return [(started, 2), (took[-1], 0.020)]

    await once_in_time(ask)


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

        async def again() -> list[tuple[float, float]]:
            began = unhindered()
            assert (await view.prefix(chain, LAYOUT)).exact
            return [(unhindered() - began, 0.02)]

        await once_in_time(again)


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
