"""What the pool adds to a decision: look-ups at a real Mooncake master, and what faults of it cost turns.

A master of its own on this machine, with objects of 1 KiB. `look-up` is of prompts that nobody asked for yet,
all of whose blocks are there, through the master's HTTP and through the store client, without a budget that
matters. Faults are of turns one after the other, each a new prompt of 500 blocks, with the budget of 5 ms:
time added at p50, p99 and worst while the master is well, frozen (SIGSTOP), slow (every answer 100 ms late),
killed, and started anew (3 s of turns). It holds the scheduling of a machine that runs the master, the turns
and whatever else: `load` is what it had to do.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from store.hashing import Chain, Digests
from store.keys import KeyLayout
from store.pool import PoolView
from workers.launch.mooncake import MooncakeMaster
from workers.launch.ports import free_ports
from workers.sim.pool import SimPool

LAYOUT = KeyLayout("tiny")
PORTS = free_ports(above=28_000)
BUDGET_S = 0.005


def prompt(name: str, blocks: int) -> Chain:
    digests = (hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(blocks))
    return Chain.of(Digests(b"".join(digests), 32))


@asynccontextmanager
async def viewing(
    address: str, http_port: int, budget_s: float, lookup: Literal["http", "rpc"] = "http"
) -> AsyncIterator[PoolView]:
    view = PoolView(address, http_port=http_port, budget_s=budget_s, lookup=lookup)
    await view.start()
    try:
        yield view
    finally:
        await view.close()


@asynccontextmanager
async def late(port: int, delay: Callable[[], float]) -> AsyncIterator[int]:
    """A port that leads to `port`; what comes back comes so much later."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if wait:
                    await asyncio.sleep(delay())
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, there, False), pipe(back, writer, True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def well(view: PoolView) -> None:
    async with asyncio.timeout(20):
        while view.degraded:  # noqa: ASYNC110 - the view has an owner of its own that looks
            await asyncio.sleep(0.02)


async def turns(view: PoolView, count: int, label: str, pause_s: float = 0.0) -> dict[str, float]:
    """Milliseconds that look-ups of prompts seen by nobody take; with pauses between them if wanted."""
    chains = [prompt(f"{label} {n}", 500) for n in range(count)]
    taken: list[float] = []
    for chain in chains:
        began = time.perf_counter()
        await view.prefix(chain, LAYOUT)
        taken.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(pause_s)
    taken.sort()
    return {
        "p50": round(statistics.median(taken), 2),
        "p99": round(taken[int(count * 0.99) - 1], 2),
        "max": round(taken[-1], 2),
        "load": round(os.getloadavg()[0], 1),
    }


async def faults(master: MooncakeMaster, count: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    pid = master.process.pid
    assert pid is not None
    async with viewing(master.address, master.http_port, BUDGET_S) as view:
        await well(view)
        found["well"] = await turns(view, count, "well")
        os.kill(pid, signal.SIGSTOP)
        found["frozen"] = await turns(view, count, "frozen")
        os.kill(pid, signal.SIGCONT)
        await well(view)
        found["thawed"] = await turns(view, count, "thawed")
    lag = [0.0]
    async with (
        late(master.http_port, lambda: lag[0]) as port,
        viewing(f"127.0.0.1:{port}", port, BUDGET_S) as view,
    ):
        await well(view)
        lag[0] = 0.1
        found["slow"] = await turns(view, count, "slow")
    async with viewing(master.address, master.http_port, BUDGET_S) as view:
        await well(view)
        master.kill()
        found["killed"] = await turns(view, count, "killed")
        await master.start()
        found["restarted"] = await turns(view, count, "restarted", 3 / count)
    return found


async def lookups(master: MooncakeMaster, sizes: list[int], repeats: int) -> dict[str, float]:
    """Median milliseconds of a whole look-up by way and blocks, A B A B."""
    store = SimPool(
        master.address, f"127.0.0.1:{next(PORTS)}", LAYOUT, block_bytes=1024, segment_bytes=256 << 20
    )
    assert store.connect()
    taken: dict[str, list[float]] = {}
    async with (
        viewing(master.address, master.http_port, 2.0) as http,
        viewing(master.address, master.http_port, 2.0, "rpc") as rpc,
    ):
        for view in (http, rpc):
            await well(view)
        for blocks in sizes:
            for n in range(repeats):
                chain = prompt(f"held {blocks} {n}", blocks)
                store.put(chain.digests)
                for name, view in (("http", http), ("rpc", rpc)):
                    began = time.perf_counter()
                    prefix = await view.prefix(chain, LAYOUT)
                    taken.setdefault(f"{name}_{blocks}", []).append((time.perf_counter() - began) * 1e3)
                    assert (prefix.known, prefix.blocks) == (True, blocks)
    store.close()
    return {name: round(statistics.median(times), 2) for name, times in taken.items()}


async def measured(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "master.log"
        master = MooncakeMaster(rpc_port=next(PORTS), http_port=next(PORTS), log=log)
        await master.start()
        try:
            looked = await lookups(master, [100, 1000, 5000], 5 if quick else 20)
            return {"lookups": looked, "faults": await faults(master, 300 if quick else 2000)}
        finally:
            await master.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns, under a minute")
    found = asyncio.run(measured(parser.parse_args().quick))
    print(f"{'blocks, all there':24} {'100':>8} {'1,000':>8} {'5,000':>8}   ms")
    for way in ("http", "rpc"):
        row = [found["lookups"][f"{way}_{blocks}"] for blocks in (100, 1000, 5000)]
        print(f"{way:24} {row[0]:>8} {row[1]:>8} {row[2]:>8}")
    print(f"{'added to a turn, ms':24} {'p50':>8} {'p99':>8} {'max':>8} {'load':>8}")
    for state, row in found["faults"].items():
        print(f"{state:24} {row['p50']:>8} {row['p99']:>8} {row['max']:>8} {row['load']:>8}")
    result = {f"lookup_{name}_ms": took for name, took in found["lookups"].items()}
    result |= {f"added_{state}_p99_ms": row["p99"] for state, row in found["faults"].items()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
