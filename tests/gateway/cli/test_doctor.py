"""The doctor and the printed explanation, against answers of the real admin app and a small live worker."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admin.index import IndexAnswer, IndexEntry, SnapshotView
from gateway.admin.prompts import DifferenceView, ModelPromptsView, PromptsAnswer
from gateway.admin.routes import AdminParts, build_admin
from gateway.admin.views import DecisionView, PoolAnswer
from gateway.auth import AdminToken, ClientKeys, Guard
from gateway.cli.doctor import Finding, examine
from gateway.cli.explanation import as_text, refusal
from gateway.cli.remote import RemoteError, RunningGateway, base_url
from gateway.knowledge.audit import Audit
from gateway.knowledge.drains import Drains
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.policy_versions import PolicyVersions
from gateway.settings import Settings
from policies.cost import TERMS
from policies.document import Document
from policies.ledger import Ledger
from policies.types import Candidate, Decision
from store.pool_status import LayoutStatus
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
    target: str | None = "w1"

    async def explain(self, path: str, body: bytes) -> DecisionRecord:
        import json

        messages = json.loads(body).get("messages", [0])
        decision = Decision(self.target, "recompute", "least loaded", "longest_prefix", ())
        tokens = 10 * len(messages) + self.off
        return DecisionRecord("e", 0.0, path, "m", tokens, 32, decision, unrenderable=self.unrenderable)


class Site:
    """A gateway with what its doctor reads, ready to be broken in one place."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.explained = Explained()
        self.index = [self.entry("w1"), self.entry("w2")]
        found = asdict(LayoutStatus("m", (0,), 2, 1, 1, 1, found=True, missed=False))
        details = {"turns": 9, "announced": 5, "layouts": [found], "master_events": False, "events": None}
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
            drains=Drains(None),
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
        )
        return Guard(build_admin(parts), AdminToken("right"), ClientKeys())


async def examined(site: Site, token: str = "right", now: Callable[[], float] | None = None) -> list[Finding]:  # noqa: S107
    async with serving(site.app()) as url:

        def run() -> list[Finding]:
            with RunningGateway(url, token) as gateway:
                return list(examine(gateway, "worker-key", **({"now": now} if now else {})))

        return await asyncio.to_thread(run)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(worker_app()) as url:
        site = Site()
        site.add("w1", url)
        site.add("w2", url)
        yield site


async def test_a_healthy_site_has_no_failure(site: Site) -> None:
    findings = await examined(site)
    assert {f.result for f in findings} == {"ok"}, [str(f) for f in findings]
    checks = {f.check for f in findings}
    assert {
        "prompts of m",
        "gateway",
        "worker w1",
        "clock of w2",
        "tokens of m on w1",
        "block size of m",
        "KV events of w2",
        "hashes of w1",
        "pool",
    } <= checks


def break_worker(site: Site) -> None:
    site.fleet.mark_down(site.fleet.get("w1"), "/health timed out")


def break_tokens(site: Site) -> None:
    site.explained.off = 1


def break_template(site: Site) -> None:
    site.explained.unrenderable = "no_template"


def break_block_size(site: Site) -> None:
    site.add("w3", site.fleet.get("w1").url, block_size=16)


def hide_block_size(site: Site) -> None:
    site.add("w3", site.fleet.get("w1").url, block_size=0)


def break_stream(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"stream": "degraded"})


def demote(site: Site) -> None:
    site.index[1] = site.entry("w2").model_copy(update={"trust": "degraded", "why": "of 2048 tokens"})


def stop_events(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"stream": "none"})


def break_hashes(site: Site) -> None:
    site.index[1] = site.entry("w2").model_copy(update={"hash_mismatch": "sha256 fits"})


def break_prompts(site: Site) -> None:
    found = DifferenceView(
        worker="w2", api="chat", position=7, ours=5, our_text="cat", theirs=-1, their_text=""
    )
    site.prompts = site.prompts.model_copy(update={"differences": [found]})


def lose_the_tokenizer(site: Site) -> None:
    site.prompts = site.prompts.model_copy(update={"made": "nowhere", "why": "no tokenizer.json"})


def break_pool(site: Site) -> None:
    details = {"reason": "refused", "places": ["m:9003", "m:1"]}
    site.pool = site.pool.model_copy(update={"degraded": True, "details": details})


def misname_the_pool(site: Site) -> None:
    site.pool.details["layouts"] = [
        asdict(LayoutStatus("m", (0,), 1, 1, 1, 1, found=False, missed=True)),
    ]


def remove_workers(site: Site) -> None:
    site.fleet.remove("w1")
    site.fleet.remove("w2")


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        (break_worker, "worker w1", "/health timed out"),
        (break_tokens, "tokens of m on w1", "the gateway counts 11, the worker 10"),
        (break_template, "tokens of m on w1", "no_template"),
        (break_block_size, "block size of m", "w3 16"),
        (hide_block_size, "block size of m", "not reported by w3"),
        (break_stream, "KV events of w1", "degraded"),
        (demote, "index of w2", "of 2048 tokens"),
        (stop_events, "KV events of w1", "none are published"),
        (break_hashes, "hashes of w2", "sha256 fits"),
        (break_prompts, "prompts of m", "chat: token 7 is 5 'cat', on w2 the end"),
        (lose_the_tokenizer, "prompts of m", "no tokenizer.json"),
        (break_pool, "pool", "can't be asked (refused); its admin HTTP was tried at m:9003, m:1"),
        (misname_the_pool, "pool keys of m", "none is there by this name"),
        (remove_workers, "workers", "none is registered"),
    ],
)
async def test_each_fault_is_found_and_says_what_to_change(
    site: Site, fault: Callable[[Site], None], check: str, said: str
) -> None:
    fault(site)
    failed = {f.check: f for f in await examined(site) if f.result == "fail"}
    assert said in failed[check].detail
    assert failed[check].fix


@pytest.mark.parametrize(
    ("retention", "result", "said"),
    [
        (0, "warn", "kept only where a prompt ends"),
        (64, "ok", "all of them"),
        (None, "ok", "all of them"),
        (1024, "ok", "every 1024 tokens"),
    ],
)
async def test_a_retention_interval_that_makes_shared_prefixes_useless_is_told(
    site: Site, retention: int | None, result: str, said: str
) -> None:
    site.slide(retention)
    (found,) = [f for f in await examined(site) if f.check == "sliding windows of w1"]
    assert found.result == result
    assert said in found.detail
    assert ("--prefix-cache-retention-interval 64" in found.fix) == (result == "warn")


async def test_groups_that_hit_in_an_unknown_way_are_told(site: Site) -> None:
    site.index[0] = site.entry("w1").model_copy(update={"unproven_groups": [1]})
    found = {f.check: f.result for f in await examined(site)}
    assert found["KV groups of w1"] == "warn"


async def test_b066_a_pool_in_use_of_which_nobody_says_anything_is_not_called_ok(site: Site) -> None:
    site.pool.details["announced"] = 0
    stop_events(site)
    found = {f.check: f for f in await examined(site)}
    assert found["pool events"].result == "warn"
    assert found["pool events"].fix == "start w1 with --kv-events-config"


async def test_workers_that_publish_are_not_told_to_after_a_restart_of_the_gateway(site: Site) -> None:
    site.pool.details["announced"] = 0
    found = {f.check: f for f in await examined(site)}["pool events"]
    assert (found.result, found.fix) == ("skip", "")
    assert "since this gateway started" in found.detail


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("/v1/models answered 401: worker API key missing or wrong", "workers.api_key"),
        ("/health: ConnectError", "start the worker there, or take it off the list"),
        ("connection refused", "DELETE /admin/v1/workers/w1"),
        ("asleep", "/w1/wake_up"),
        ("/v1/models answered 500", "/w1/v1/models"),
        ("not probed yet", "/w1/health"),
    ],
)
async def test_what_helps_a_worker_follows_from_why_it_is_down(site: Site, reason: str, fix: str) -> None:
    worker = site.fleet.get("w1")
    worker.url += "/w1"
    site.fleet.mark_down(worker, reason)
    assert fix in {f.check: f for f in await examined(site)}["worker w1"].fix


async def test_b066_a_masters_own_events_are_to_be_followed(site: Site) -> None:
    assert "the master's events" not in {f.check for f in await examined(site)}
    site.pool.details["master_events"] = True
    found = {f.check: f for f in await examined(site)}["the master's events"]
    assert (found.result, "mooncake.events" in found.fix) == ("warn", True)
    events = {"state": "following", "why": "", "endpoint": "tcp://m:5557"}
    site.pool.details["events"] = events
    assert {f.check: f.result for f in await examined(site)}["the master's events"] == "ok"
    site.pool.details["events"] = events | {"state": "lost", "why": "batch 9 came after 7"}
    found = {f.check: f for f in await examined(site)}["the master's events"]
    assert (found.result, "batch 9 came after 7" in found.detail) == ("warn", True)


async def test_a_clock_that_is_off(site: Site) -> None:
    import time

    findings = await examined(site, now=lambda: time.time() - 60)
    (clock,) = [f for f in findings if f.check == "clock of w1"]
    assert clock.result == "fail"
    assert "+6" in clock.detail or "+5" in clock.detail


async def test_a_wrong_token_is_told_apart_from_no_gateway(site: Site) -> None:
    (finding,) = await examined(site, token="wrong")  # noqa: S106
    assert finding.result == "fail"
    assert "401" in finding.detail
    assert "--admin-token" in finding.fix
    assert "serve" not in finding.fix
    with (
        RunningGateway("http://127.0.0.1:21598", "") as gateway,
        pytest.raises(RemoteError, match="no gateway"),
    ):
        await asyncio.to_thread(gateway.get, "/admin/v1/workers")


async def test_something_else_at_the_url_is_no_gateway() -> None:
    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>"})

    async with serving(page) as url:
        with RunningGateway(url, "") as gateway, pytest.raises(RemoteError, match="is no gateway"):
            await asyncio.to_thread(gateway.get, "/admin/v1/workers")


def view(**more: Any) -> dict[str, Any]:
    shown = (
        Candidate("w1", local_tokens=512, queued_tokens=9000, inflight=3),
        Candidate("w2", pool_tokens=512, own_segment_tokens=256, inflight=1),
        Candidate("w3", excluded="down"),
    )
    terms = {
        "w1": {"queued": 9000.0, "pull": 0.0, "compute": 88.0},
        "w2": {"queued": 0.0, "pull": 51.2, "compute": 88.0},
        "w3": {"queued": 0.0, "pull": 0.0, "compute": 600.0},
    }
    decision = Decision(
        "w2", "pull", "holder busy", "longest_prefix", shown, lambda c: terms[c.target], "tokens"
    )
    record = DecisionRecord("r", 0.0, "chat", "m", 600, 32, decision)
    return DecisionView.of(record).model_dump() | more


def test_the_explanation_is_a_table() -> None:
    assert as_text(view()).splitlines() == [
        "pull on w2: holder busy (policy longest_prefix)",
        "m (chat): 600 prompt tokens in 18 full blocks of 32, 512 of them cached there, 88 to compute",
        "next: w1, 8948.8 tokens more",
        "",
        "    target  local  pool  own  queued tokens  in flight  queued  pull  compute   cost  excluded",
        "    w1        512     0    0           9000          3    9000     0       88   9088",
        "->  w2          0   512  256              0          1       0  51.2       88  139.2",
        "    w3          0     0    0              0          0       0     0      600    600  down",
    ]


def test_costs_in_seconds_are_shown_in_milliseconds() -> None:
    in_seconds = view(unit="s")
    in_seconds["candidates"][1] |= {"terms": {"queued": 0, "pull": 0.0004, "compute": 0.0368}, "cost": 0.0372}
    lines = as_text(in_seconds).splitlines()
    assert "cost ms" in lines[4]
    assert lines[6].split()[-4:] == ["0", "0.4", "36.8", "37.2"]


def test_expected_seconds_have_a_table_of_their_own_with_what_anybody_has_of_them() -> None:
    terms = dict.fromkeys(TERMS, 0.0)
    shown = view(unit="s")
    for candidate, prefill in zip(shown["candidates"], (0.5, 0.02, 0.5), strict=True):
        candidate |= {"terms": terms | {"prefill": prefill, "first_step": 0.01}, "cost": prefill + 0.01}
        candidate |= {"expected_ms": dict.fromkeys(TERMS, 1.0), "expected_ttft_ms": 1e3 * prefill + 10}
    assert as_text(shown).splitlines()[4:] == [
        "    target  local  pool  own  queued tokens  in flight  cost ms  excluded",
        "    w1        512     0    0           9000          3      510",
        "->  w2          0   512  256              0          1       30",
        "    w3          0     0    0              0          0      510  down",
        "",
        "expected, in milliseconds, and how far by measured rates:",
        "  target  prefill  first_step  ttft  measured",
        "  w1          500          10   510  0%",
        "  w2           20          10    30  0%",
        "  w3          500          10   510  0%",
    ]


def test_an_explanation_says_whose_turn_it_is_and_who_would_decode() -> None:
    session = {"name": "mine", "inferred": False, "new": False, "branch": True}
    lines = as_text(view(session=session, decode="w9")).splitlines()
    assert lines[2:4] == [
        "session mine (as its client calls it): a branch",
        "to be decoded on w9",
    ]
    lines = as_text(view(session=session | {"inferred": True, "branch": False})).splitlines()
    assert lines[2] == "session mine (recognised by its prompts): goes on"


def test_an_explanation_without_prompt_or_target_says_so() -> None:
    assert "prompt not known (no_template), placed by load" in as_text(view(unrenderable="no_template"))
    nowhere = as_text(view(target=None, reason="no worker is up", unrenderable="no_worker"))
    assert nowhere.startswith("nowhere: no worker is up")
    assert "placed" not in nowhere


def test_why_a_turn_goes_nowhere() -> None:
    other = view()["candidates"][2] | {"excluded": "model"}
    assert refusal(view()) == ""
    assert refusal(view(target=None, candidates=[])) == "no worker is registered"
    assert refusal(view(target=None, candidates=[other])) == "no worker serves the model 'm'"
    assert refusal(view(target=None, reason="all are down")) == "all are down"


async def test_explain_ends_with_1_when_a_body_goes_nowhere(site: Site, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"messages": []}', "utf-8")
    async with serving(site.app()) as url:
        words = ("-m", "gateway.cli", "explain", str(body), "--url", f"{url}/v1", "--admin-token", "right")
        for target, code, error in (("w1", 0, b""), (None, 1, b"moongate: no worker is registered\n")):
            site.explained.target = target
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            shown, told = await process.communicate()
            assert (process.returncode, told) == (code, error)
            assert b"policy longest_prefix" in shown


@pytest.mark.parametrize(
    "given", ["gate:8000", "http://gate:8000", "http://gate:8000/", "gate:8000/v1", "http://gate:8000/v1/"]
)
def test_a_url_may_be_written_as_clients_have_it(given: str) -> None:
    assert base_url(given) == "http://gate:8000"
    assert base_url("https://gate/prefix/v1") == "https://gate/prefix"
