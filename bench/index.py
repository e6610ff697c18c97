"""The block index against ai-dynamo-runtime's RadixTree: ingest, match, memory, snapshot.

Every measurement runs in a process of its own, so that resident memory is that of one structure. The load:
conversations of `chain` blocks stored in events of 128; each lies on one target whole and on every second of
them also, to a random depth, on another (as long as there are several): 1.25 copies a block. `crowded` is one
conversation that every target holds to a depth of its own. Ingest is per second of CPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from store.events import decode
from store.hashing import Chain, Digests
from store.index import BlockIndex
from store.knowledge import Knowledge, Shown
from store.sequence import Mark
from store.snapshot import TargetState, load, save
from store.streams import StreamMark

EVENT = 128
TOKENS = 16


def conversation(number: int, chain: int) -> list[int]:
    return np.random.default_rng(number).integers(1, 1 << 63, chain, dtype=np.uint64).tolist()


def events(keys: Sequence[int]) -> Iterator[tuple[list[int], int | None]]:
    for start in range(0, len(keys), EVENT):
        yield list(keys[start : start + EVENT]), keys[start - 1] if start else None


def placements(chain: int, targets: int, blocks: int) -> Iterator[tuple[int, list[int]]]:
    """(target, keys it stores) of the whole load, fresh int objects every time as a decoder makes them."""
    rng = np.random.default_rng(7)
    for number in range(blocks // chain):
        home = int(rng.integers(targets))
        yield home, conversation(number, chain)
        if number % 2 and targets > 1:
            other = (home + 1 + int(rng.integers(targets - 1))) % targets
            yield other, conversation(number, chain)[: int(rng.integers(1, chain))]


def crowd(chain: int, targets: int) -> Iterator[tuple[int, list[int]]]:
    rng = np.random.default_rng(11)
    for target in range(targets):
        yield target, conversation(-1 & 0xFFFFFFFF, chain)[: int(rng.integers(1, chain + 1))]


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def times_us(call: Callable[[Any], Any], chains: Sequence[Any], repeats: int = 30) -> dict[str, float]:
    taken: list[float] = []
    for _ in range(repeats):
        for keys in chains:
            start = time.perf_counter()
            call(keys)
            taken.append((time.perf_counter() - start) * 1e6)
    cuts = statistics.quantiles(taken, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}


def queries(chain: int, blocks: int) -> list[list[int]]:
    """Twenty conversations of the load, each with a tail that nobody has."""
    count = blocks // chain
    numbers = range(0, count, max(1, count // 20))
    return [conversation(n, chain)[: chain - 80] + conversation(n + (1 << 20), 80) for n in numbers]


def as_hashed(keys: list[int]) -> Sequence[int]:
    """The keys in the form in which store.hashing gives those of a prompt."""
    return Chain.of(Digests(b"".join(bytes(24) + key.to_bytes(8, "big") for key in keys), 32)).keys


def measure_ours(chain: int, targets: int, blocks: int) -> dict[str, Any]:
    index = BlockIndex()
    index.keep_below(1 << 40)  # never reached, but watched as in production
    names = [f"worker-{n}" for n in range(targets)]
    before, spent, stored = rss(), 0.0, 0
    for target, keys in placements(chain, targets, blocks):
        batch = list(events(keys))
        del keys
        start = time.process_time()
        for run, parent in batch:
            index.stored(names[target], run, parent)
        spent += time.process_time() - start
        stored += sum(len(run) for run, _ in batch)
    took = rss() - before
    result = {
        "blocks_per_s": round(stored / spent),
        "bytes_per_block": round(took / blocks, 1),
        "estimated": round(index.memory() / blocks, 1),
        "match": times_us(index.match, queries(chain, blocks)),
        "match_hashed": times_us(index.match, [as_hashed(keys) for keys in queries(chain, blocks)]),
    }
    crowded = BlockIndex()
    for target, keys in crowd(chain, targets):
        for run, parent in events(keys):
            crowded.stored(names[target], run, parent)
    return result | {"crowded": times_us(crowded.match, [conversation(-1 & 0xFFFFFFFF, chain)], 300)}


def measure_decoded(blocks: int) -> dict[str, Any]:
    payloads = [
        msgspec.msgpack.encode(
            [
                time.time(),
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": run,
                        "parent_block_hash": parent,
                        "token_ids": np.random.default_rng(1)
                        .integers(0, 150_000, len(run) * TOKENS)
                        .tolist(),
                        "block_size": TOKENS,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "group_idx": 0,
                        "kv_cache_spec_kind": "full_attention",
                    }
                ],
                0,
            ]
        )
        for number in range(blocks // 2500)
        for run, parent in events(conversation(number, 2500))
    ]
    knowledge = Knowledge()
    start = time.process_time()
    for payload in payloads:
        knowledge.batch("worker", decode(payload))
    spent = time.process_time() - start
    return {"blocks_per_s": round(sum(knowledge.index.sizes().values()) / spent)}


def measure_snapshot(blocks: int) -> dict[str, Any]:
    index = BlockIndex()
    for target, keys in placements(5000, 64, blocks):
        for run, parent in events(keys):
            index.stored(f"worker-{target}", run, parent)
    steps: list[float] = []
    capture, done = None, False
    while not done:
        start = time.perf_counter()
        capture = capture or index.capture()
        done = capture.advance()
        steps.append(time.perf_counter() - start)
    assert capture is not None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index"
        state = TargetState(StreamMark(Mark(1, 2), complete=True), Shown(TOKENS, None))
        save(path, capture.whole(), BlockIndex().capture().whole(), {f"worker-{n}": state for n in range(64)})
        size = path.stat().st_size
        start = time.perf_counter()
        restored = load(path).index
        load_s = time.perf_counter() - start
    assert restored.sizes() == index.sizes()
    taken = {"capture_ms": round(sum(steps) * 1e3, 1), "longest_step_ms": round(max(steps) * 1e3, 2)}
    return taken | {"load_s": round(load_s, 2), "mib": size >> 20}


def measure_churn(blocks: int, rounds: int) -> dict[str, Any]:
    """Store and remove everything, in random order, several times: what stays must not grow.

    longest_step_ms: CPU of the longest single call, storing 128 blocks or removing one.
    """
    index = BlockIndex()
    rng = np.random.default_rng(3)
    resident: list[int] = []
    longest = {"stored": 0.0, "removed": 0.0}
    copies = 0
    for _ in range(rounds):
        stored: list[tuple[str, list[int], int | None]] = []
        for target, keys in placements(2500, 8, blocks):
            stored += [(f"worker-{target}", run, parent) for run, parent in events(keys)]
        for at in rng.permutation(len(stored)):
            start = time.thread_time()
            index.stored(*stored[at])
            longest["stored"] = max(longest["stored"], time.thread_time() - start)
        held = [(name, key) for name, run, _ in stored for key in run]
        copies += len(held)
        for at in rng.permutation(len(held)):
            start = time.thread_time()
            index.removed(held[at][0], [held[at][1]])
            longest["removed"] = max(longest["removed"], time.thread_time() - start)
        assert index.sizes() == {}
        del stored, held
        resident.append(rss() >> 20)
    return {
        "copies": copies,
        "rss_mib_after_each_round": resident,
        "left": index.memory(),
        "longest_step_ms": {what: round(taken * 1e3, 1) for what, taken in longest.items()},
    }


def measure_radix(chain: int, targets: int, blocks: int) -> dict[str, Any]:
    from dynamo.llm import RadixTree

    tree = RadixTree()
    before, spent, stored, number = rss(), 0.0, 0, 0

    def store(target: int, keys: list[int]) -> None:
        nonlocal spent, stored, number
        batch: list[bytes] = []
        for run, parent in events(keys):
            number += 1
            listed = [{"block_hash": key, "tokens_hash": key} for key in run]
            event = {"event_id": number, "data": {"stored": {"parent_hash": parent, "blocks": listed}}}
            batch.append(json.dumps(event).encode())
        start = time.process_time()
        for event in batch:
            tree.apply_event(target, event)
        spent += time.process_time() - start
        stored += len(keys)

    for target, keys in placements(chain, targets, blocks):
        store(target, keys)
    result = {
        "blocks_per_s": round(stored / spent),
        "bytes_per_block": round((rss() - before) / blocks, 1),
        "match": times_us(tree.find_matches, queries(chain, blocks)),
    }
    for target, keys in crowd(chain, targets):
        store(target, keys)
    return result | {"crowded": times_us(tree.find_matches, [conversation(-1 & 0xFFFFFFFF, chain)], 300)}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "ours": measure_ours,
    "radix": measure_radix,
    "decoded": measure_decoded,
    "churn": measure_churn,
    "snapshot": measure_snapshot,
}


def apart(part: str, *numbers: int) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--part", part, *map(str, numbers)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr else "?"}
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one size only, under a minute")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, *numbers = arguments.part
        print(json.dumps(PARTS[name](*map(int, numbers))))
        return
    sizes = [(5000, 64, 1_000_000)]
    if not arguments.quick:
        sizes += [(c, t, 1_000_000) for c in (2500, 5000) for t in (8, 64, 256) if (c, t) != (5000, 64)]
        sizes.append((5000, 64, 10_000_000))
    print(
        f"{'chain':>6} {'targets':>7} {'blocks':>9}  {'':6} {'blocks/s':>10} {'B/block':>8}"
        f" {'match us p50/p99':>18} {'crowded p50/p99':>18}"
    )
    found: dict[str, dict[str, Any]] = {}
    for chain, targets, blocks in sizes:
        for part in ("ours", "radix"):
            got = apart(part, chain, targets, blocks)
            if (chain, targets, blocks) == sizes[0]:
                found[part] = got
            if "failed" in got:
                print(f"{chain:>6} {targets:>7} {blocks:>9}  {part:6} {got['failed']}")
                continue
            times = [f"{got[kind]['p50']:.0f} / {got[kind]['p99']:.0f}" for kind in ("match", "crowded")]
            print(
                f"{chain:>6} {targets:>7} {blocks:>9}  {part:6} {got['blocks_per_s']:>10}"
                f" {got['bytes_per_block']:>8} {times[0]:>18} {times[1]:>18}",
                flush=True,
            )
    decoded = apart("decoded", 200_000)
    print(f"with decoding: {decoded['blocks_per_s']} blocks/s")
    snapshot = apart("snapshot", 1_000_000)
    print(
        f"snapshot of 1,000,000 blocks: captured in {snapshot['capture_ms']} ms, "
        f"{snapshot['longest_step_ms']} at once; loaded in"
        f" {snapshot['load_s']} s, {snapshot['mib']} MiB"
    )
    churn = apart("churn", *((100_000, 5) if arguments.quick else (5_000_000, 3)))
    print(
        f"{churn['copies']} copies stored and removed in random order: resident after each round, MiB: "
        f"{churn['rss_mib_after_each_round']}; left {churn['left']} bytes; longest step, ms of CPU: "
        f"{churn['longest_step_ms']}"
    )
    ours, radix = found["ours"], found["radix"]
    result = {
        "match_5000x64_us": ours["match"]["p50"],
        "match_crowded_5000x64_us": ours["crowded"]["p50"],
        "match_hashed_5000x64_us": ours["match_hashed"]["p50"],
        "snapshot_load_s_per_million": snapshot["load_s"],
        "ingest_blocks_per_s": ours["blocks_per_s"],
        "ingest_decoded_blocks_per_s": decoded["blocks_per_s"],
        "bytes_per_block_64": ours["bytes_per_block"],
        "radixtree_match_5000x64_us": radix.get("match", {}).get("p50"),
        "radixtree_bytes_per_block_64": radix.get("bytes_per_block"),
        "radixtree_ingest_blocks_per_s": radix.get("blocks_per_s"),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
