"""The same agent sessions through the gateway and through other routers, in front of one simulated fleet.

    .venv/bin/python bench/peers.py [--quick] [--stock] [--many-s SECONDS] [--only NAME ...]

Four simulated workers with KV events and a Mooncake pool. Routers take turns, each with sessions that nobody
has seen, with empty caches and after a pause; then a worker is killed and comes back while sessions go on.
Hit rates are the engines' own counts, CPU is that of the router's process, memory after many short sessions,
as far as they come in the time each router gets for them.
--stock: workers refuse /render, as vLLM does unless it is started with --enable-scale-out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from itertools import chain
from os import getloadavg
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from wire.load import cpu_s, rss_mb
from wire.targets import Target, Targets, await_ready, install_peers

from workers.launch.mooncake import MooncakeMaster
from workers.launch.ports import free_ports
from workers.launch.sim import SimWorkerSpec, command
from workers.launch.tiny_model import make_tiny_model

WORKERS, BLOCK_SIZE = 4, 32
# 16,000 tokens a worker, together about half of what the sessions of a full cell come to.
BLOCKS = 500
MODEL = "peers"
ANSWER_TOKENS, THINK_S = 16, 0.15


@dataclass(frozen=True, slots=True)
class Size:
    """rounds of `sessions` with `turns` each, all at once; `many` short sessions before memory is read, or as
    many as come in `many_s`.

    pause_s: before each router's, with idle workers: those that ask them how busy they are would else count
    the last router's sessions. killed_s: after which time a worker is killed, down_s: how long it is away;
    `kill_turns` go on meanwhile.
    """

    rounds: int
    sessions: int
    turns: int
    many: int
    many_s: float
    pause_s: float
    killed_s: float
    down_s: float
    kill_turns: int


QUICK = Size(1, 12, 4, 40, 5.0, pause_s=0.3, killed_s=0.5, down_s=0.5, kill_turns=5)
FULL = Size(2, 24, 8, 2000, 20.0, pause_s=3.0, killed_s=1.0, down_s=3.0, kill_turns=16)


@dataclass(slots=True)
class Row:
    hit_rates: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    cpu_behind_ms: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    rss_behind_mb: float = 0.0
    many: int = 0
    failed: int = 0
    failed_in_kill: int = 0
    said: Counter[str] = field(default_factory=Counter[str])


class Conversation:
    """A session: a system prompt that all of one cell have, a task of its own, and what tools said."""

    def __init__(self, cell: str, number: int) -> None:
        self.name = f"{cell}-{number}"
        self._random = random.Random(self.name)
        system = f"Cell {cell}. " + _words(random.Random(cell), 400)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": _words(self._random, 200)},
        ]

    def body(self) -> bytes:
        return json.dumps(
            {
                "model": MODEL,
                "messages": self.messages,
                "stream": True,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
            }
        ).encode()

    def go_on(self) -> None:
        """What the assistant is taken to have said is fixed, so that every router gets the same bodies."""
        self.messages += [
            {"role": "assistant", "content": _words(self._random, 20)},
            {"role": "user", "content": _words(self._random, 120)},
        ]


def _words(source: random.Random, count: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(source.choices(letters, k=source.randint(2, 8))) for _ in range(count))


class Bench:
    def __init__(self, targets: Targets, size: Size, *, stock: bool, only: Sequence[str]) -> None:
        self.targets, self.size, self.stock, self.only = targets, size, stock, only
        self.ports = free_ports(above=26_000)
        self.rows: dict[str, Row] = {}
        self.specs: list[SimWorkerSpec] = []
        self.processes: list[Any] = []

    async def run(self) -> None:
        logs = ROOT / ".moongate" / "logs" / "bench-peers"
        logs.mkdir(parents=True, exist_ok=True)
        master = MooncakeMaster(
            rpc_port=next(self.ports), http_port=next(self.ports), log=logs / "master.log"
        )
        await master.start()
        try:
            model = make_tiny_model(ROOT / ".moongate" / "models" / "tiny")
            for _ in range(WORKERS):
                self.specs.append(self._spec(model, master.address))
                self.processes.append(self._start_worker(self.specs[-1]))
            self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
            async with self.http:
                for spec, process in zip(self.specs, self.processes, strict=True):
                    await asyncio.to_thread(await_ready, Target(spec.url, spec.port, process), _probe())
                await self._measure_all(master)
        finally:
            await master.stop()

    async def _measure_all(self, master: MooncakeMaster) -> None:
        routers: list[Target] = []
        names = [name for name, _ in self._wanted(master)]
        for each in self.only:
            if not any(name.startswith(each) for name in names):
                raise RuntimeError(f"no router's name begins with {each!r}; there are {', '.join(names)}")
        for name, start in self._wanted(master):
            if not self.only or any(name.startswith(each) for each in self.only):
                routers.append(start())
                self.rows[name] = Row()
        for router in list(routers):
            try:
                await asyncio.to_thread(await_ready, router, _probe())
            except RuntimeError as error:
                print(f"left out: {error}")
                routers.remove(router)
                del self.rows[router.name]
        for number in range(self.size.rounds):
            for router in routers:
                _say(f"round {number + 1} of {self.size.rounds}: {router.name}")
                await self._cell(router, f"{router.name} {number}")
        for router in routers:
            _say(f"many sessions: {router.name}")
            await self._many(router)
        for router in routers:
            _say(f"a worker killed: {router.name}")
            await self._with_a_kill(router)

    def _spec(self, model: Path, master: str) -> SimWorkerSpec:
        ports = self.ports
        more = ("--no-render",) if self.stock else ()
        return SimWorkerSpec(
            python=Path(sys.executable),
            model=str(model),
            port=next(ports),
            events_port=next(ports),
            replay_port=next(ports),
            segment_port=next(ports),
            mooncake=master,
            served_model_name=MODEL,
            block_size=BLOCK_SIZE,
            blocks=BLOCKS,
            extra_args=more,
        )

    def _start_worker(self, spec: SimWorkerSpec) -> Any:
        argv, env = command(spec)
        return self.targets.run(f"worker-{spec.port}", argv[1:], **env)

    def _wanted(self, master: MooncakeMaster) -> list[tuple[str, Callable[[], Target]]]:
        urls = [spec.url for spec in self.specs]
        events = [f"{spec.url}=tcp://{spec.host}:{spec.events_port}" for spec in self.specs]
        replays = [f"{spec.url}=tcp://{spec.host}:{spec.replay_port}" for spec in self.specs]
        kv_aware = ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
        for event, replay in zip(events, replays, strict=True):
            kv_aware += ["--kv-event-source", event, "--kv-event-replay-source", replay]
        http = master.http_url.removeprefix("http://")
        pool = {
            "MOONGATE_MOONCAKE__MASTER": master.address,
            "MOONGATE_MOONCAKE__HTTP_PORT": http.rpartition(":")[2],
        }

        def moongate(policy: str) -> Callable[[], Target]:
            name = f"moongate {policy}"
            settings = pool | {
                "MOONGATE_ROUTING__POLICY": policy,
                # The default: workers get turns from the other routers, too, so what they say soon is old.
                "MOONGATE_WORKERS__HEALTH_INTERVAL_S": "1",
            }
            return lambda: self.targets.gateway(name, next(self.ports), urls, **settings)

        def vllm(policy: str, *more: str) -> Callable[[], Target]:
            argv = ["-m", "vllm_router.launch_router", "--policy", policy, "--log-level", "warning", *more]
            return lambda: self._peer(f"vllm-router {policy}", argv, urls)

        def smg(policy: str) -> Callable[[], Target]:
            argv = ["-m", "smg", "launch", "--policy", policy, "--log-level", "warn"]
            return lambda: self._peer(f"smg {policy}", argv, urls)

        def dynamo() -> Target:
            return self.targets.dynamo(next(self.ports), next(self.ports), _catalogue(self.specs))

        starts = {
            "moongate longest_prefix": moongate("longest_prefix"),
            "moongate expected_ttft": moongate("expected_ttft"),
            "vllm-router round_robin": vllm("round_robin"),
            "vllm-router cache_aware": vllm("cache_aware"),
            "vllm-router kv_aware": vllm("kv_aware", *kv_aware),
            "vllm-router consistent_hash": vllm("consistent_hash"),
            "smg cache_aware": smg("cache_aware"),
            "dynamo select_service": dynamo,
        }
        return list(starts.items())

    def _peer(self, name: str, argv: list[str], urls: Sequence[str]) -> Target:
        port = next(self.ports)
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(next(self.ports))]
        return Target(name, port, self.targets.run(name, [*argv, *where, "--worker-urls", *urls]))

    # ------------------------------------------------------------------ cells

    async def _cell(self, router: Target, cell: str) -> None:
        row = self.rows[router.name]
        await self._reset()
        before, cpu, behind = await self._counts(), cpu_s(router.pid), _cpu_behind_s(router)
        times, failed = await self._sessions(router, cell, self.size.sessions, self.size.turns)
        await asyncio.sleep(0.1)
        used_behind = _cpu_behind_s(router) - behind
        used = cpu_s(router.pid) - cpu + used_behind
        after = await self._counts()
        row.hit_rates.append((after[1] - before[1]) / max(1.0, after[0] - before[0]))
        row.ttft_ms += [1e3 * each for each in times]
        row.cpu_ms.append(1e3 * used / (self.size.sessions * self.size.turns))
        row.cpu_behind_ms.append(1e3 * used_behind / (self.size.sessions * self.size.turns))
        row.failed += failed

    async def _many(self, router: Target) -> None:
        """Short sessions, a few at a time."""
        numbers, until = iter(range(self.size.many)), time.monotonic() + self.size.many_s
        row = self.rows[router.name]

        async def some() -> None:
            for number in numbers:
                talk = Conversation(f"{router.name} many", number)
                await self._turn(router, talk.name, talk.body())
                row.many += 1
                if time.monotonic() > until:
                    return

        await asyncio.gather(*(some() for _ in range(16)))
        row.rss_behind_mb = rss_mb(router.behind.pid) if router.behind else 0.0
        row.rss_mb = rss_mb(router.pid) + row.rss_behind_mb

    async def _with_a_kill(self, router: Target) -> None:
        await self._reset()
        victim = self.specs[0]
        sessions = asyncio.create_task(
            self._sessions(router, f"{router.name} kill", self.size.sessions, self.size.kill_turns)
        )
        await asyncio.sleep(self.size.killed_s)
        self.processes[0].kill()
        self.processes[0].wait()
        await asyncio.sleep(self.size.down_s)
        self.processes[0] = self._start_worker(victim)
        _, failed = await sessions
        self.rows[router.name].failed_in_kill += failed
        await asyncio.to_thread(await_ready, Target(victim.url, victim.port, self.processes[0]), _probe())
        # Routers that leave a dead worker out try it again after some seconds.
        await asyncio.sleep(1.0)

    async def _sessions(
        self, router: Target, cell: str, sessions: int, turns: int
    ) -> tuple[list[float], int]:
        times: list[float] = []
        failed = 0

        async def one(number: int) -> None:
            nonlocal failed
            await asyncio.sleep(THINK_S * number / sessions)
            talk = Conversation(cell, number)
            for _ in range(turns):
                first = await self._turn(router, talk.name, talk.body())
                if first is None:
                    failed += 1
                else:
                    times.append(first)
                talk.go_on()
                await asyncio.sleep(THINK_S)

        await asyncio.gather(*(one(number) for number in range(sessions)))
        return times, failed

    async def _turn(self, router: Target, session: str, body: bytes) -> float | None:
        """Seconds to the first token; None when there was no whole answer: [DONE] alone says little, smg ends
        with it what it broke off."""
        headers = {"content-type": "application/json", "x-session-id": session.replace(" ", "-")}
        url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
        began, first, whole = time.perf_counter(), None, False
        last = before = b""
        try:
            async with self.http.post(url, data=body, headers=headers) as answer:
                async for line in answer.content:
                    if first is None and b'"content":"' in line.replace(b" ", b"") and answer.status == 200:
                        first = time.perf_counter() - began
                    whole |= b'"finish_reason":"length"' in line.replace(b" ", b"")
                    if text := line.strip():
                        last, before = text, last
                if whole and first is not None and last == b"data: [DONE]":
                    return first
                said = f"{answer.status} {(before if last == b'data: [DONE]' else last)[:200]!r}"
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"{type(error).__name__}: {error}"[:200]
        begun = "begun" if first is not None else "not begun"
        self.rows[router.name].said[f"{begun}, {said}"] += 1
        return None

    # ------------------------------------------------------------------ the fleet

    async def _reset(self) -> None:
        for spec in self.specs:
            async with self.http.post(f"{spec.url}/reset_prefix_cache?reset_external=true") as answer:
                await answer.read()
        await asyncio.sleep(self.size.pause_s)

    async def _counts(self) -> tuple[float, float]:
        """Prompt tokens that were looked up in HBM, and those found there or in the pool."""
        queries = hits = 0.0
        for spec in self.specs:
            async with self.http.get(f"{spec.url}/metrics") as answer:
                for line in (await answer.text()).splitlines():
                    value = float(line.rpartition(" ")[2]) if line.startswith("vllm:") else 0.0
                    if line.startswith("vllm:prefix_cache_queries_total"):
                        queries += value
                    elif line.startswith(
                        ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
                    ):
                        hits += value
        return queries, hits


def _catalogue(specs: Sequence[SimWorkerSpec]) -> list[str]:
    """The workers as Dynamo's selection service is told of them."""
    return [
        json.dumps(
            {
                "worker_id": number,
                "model_name": MODEL,
                "endpoint": spec.url,
                "block_size": BLOCK_SIZE,
                "kv_events_endpoint": f"tcp://{spec.host}:{spec.events_port}",
                "replay_endpoint": f"tcp://{spec.host}:{spec.replay_port}",
            }
        )
        for number, spec in enumerate(specs, 1)
    ]


def _cpu_behind_s(router: Target) -> float:
    return cpu_s(router.behind.pid) if router.behind else 0.0


def _say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _probe() -> bytes:
    return json.dumps(
        {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
    ).encode()


def report(rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    found = {
        name: {
            "hit_rate": round(statistics.median(row.hit_rates), 4),
            "ttft_p50_ms": round(statistics.median(row.ttft_ms), 1) if row.ttft_ms else -1.0,
            "ttft_p99_ms": round(sorted(row.ttft_ms)[int(len(row.ttft_ms) * 0.99)], 1)
            if row.ttft_ms
            else -1.0,
            "cpu_ms_per_turn": round(statistics.median(row.cpu_ms), 2),
            "rss_mb": round(row.rss_mb, 1),
            "cpu_behind_ms_per_turn": round(statistics.median(row.cpu_behind_ms), 2),
            "rss_behind_mb": round(row.rss_behind_mb, 1),
            "rss_sessions": row.many,
            "failed": row.failed + row.failed_in_kill,
            "failed_without_kill": row.failed,
        }
        for name, row in rows.items()
    }
    print(
        f"{'router':30} {'hit %':>6} {'TTFT p50':>9} {'p99 ms':>8} {'CPU ms':>7} {'RSS MB':>7} {'after':>6}"
        f" {'failed':>7} {'in kill':>8}"
    )
    for name, row in found.items():
        print(
            f"{name:30} {100 * row['hit_rate']:6.1f} {row['ttft_p50_ms']:9.1f} {row['ttft_p99_ms']:8.1f}"
            f" {row['cpu_ms_per_turn']:7.2f} {row['rss_mb']:7.1f} {row['rss_sessions']:6.0f}"
            f" {row['failed_without_kill']:7.0f} {row['failed'] - row['failed_without_kill']:8.0f}"
        )
        if row["rss_behind_mb"]:
            print(
                f"  of which the peer's own process {row['cpu_behind_ms_per_turn']:.2f} ms a turn,"
                f" {row['rss_behind_mb']:.1f} MB; the rest is this benchmark's front"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, under 60 s")
    parser.add_argument("--stock", action="store_true", help="workers that refuse /render")
    parser.add_argument("--only", nargs="*", default=[], help="names of routers, by their beginnings")
    parser.add_argument(
        "--many-s",
        type=float,
        help="seconds for 2,000 short sessions before memory is read (20)",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    size = QUICK if args.quick else FULL
    if args.many_s is not None:
        size = replace(size, many=FULL.many, many_s=args.many_s)
    only: list[str] = args.only
    if missing := install_peers():
        print(f"without peers: {missing}")
        only = ["moongate"]
    installed = distributions(path=[str(ROOT / ".moongate/routers")]), distributions(name="ai-dynamo-runtime")
    versions = {each.metadata["Name"]: each.version for each in chain(*installed)}
    print(f"load of the machine before: {getloadavg()[0]:.1f}")
    print("versions:", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    with Targets(ROOT / ".moongate" / "logs" / "bench-peers") as targets:
        bench = Bench(targets, size, stock=args.stock, only=only)
        try:
            asyncio.run(bench.run())
        except RuntimeError as error:
            sys.exit(str(error))
        found = report(bench.rows)
    raw = ROOT / ".moongate" / "bench" / "peers.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(
        json.dumps(
            {
                name: {"ttft_ms": row.ttft_ms, "said": dict(row.said), **found[name]}
                for name, row in bench.rows.items()
            }
        )
    )
    print(f"every turn's time, and what failed turns were told: {raw.relative_to(ROOT)}")
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
