"""Many agents, four simulated workers, faults without end: what is left when they have gone?

    .venv/bin/python bench/soak [--seconds 600] [--agents 200] [--seed 0]

Agents hold conversations over chat, messages and responses, streamed or not; some leave in the middle of an
answer. Meanwhile workers refuse, reset, hang, answer 500, cut streams, slow down and restart. At the end,
with all faults over, gateway and agents must have counted the same turns, no lease and no request may be
left anywhere, and the gateway's memory and descriptors must have stayed where they were. Exit 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from workers.launch.ports import free_ports
from workers.launch.tiny_model import make_tiny_model

WORKERS = 4
TURNS = 12
TOKEN = "soak"  # noqa: S105
# Beyond these the gateway keeps something it should not. 25 MB: caches that fill up to their bounds.
GROWTH_MB, GROWTH_FDS = 25.0, 20


class Soak:
    def __init__(self, agents: int, seed: int) -> None:
        self.agents = agents
        self.draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.rss: list[float] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.controls: list[str] = []
        self.url = ""
        self.pid = 0
        self.fds = 0

    async def start(self) -> None:
        logs = ROOT / ".moongate" / "logs" / "soak"
        logs.mkdir(parents=True, exist_ok=True)
        model = make_tiny_model(ROOT / ".moongate" / "models" / "soak")
        ports = free_ports(above=27_000)
        urls: list[str] = []
        for number in range(WORKERS):
            port, events, replay, control = (next(ports) for _ in range(4))
            self._run(
                logs / f"worker-{number}.log",
                "-m",
                "workers.sim",
                *(f"--model={model}", "--served-model-name=m", f"--port={port}", f"--events-port={events}"),
                *(f"--replay-port={replay}", f"--control-port={control}", "--answer-tokens=40"),
            )
            urls.append(f"http://127.0.0.1:{port}")
            self.controls.append(f"http://127.0.0.1:{control}")
        port = next(ports)
        flags = [word for url in urls for word in ("--worker", url)]
        gateway = "from gateway.cli.main import main; main()"
        self.pid = self._run(
            logs / "gateway.log", "-c", gateway, "serve", f"--port={port}", f"--admin-token={TOKEN}", *flags
        )
        self.url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while not await self._up(http):
                await asyncio.sleep(0.2)

    def _run(self, log: Path, *argv: str) -> int:
        settings = {
            # Faults that take longer than the budgets would only make the run longer.
            "MOONGATE_TIMEOUTS__FIRST_BYTE_S": "10",
            "MOONGATE_TIMEOUTS__BETWEEN_CHUNKS_S": "10",
            "MOONGATE_TIMEOUTS__KEEP_ALIVE_S": "0.5",
            # Full within a minute or two: what grows later is no cache.
            "MOONGATE_PROMPT__CACHE_BYTES": str(16 << 20),
            "MOONGATE_LIMITS__STORED_RESPONSES": "1000",
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *argv],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | settings | {"PYTHONPATH": str(ROOT)},
            )
        self.processes.append(process)
        return process.pid

    async def _up(self, http: aiohttp.ClientSession) -> bool:
        try:
            return all(worker["state"] == "up" for worker in await self._workers(http))
        except aiohttp.ClientError:
            return False

    async def _workers(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with http.get(f"{self.url}/admin/v1/workers", headers=headers) as answer:
            found: Any = await answer.json()
            return found["workers"] if isinstance(found, dict) else found

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()

    async def run(self, seconds: float) -> None:
        ended = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
            for number in range(self.agents):
                group.create_task(self._agent(http, number, ended))
            group.create_task(self._break_things(http, ended))
            group.create_task(self._watch(ended))
            await asyncio.sleep(seconds)
            ended.set()

    async def _agent(self, http: aiohttp.ClientSession, number: int, ended: asyncio.Event) -> None:
        draw = random.Random(number)
        session = 0
        while not ended.is_set():
            api = draw.choice(("chat", "messages", "responses"))
            said = [{"role": "user", "content": f"Agent {number}, task {session}: " + "do it. " * 40}]
            for _ in range(TURNS):
                await asyncio.sleep(draw.uniform(0.1, 1.5))
                if ended.is_set():
                    return
                what = await self._turn(http, api, said, draw)
                self.seen[what] += 1
                said = [
                    *said,
                    {"role": "assistant", "content": f"I did step {len(said)}."},
                    {"role": "user", "content": "And now? " * draw.randint(1, 30)},
                ]
            session += 1

    async def _turn(
        self, http: aiohttp.ClientSession, api: str, said: list[dict[str, str]], draw: random.Random
    ) -> str:
        """One turn; says what its client saw: ok, error, cut or left."""
        stream = draw.random() < 0.6
        body: dict[str, Any] = {"model": "m", "stream": stream}
        if api == "responses":
            path, end = "/v1/responses", b"response.completed"
            body |= {"input": said, "max_output_tokens": 40}
        elif api == "messages":
            path, end = "/v1/messages", b"message_stop"
            body |= {"messages": said, "max_tokens": 40}
        else:
            path, end = "/v1/chat/completions", b"[DONE]"
            body |= {"messages": said, "max_tokens": 40}
        leaves = draw.random() < 0.05
        got = b""
        try:
            async with http.post(self.url + path, json=body) as answer:
                async for chunk in answer.content.iter_any():
                    got += chunk
                    if leaves:
                        answer.close()
                        return "left"
                if answer.status != 200:
                    said_why = re.search(rb'"message": ?"([^"]*)"', got)
                    self.errors[f"{answer.status} {(said_why[1] if said_why else got[:80]).decode()}"] += 1
                    return "error"
        except aiohttp.ClientPayloadError:
            return "cut"
        except (aiohttp.ClientError, OSError):
            return "refused"
        if not stream:
            return "ok"
        return "ok" if end in got[-4096:] else "cut"

    async def _break_things(self, http: aiohttp.ClientSession, ended: asyncio.Event) -> None:
        while not ended.is_set():
            worker = self.draw.randrange(WORKERS)
            kind, fault = self.draw.choice(
                [
                    ("status", {"status": {"status": 500, "times": 5}}),
                    ("busy", {"status": {"status": 503, "times": 5, "body": "{}"}}),
                    ("hang", {"hang": {"times": 3, "seconds": 3}}),
                    ("hang in a stream", {"hang": {"times": 3, "after_chunks": 3, "seconds": 3}}),
                    ("reset", {"die": {"times": 5}}),
                    ("cut", {"die": {"times": 5, "after_chunks": 4, "how": "eof"}}),
                    ("reset in a stream", {"die": {"times": 5, "after_chunks": 4}}),
                    ("refuse", {"refuse": {"seconds": 2}}),
                    ("restart", {"restart": {"down_s": 1}}),
                    ("slow", {"slow": 5}),
                    ("lost events", {"drop_events": 3}),
                ]
            )
            self.faults[kind] += 1
            await _switch(http, self.controls[worker], fault)
            await asyncio.sleep(self.draw.uniform(0.5, 3))
            if self.draw.random() < 0.5:
                await _switch(http, self.controls[worker], {})

    async def _watch(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            self.rss.append(self._rss())
            await asyncio.sleep(1)

    def _rss(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096 / 1e6

    def _fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def settled(self) -> list[str]:
        """What is wrong once everything has ended. Waits for what may take a moment."""
        async with aiohttp.ClientSession() as http:
            for control in self.controls:
                await _switch(http, control, {})
            try:
                async with asyncio.timeout(30):
                    while await self._left(http) or not await self._up(http):
                        await asyncio.sleep(0.3)
            except TimeoutError:
                return [f"still under way after 30 s: {await self._left(http) or 'a worker is not up'}"]
            async with http.get(f"{self.url}/metrics") as answer:
                page = await answer.text()
        return [*self._miscounted(page), *self._grown()]

    async def _left(self, http: aiohttp.ClientSession) -> str:
        targets = [target for worker in await self._workers(http) for target in worker["targets"]]
        leases = sum(target["inflight"] for target in targets)
        opened = 0
        for control in self.controls:
            async with http.get(f"{control}/sim/requests") as answer:
                report = await answer.json()
            # Probes come and go.
            opened += sum(1 for one in report["requests"] if not one["ended"] and one["method"] == "POST")
        more = max(0, self._fds() - self.fds - GROWTH_FDS)
        if not (leases or opened or more):
            return ""
        return f"{leases} leases, {opened} requests at workers, {more} descriptors more than at the start"

    def _miscounted(self, page: str) -> list[str]:
        counted: Counter[str] = Counter()
        for outcome, value in re.findall(r'moongate_requests_total\{.*outcome="(\w+)"\} (\S+)', page):
            counted[outcome] += round(float(value))
        for name, counts in (
            ("gateway", counted),
            ("agents", self.seen),
            ("errors", self.errors),
            ("faults", self.faults),
        ):
            print(f"{name:8}{dict(counts)}")
        wrong: list[str] = []
        reached = self.seen.total() - self.seen["refused"]
        if counted.total() != reached:
            wrong.append(f"the gateway counted {counted.total()} turns, agents {reached}")
        failed = self.seen["error"] + self.seen["cut"]
        # Of turns that their agent left, either side may have seen the end first.
        for name, one, other in (
            ("failed", counted["error"] + counted["refused"], failed),
            ("good", counted["ok"], self.seen["ok"]),
        ):
            if not other <= one <= other + self.seen["left"]:
                wrong.append(f"{name} turns: gateway {one}, agents {other} and {self.seen['left']} left")
        if self.seen["refused"]:
            wrong.append(f"the gateway itself refused or reset {self.seen['refused']} connections")
        if not self.seen["ok"]:
            wrong.append("no turn went well")
        return wrong

    def _grown(self) -> list[str]:
        quarter = max(1, len(self.rss) // 4)
        before, after = (
            statistics.median(part) for part in (self.rss[quarter : 2 * quarter], self.rss[-quarter:])
        )
        tenths = [self.rss[len(self.rss) * i // 10] for i in range(10)]
        print(f"memory  {before:.0f} MB in the second quarter, {after:.0f} MB in the last")
        print(f"        at every tenth of the time {[round(one) for one in [*tenths, self.rss[-1]]]}")
        return [f"memory grew by {after - before:.0f} MB"] if after - before > GROWTH_MB else []

    def remember(self) -> None:
        self.fds = self._fds()


async def _switch(http: aiohttp.ClientSession, control: str, faults: dict[str, Any]) -> None:
    """Of one worker. A control port closes idle connections, at times just when one is used again."""
    for last in (False, False, True):
        try:
            async with http.post(f"{control}/sim/faults", json=faults):
                return
        except aiohttp.ClientError:
            if last:
                raise


async def soak(seconds: float, agents: int, seed: int) -> list[str]:
    run = Soak(agents, seed)
    try:
        await run.start()
        run.remember()
        await run.run(seconds)
        return await run.settled()
    finally:
        run.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wrong = asyncio.run(soak(args.seconds, args.agents, args.seed))
    for line in wrong:
        print(f"WRONG: {line}")
    print("RESULT " + json.dumps({"seconds": args.seconds, "agents": args.agents, "wrong": len(wrong)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
