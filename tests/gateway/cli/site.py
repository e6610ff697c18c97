"""A gateway's admin API with what a doctor reads, and a small live worker, to be broken in one place."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace

import uvicorn
from fastapi import FastAPI, Request
from starlette.types import ASGIApp

from gateway.admin.index import IndexAnswer, IndexEntry, SnapshotView
from gateway.admin.prompts import ModelPromptsView, PromptsAnswer
from gateway.admin.routes import AdminParts, build_admin
from gateway.admin.views import PoolAnswer
from gateway.auth import AdminToken, ClientKeys, Guard
from gateway.cli.examination import examine
from gateway.cli.finding import Finding
from gateway.cli.remote import RunningGateway
from gateway.knowledge.audit import Audit
from gateway.knowledge.drains import Drains
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.policy_versions import PolicyVersions
from gateway.settings import Settings
from policies.document import Document
from policies.ledger import Ledger
from policies.types import Decision
from store.pool_status import LayoutStatus
from workers.connecting import trusting
from workers.fleet import Fleet
from workers.worker import EngineReport, ModelCard


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    sock = server.config.bind_socket()
    sock.listen()
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def worker_app() -> FastAPI:
    """A worker whose prompts are 10 tokens a message or prompt; it wants its key."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> None: ...

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, int]:
        assert request.headers["authorization"] == "Bearer worker-key"
        body = await request.json()
        return {"count": 10 * len(body.get("messages", [0]))}

    return app


class Explained:
    """Counts a prompt as the worker does, plus what it is off."""

    off = 0
    unrenderable = ""
    key = ""
    target: str | None = "w1"

    async def explain(
        self, path: str, body: bytes, key: str = "", headers: Sequence[str] = ()
    ) -> DecisionRecord:
        self.key, self.headers = key, list(headers)
        messages = json.loads(body).get("messages", [0])
        decision = Decision(self.target, "recompute", "least loaded", "longest_prefix", ())
        tokens = 10 * len(messages) + self.off
        return DecisionRecord("e", 0.0, path, "m", tokens, 32, decision, unrenderable=self.unrenderable)


class Site:
    """A gateway with what its doctor reads, ready to be broken in one place."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.drains = Drains(None)
        self.explained = Explained()
        self.refusals: list[str] = []
        self.index = [self.entry("w1"), self.entry("w2")]
        found = asdict(LayoutStatus("m", (0,), 2, 1, 1, 1, found=True, missed=False))
        details = {"turns": 9, "announced": 5, "layouts": [found], "master_events": False, "events": None}
        details["segments"] = [{"name": "127.0.0.1:5559", "status": "OK"}]
        self.pool = PoolAnswer(configured=True, master="m:1", degraded=False, details=details)
        self.prompts = ModelPromptsView(
            model="m", made="here", why="", cached_tokens=0, cached_bytes=0, agreed={}, differences=[]
        )

    @staticmethod
    def entry(target: str) -> IndexEntry:
        return IndexEntry(
            target=target,
            blocks={"gpu": 5},
            windows={},
            unproven_groups=[],
            stream="exact",
            last_seq=3,
            batches=4,
            gaps=0,
            garbage=0,
            last_event_age_s=1.0,
            last_proof_age_s=1.0,
            trust="exact",
            why="",
            believed=1.0,
            hash_mismatch="",
        )

    def add(self, name: str, url: str, block_size: int = 32) -> None:
        worker = self.fleet.add(f"{url}/{name}", name)
        worker.url = url
        report = EngineReport(block_size=block_size, retention=0)
        self.fleet.mark_up(worker, report, (ModelCard("m"),), ())

    def slide(self, retention: int | None) -> None:
        """Make the model of w1 one with a sliding window of 64 tokens."""
        worker = self.fleet.get("w1")
        report = EngineReport(block_size=32, retention=retention)
        self.fleet.mark_up(worker, report, worker.models, ())
        self.index[0] = self.entry("w1").model_copy(update={"windows": {"0": 2}})

    def app(self) -> ASGIApp:
        parts = AdminParts(
            settings=Settings(),
            fleet=self.fleet,
            loads=Ledger(),
            drains=self.drains,
            explainer=self.explained,
            decisions=DecisionLog(),
            audit=Audit(),
            index=lambda: IndexAnswer(
                targets=self.index,
                memory_bytes=1,
                memory_limit_bytes=2,
                evicted_blocks=3,
                snapshot=SnapshotView(
                    path="", age_s=None, bytes=0, failures=0, unclaimed=0, unclaimed_blocks=0
                ),
            ),
            pool=lambda: self.pool,
            prompts=lambda: PromptsAnswer(source="auto", models=[self.prompts]),
            policy=PolicyVersions(Document(), None, lambda _: None),
            router=SimpleNamespace(shadow=None),
            refusals=lambda: self.refusals,
        )
        return Guard(build_admin(parts), AdminToken("right"), ClientKeys())


async def examined(site: Site, token: str = "right", now: Callable[[], float] | None = None) -> list[Finding]:  # noqa: S107
    async with serving(site.app()) as url:

        def run() -> list[Finding]:
            with RunningGateway(url, token) as gateway:
                return list(examine(gateway, "worker-key", trusting(), **({"now": now} if now else {})))

        return await asyncio.to_thread(run)
