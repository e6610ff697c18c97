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
from tests.clock import unhindered
from tests.store.pools import LAYOUT, PORTS, blocks, chain_of, proxying, recovered, storing, until, viewing
from workers.launch.mooncake import MooncakeMaster
from workers.sim.pool import SimPool


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
        began = unhindered()
        assert (await view.prefix(chain, LAYOUT)).exact
        assert unhindered() - began < 0.02


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
