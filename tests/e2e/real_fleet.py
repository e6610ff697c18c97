"""Real vLLM workers on a real Mooncake master behind a real gateway process."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from conversation import Answered
from tests.ports import ports
from workers.launch.model import local_model
from workers.launch.mooncake import MooncakeMaster
from workers.launch.plan import LocalFleet, Plan, WorkerPorts
from workers.launch.server import Server

TOKEN = "e2e-admin-token"  # noqa: S105 - of a fleet on loopback that lives for minutes
STOP_GRACE_S = 10.0
# An engine compiles what it has not done before, on a machine that may be busy.
PATIENT_S = 180.0
# A turn takes 10 ms of work here and hundreds of them a minute come from other tests: by chance alone another
# worker looks a tenth cheaper, which is when a session leaves its holder by default, or after one turn that a
# busy machine held up half as dear.
# And what is true is asked here, not how fast: this machine may be busy.
SETTINGS = "[routing.options]\nstay_share = 3.0\n[mooncake]\nbudget_ms = 2000\n"
# Of the workers as `moongate up` starts them.
BLOCK = 32


@dataclass(slots=True)
class RealWorker:
    """One vLLM server process; `name` is what the gateway calls it."""

    server: Server
    ports: WorkerPorts

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.ports.http}"

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.events}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports.replay}"

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the worker's own series of that name that have these labels."""
        async with httpx.AsyncClient(trust_env=False) as client:
            return total((await client.get(f"{self.url}/metrics")).text, name, labels)


class RealFleet:
    """The processes, a client for the gateway, and what tests ask of both."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = plan.model.name
        self.model_dir = Path(plan.model.path)
        master = plan.master()
        assert isinstance(master, MooncakeMaster)
        self.master = master
        self.workers = [
            RealWorker(server, ports) for server, ports in zip(plan.workers(), plan.worker_ports, strict=True)
        ]
        self.gateway = plan.gateway(TOKEN)
        self.url = plan.fleet.url
        self.client = httpx.AsyncClient(base_url=self.url, timeout=PATIENT_S, trust_env=False)

    async def start(self) -> None:
        """vLLM workers one after the other: two at once take longer on two cores."""
        await self.master.start()
        for worker in self.workers:
            await worker.server.start()
        await self.gateway.start()
        await self.until(self.all_up)

    async def whole(self) -> None:
        """Start again what a test has ended, lift what it has cordoned, wait until all of it is in use."""
        for server in (self.master, *(worker.server for worker in self.workers)):
            if not server.alive:
                await server.start()
        for worker in (await self.admin("workers"))["workers"]:
            if worker["cordoned"]:
                await self._cordon(worker["name"], False)
        await self.until(self.all_up)

    async def stop(self) -> None:
        await self.client.aclose()
        for server in (self.gateway, *(worker.server for worker in self.workers)):
            await server.stop(STOP_GRACE_S)
        await self.master.stop(STOP_GRACE_S)

    def worker(self, name: str) -> RealWorker:
        return next(worker for worker in self.workers if worker.name == name)

    def other(self, name: str) -> RealWorker:
        return next(worker for worker in self.workers if worker.name != name)

    async def admin(self, path: str) -> dict[str, Any]:
        answer = await self.client.get(f"/admin/v1/{path}", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Where a body would go now, and why."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = await self.client.post("/admin/v1/explain", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def why(self, turns: Iterable[Answered]) -> str:
        """What each of these turns was decided by, for the message of a failed assertion."""
        lines: list[str] = []
        for turn in turns:
            record = await self.admin(f"decisions/{turn.request_id}")
            lines.append(f"{turn}: {record['reason']}")
            lines += [f"    {candidate}" for candidate in record["candidates"]]
        return "\n".join(lines)

    @asynccontextmanager
    async def cordoned(self, name: str) -> AsyncGenerator[None]:
        """Meanwhile the worker gets no new turns. Others can pull what it has: the pool is asked."""
        await self.until(self.pool_is_asked)
        await self._cordon(name, True)
        try:
            yield
        finally:
            await self._cordon(name, False)

    async def _cordon(self, name: str, cordoned: bool) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = await self.client.patch(
            f"/admin/v1/workers/{name}", json={"cordoned": cordoned}, headers=headers
        )
        assert answer.status_code == 200, answer.text

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the gateway's series of that name that have these labels."""
        return total((await self.client.get("/metrics")).text, name, labels)

    async def heard_of(self, worker: str, tokens: list[int]) -> None:
        """Wait until the gateway knows that `worker` holds the blocks of a turn with this prompt and answer.

        The last token of an answer is never computed.
        """
        computed = (len(tokens) - 1) // BLOCK * BLOCK
        body = {"model": self.model, "prompt": [*tokens, 0], "max_tokens": 1}

        async def known() -> bool:
            candidates = (await self.explain(body))["candidates"]
            return next(c["local_tokens"] for c in candidates if c["target"] == worker) >= computed

        await self.until(known)

    async def inflight(self, name: str | None = None) -> int:
        """Turns charged to one worker, or to all of them, at this moment."""
        workers = (await self.admin("workers"))["workers"]
        return sum(t["inflight"] for w in workers if name in (None, w["name"]) for t in w["targets"])

    async def blocks(self, name: str) -> int:
        """Blocks that the gateway's index holds for one worker."""
        targets = (await self.admin("index"))["targets"]
        return sum(sum(t["blocks"].values()) for t in targets if t["target"] == name)

    async def all_up(self) -> bool:
        """Workers are up, followed exactly, and proven to tokenize as the gateway does; the pool is asked."""
        workers = (await self.admin("workers"))["workers"]
        targets = (await self.admin("index"))["targets"]
        ready = all(w["state"] == "up" for w in workers) and all(t["stream"] == "exact" for t in targets)
        checks = await self.metric("moongate_parity_checks_total", result="equal")
        ready = ready and await self.pool_is_asked()
        return ready and len(targets) == len(self.workers) and checks >= 6 * len(self.workers)

    async def pool_is_asked(self) -> bool:
        return await self.metric("moongate_pool_degraded") == 0

    async def until(self, condition: Callable[[], Awaitable[bool]], budget_s: float = 60.0) -> None:
        """Wait until something that can be seen from outside is so."""
        async with asyncio.timeout(budget_s):
            while not await condition():
                await asyncio.sleep(0.05)


def total(page: str, name: str, labels: dict[str, str]) -> float:
    """The sum of a metric's series that have these labels, on a page in Prometheus' text format."""
    rows = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", page, re.M)
    return sum(
        float(value)
        for given, value in rows
        if all(f'{label}="{wanted}"' in given for label, wanted in labels.items())
    )


def make(
    home: Path, *, workers: int, model: str = "", blocks: int = 0, worker_args: tuple[str, ...] = ()
) -> RealFleet:
    """A fleet on free ports, none of it started. Two runs at once do not meet.

    model: its directory, empty for the tiny one. blocks: of each worker's cache, 0 for plenty.
    worker_args: more of the workers' command line.
    Model and caches below `home` are kept for good, a run's own directory (with its logs) until the next run.
    """
    runs, cache = home / "runs", home / "cache"
    for old in runs.glob("*"):
        if not Path("/proc", old.name).exists():
            shutil.rmtree(old, ignore_errors=True)
    served = local_model(model, home / "models")
    own = runs / str(os.getpid()) / served.name
    for folder in (own / "logs", cache):
        folder.mkdir(parents=True, exist_ok=True)
    settings = own / "gateway.toml"
    settings.write_text(SETTINGS)
    fleet = LocalFleet(
        engine="vllm",
        workers=workers,
        port=next(ports(above=23000)),
        directory=own,
        blocks=blocks,
        worker_args=worker_args,
        gateway_args=("--config", str(settings)),
    )
    return RealFleet(Plan.make(fleet, served, own, logs=own / "logs", cache=cache))
