"""What comes and goes leaves nothing: not in memory, not in what is shown. Five million: `bench/index.py`."""

import gc
from pathlib import Path
from random import Random

from conftest import QUICK

from gateway.app import Gateway
from gateway.settings import load
from store.events import BlockRemoved, BlockStored, EventBatch

CHAINS, BLOCKS, EVENT, ROUNDS = 200, 500, 50, 4


def rss() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def batch(event: BlockStored | BlockRemoved) -> EventBatch:
    return EventBatch(1.0, [event], 0)


async def test_blocks_in_and_out_in_random_order_leave_rss_flat_and_every_gauge_at_zero() -> None:
    gateway = Gateway(load(None, QUICK, {}))
    workers = ("127.0.0.1:1", "127.0.0.1:2")
    for name in workers:
        gateway.fleet.add(f"http://{name}")
    knowledge, draws = gateway.knowledge, Random(5)
    resident: list[int] = []
    for number in range(ROUNDS):
        stored: list[tuple[str, list[int], int | None]] = []
        for chain in range(CHAINS):
            keys = [draws.getrandbits(64) for _ in range(BLOCKS)]
            for start in range(0, BLOCKS, EVENT):
                run = keys[start : start + EVENT]
                stored.append((workers[chain % 2], run, keys[start - 1] if start else None))
        draws.shuffle(stored)
        for name, run, parent in stored:
            knowledge.batch(name, batch(BlockStored(run, parent, [], 16, "gpu", 0)))
        assert sum(knowledge.index.sizes().values()) == CHAINS * BLOCKS
        gone = [(name, key) for name, run, _ in stored for key in run]
        draws.shuffle(gone)
        for name, key in gone:
            knowledge.index.removed(name, [key])
        del stored, gone
        resident.append(rss())
        assert knowledge.index.sizes() == {}
        assert knowledge.memory < 100_000, number
    # What a round leaves, 20 bytes a block or more, is there twice.
    assert max(resident[2:]) - resident[1] < 4 << 20
    shown = gateway.metrics.exposition()[0].decode().splitlines()
    assert not [line for line in shown if line.startswith("moongate_index_blocks{")]
    (size,) = [line for line in shown if line.startswith("moongate_index_bytes ")]
    assert float(size.split()[1]) < 100_000
    assert "moongate_index_evicted_blocks_total 0.0" in shown
    index = gateway._index_report()
    assert [entry.blocks for entry in index.targets] == [{}, {}]
