"""What a turn costs on its way through the gateway, side by side with other routers in the same run.

    .venv/bin/python bench/proxy.py [--quick]

Two mock workers that answer at once, a closed-loop generator, bodies of 1 KB, 349 KB (agent: 80,000 tokens,
8 KB more each turn, warm: every turn but a session's first) and 800 KB. `exact` hashes each prompt and finds
its blocks in the index, of which the workers' events told; `plain` looks at no prompt. CPU is that of the
router's process; added latency is the median through the router less the median without it. Chunks of paced
streams say when they were sent: their delay is that of each one, from the worker to its client. Cells of one
round follow each other router by router; the table has medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from prompt import MODEL, SCHEME, Conversation, make_model
from wire.load import Timing, cpu_s, drive, rss_mb
from wire.targets import Target, Targets, await_ready, install_peers

from store.prompt.local import LocalPrompts
from store.prompt.request import ChatPrompt
from workers.launch.ports import free_ports
from workers.sim.kv_publisher import KvPublisher

AGENT_TOKENS, HUGE_TOKENS = 80_000, 188_000
DIRECT, EXACT, PLAIN = "no router", "moongate exact", "moongate plain"
ROUND_ROBIN, CACHE_AWARE = "vllm-router round_robin", "vllm-router cache_aware"
SMALL = {"model": "m", "messages": [{"role": "user", "content": "Which worker holds this? " * 35}]}
PACED_CHUNKS, PACED_LANES = 100, 64
# 4,000 chunks a second, while turns begin and end: what each chunk waits on its way is measured here.
MANY = "paced stream, 200"
# An agent's tool takes longer than that. The gateway lets a turn that comes sooner after its session's last
# answer wait for that answer's events: up to 20 ms which no real agent sees.
TOOL_S = 0.03


@dataclass(frozen=True, slots=True)
class Cell:
    """So many connections with so many turns each. user: what the workers are asked to answer.

    apart_s: between the connections' beginnings.
    """

    name: str
    size: str
    lanes: int
    turns: int
    user: str = "whole"
    apart_s: float = 0.0


QUICK = [
    Cell("1 KB, 1", "small", 1, 200),
    Cell("1 KB, 16", "small", 16, 60),
    Cell("349 KB, 1", "agent", 1, 14),
    Cell("349 KB, 16", "agent", 16, 3),
    Cell("paced stream, 64", "small", PACED_LANES, 1, f"paced-{PACED_CHUNKS}-20"),
    Cell(MANY, "small", 200, 1, "paced-80-50", apart_s=0.005),
]
FULL = [
    Cell("1 KB, 1", "small", 1, 500),
    Cell("1 KB, 16", "small", 16, 150),
    Cell("1 KB, 64", "small", 64, 50),
    Cell("1 KB stream, 16", "small", 16, 60, "burst-32"),
    Cell("349 KB, 1", "agent", 1, 24),
    Cell("349 KB, 16", "agent", 16, 6),
    Cell("349 KB, 64", "agent", 64, 2),
    Cell("349 KB stream, 16", "agent", 16, 4, "burst-32"),
    Cell("800 KB, 1", "huge", 1, 12),
    Cell("800 KB, 16", "huge", 16, 2),
    Cell("paced stream, 64", "small", PACED_LANES, 1, f"paced-{PACED_CHUNKS}-20"),
    Cell(MANY, "small", 200, 1, "paced-80-50", apart_s=0.005),
]


@dataclass(slots=True)
class Row:
    """Per turn: CPU ms, and the latencies of each round; `chunk_p99_ms`: of each chunk from the worker."""

    cpu_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    chunk_p99_ms: list[float] = field(default_factory=list)
    failed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds, under 60 s")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of the routers to run, by their beginnings"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    make_model(MODEL)
    missing = install_peers()
    if missing:
        print(f"without peers: {missing}")
    ports = free_ports(above=25_000)
    with Targets(ROOT / ".moongate" / "logs" / "bench-proxy") as targets:
        bench = Bench(targets, ports, peers=not missing, only=args.only)
        asyncio.run(bench.run(QUICK if args.quick else FULL, 1 if args.quick else 3))


class Bench:
    def __init__(self, targets: Targets, ports: Any, *, peers: bool, only: Sequence[str]) -> None:
        self.prompts = LocalPrompts.load(str(MODEL), cache_bytes=512 << 20)
        self.publishers: list[KvPublisher] = []
        self.announced = itertools.count()
        workers: list[str] = []
        for number in range(2):
            port, events, replay = next(ports), next(ports), next(ports)
            self.publishers.append(KvPublisher("127.0.0.1", events, replay))
            argv = [
                str(ROOT / "bench" / "wire" / "worker.py"),
                str(port),
                str(MODEL),
                str(events),
                str(replay),
            ]
            targets.run(f"worker {number}", argv)
            workers.append(f"http://127.0.0.1:{port}")
        self.targets = [Target(DIRECT, int(workers[0].rsplit(":", 1)[1]))]
        for url in workers:
            await_ready(Target(url, int(url.rsplit(":", 1)[1])), _small("whole"))
        wanted: list[tuple[str, Callable[[], Target]]] = [
            (EXACT, lambda: targets.gateway(EXACT, next(ports), workers, MOONGATE_PROMPT__SOURCE="local")),
            (
                PLAIN,
                lambda: targets.gateway(
                    PLAIN,
                    next(ports),
                    workers,
                    MOONGATE_ROUTING__POLICY="round_robin",
                    MOONGATE_PROMPT__SOURCE="off",
                ),
            ),
        ]
        if peers:
            wanted += [
                (ROUND_ROBIN, lambda: targets.vllm_router("round_robin", next(ports), next(ports), workers)),
                (CACHE_AWARE, lambda: targets.vllm_router("cache_aware", next(ports), next(ports), workers)),
                ("smg round_robin", lambda: targets.smg("round_robin", next(ports), next(ports), workers)),
                ("smg cache_aware", lambda: targets.smg("cache_aware", next(ports), next(ports), workers)),
            ]
        for name, start in wanted:
            if not only or any(name.startswith(each) for each in only):
                self.targets.append(start())
        for target in self.targets:
            await_ready(target, _small("whole"))

    async def settle(self) -> None:
        """One session through every router, then wait until what that set off in the background has ended."""
        for target in self.targets[1:]:
            conversation = Conversation(AGENT_TOKENS)
            turns = [conversation.body(), conversation.next_turn(), conversation.next_turn()]
            await drive(target.port, [[_asking(body, "whole") for body in turns]])
        for target in self.targets[1:]:
            used, quiet = cpu_s(target.pid), 0
            async with asyncio.timeout(60):
                while quiet < 4:
                    await asyncio.sleep(0.3)
                    now = cpu_s(target.pid)
                    quiet = quiet + 1 if now - used < 0.02 else 0
                    used = now

    async def run(self, cells: Sequence[Cell], rounds: int) -> None:
        await self.settle()
        rows: dict[str, dict[str, Row]] = {}
        before = {target.name: rss_mb(target.pid) for target in self.targets if target.process}
        for _ in range(rounds):
            for cell in cells:
                for target in self.targets:
                    row = rows.setdefault(cell.name, {}).setdefault(target.name, Row())
                    await self.measure(target, cell, row)
        after = {target.name: rss_mb(target.pid) for target in self.targets if target.process}
        report(rows, before, after)
        print(
            "RESULT "
            + json.dumps({key: round(value, 3) for key, value in result(rows, before, after).items()})
        )

    async def measure(self, target: Target, cell: Cell, row: Row) -> None:
        lanes, first = self.bodies(cell, target)
        if first:
            await drive(target.port, first)
        gc.collect()
        cpu = cpu_s(target.pid) if target.process else 0.0
        began = time.perf_counter()
        pause_s = TOOL_S if first and cell.lanes == 1 else 0.0
        timing: Timing = await drive(target.port, lanes, pause_s, cell.apart_s)
        seconds = time.perf_counter() - began
        turns = cell.lanes * cell.turns
        # What a turn left to do after its answer counts too.
        await asyncio.sleep(0.05)
        if target.process:
            row.cpu_ms.append((cpu_s(target.pid) - cpu) * 1e3 / turns)
        row.p50_ms.append(statistics.median(timing.whole) * 1e3)
        row.p99_ms.append(_p99(timing.whole) * 1e3)
        # Bursts are stamped when the worker starts.
        if timing.delays and cell.user.startswith("paced"):
            row.chunk_p99_ms.append(_p99(timing.delays) * 1e3)
        row.per_s.append(turns / seconds)
        row.failed += timing.failed

    def bodies(self, cell: Cell, target: Target) -> tuple[list[list[bytes]], list[list[bytes]]]:
        """What each lane sends, and what it sent before; nobody has seen these conversations."""
        if cell.size == "small":
            return [[_small(cell.user)] * cell.turns for _ in range(cell.lanes)], []
        tokens = AGENT_TOKENS if cell.size == "agent" else HUGE_TOKENS
        lanes: list[list[bytes]] = []
        first: list[list[bytes]] = []
        for _ in range(cell.lanes):
            conversation = Conversation(tokens)
            first.append([_asking(conversation.body(), "whole")])
            lanes.append([_asking(conversation.next_turn(), cell.user) for _ in range(cell.turns)])
            if target.name == EXACT:
                self.announce(first[-1][0])
        return lanes, first

    def announce(self, body: bytes) -> None:
        """Let a worker say that it holds the blocks of this prompt."""
        prompt = self.prompts.prompt(msgspec.json.decode(body, type=ChatPrompt), SCHEME)
        size = SCHEME.block_size
        event = {
            "type": "BlockStored",
            "block_hashes": list(prompt.chain.keys),
            "parent_block_hash": None,
            "token_ids": prompt.tokens[: len(prompt.chain) * size].tolist(),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        self.publishers[next(self.announced) % 2].publish(time.time(), [event])


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def _small(user: str) -> bytes:
    return json.dumps({**SMALL, "user": user, "stream": user != "whole"}).encode()


def _asking(body: bytes, user: str) -> bytes:
    """A conversation's body with a limit and with what the workers are to answer."""
    stream = b"true" if user != "whole" else b"false"
    return body.replace(b'"stream": true', b'"stream": %b, "user": "%b"' % (stream, user.encode()))


def result(
    rows: dict[str, dict[str, Row]], before: dict[str, float], after: dict[str, float]
) -> dict[str, float]:
    def cpu(cell: str, target: str) -> float:
        row = rows.get(cell, {}).get(target)
        return statistics.median(row.cpu_ms) if row else float("nan")

    def chunk_p99(target: str) -> float:
        row = rows[MANY].get(target)
        return statistics.median(row.chunk_p99_ms) if row else float("nan")

    agent = rows["349 KB, 1"]
    found = {
        "agent_exact_cpu_ms": cpu("349 KB, 16", EXACT),
        "agent_plain_cpu_ms": cpu("349 KB, 16", PLAIN),
        "small_plain_cpu_ratio": cpu("1 KB, 16", PLAIN) / cpu("1 KB, 16", ROUND_ROBIN),
        "small_exact_cpu_ratio": cpu("1 KB, 16", EXACT) / cpu("1 KB, 16", ROUND_ROBIN),
        "chunk_cpu_us": cpu("paced stream, 64", EXACT) * 1e3 / PACED_CHUNKS,
        "chunk_added_p99_ms": chunk_p99(EXACT) - chunk_p99(DIRECT),
        "peer_cache_aware_agent_cpu_ms": cpu("349 KB, 16", CACHE_AWARE),
        "peer_round_robin_agent_cpu_ms": cpu("349 KB, 16", ROUND_ROBIN),
        "small_plain_cpu_us": cpu("1 KB, 16", PLAIN) * 1e3,
        "small_exact_cpu_us": cpu("1 KB, 16", EXACT) * 1e3,
        "failed": float(sum(row.failed for cell in rows.values() for row in cell.values())),
    }
    for name, key in ((EXACT, "exact"), (PLAIN, "plain")):
        if name in agent:
            added = statistics.median(agent[name].p50_ms) - statistics.median(agent[DIRECT].p50_ms)
            found[f"agent_{key}_added_p50_ms"] = added
            found[f"{key}_rss_growth_mb"] = after[name] - before[name]
    return {key: value for key, value in found.items() if value == value}


def report(rows: dict[str, dict[str, Row]], before: dict[str, float], after: dict[str, float]) -> None:
    for cell, targets in rows.items():
        print(f"\n{cell:<26} {'CPU ms/turn':>11} {'p50 ms':>8} {'p99 ms':>8} {'added':>8} {'turns/s':>8}")
        direct = statistics.median(targets[DIRECT].p50_ms)
        for name, row in targets.items():
            cpu = f"{statistics.median(row.cpu_ms):11.3f}" if row.cpu_ms else " " * 11
            p50 = statistics.median(row.p50_ms)
            cells = f"{p50:8.2f} {statistics.median(row.p99_ms):8.2f} {p50 - direct:8.2f}"
            if row.chunk_p99_ms:
                cells += f"  chunk p99 {statistics.median(row.chunk_p99_ms):.2f}"
            failed = f"  {row.failed} failed" if row.failed else ""
            print(f"  {name:<24} {cpu} {cells} {statistics.median(row.per_s):8.0f}{failed}")
    print("\nresident MB, before and after")
    for name, value in before.items():
        print(f"  {name:<24} {value:8.0f} {after[name]:8.0f}")


if __name__ == "__main__":
    main()
