"""The admin API against a real fleet and a real decision log."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import httpx
import pytest

from gateway.admin.index import IndexAnswer, SnapshotView, index_entries
from gateway.admin.prompts import PromptsAnswer
from gateway.admin.routes import AdminParts, build_admin
from gateway.admin.views import PoolAnswer
from gateway.auth import AdminToken, ClientKeys, Guard
from gateway.errors import InvalidRequest
from gateway.knowledge.audit import Audit
from gateway.knowledge.drains import Drains
from gateway.knowledge.trust import Trust
from gateway.routing.decisions import DecisionLog, DecisionRecord
from gateway.routing.policy_versions import PolicyVersions
from gateway.settings import Settings, load
from policies.document import Document
from policies.ledger import Ledger
from policies.recorded import Outcome
from policies.types import Candidate, Decision, Turn
from store.groups import NEVER
from workers.fleet import Fleet
from workers.worker import EngineReport, ModelCard

TOKEN = {"authorization": "Bearer right"}


def record(request_id: str) -> DecisionRecord:
    shown = (Candidate("w1", local_tokens=64), Candidate("w2", excluded="cordoned"))
    terms = {"w1": {"queued": 0.0, "compute": 36.0}, "w2": {"queued": 5.0, "compute": 100.0}}
    decision = Decision(
        "w1", "local", "longest local prefix", "longest_prefix", shown, lambda c: terms[c.target], "tokens"
    )
    return DecisionRecord(request_id, 5.0, "chat", "m", 100, 32, decision, {"look": 1.5})


class Explained:
    """Explains every body alike, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    async def explain(
        self, path: str, body: bytes, key: str = "", headers: Sequence[str] = ()
    ) -> DecisionRecord:
        self.asked.append((path, body))
        if not body.startswith(b"{"):
            raise InvalidRequest("the body is not valid JSON")
        return record("explained")


@dataclass(frozen=True)
class Stream:
    """As much of a stream's status as the report reads."""

    state: str = "exact"
    last_seq: int | None = 7
    batches: int = 8
    gaps: int = 0
    garbage: int = 0
    last_event_age_s: float | None = 0.5
    last_proof_age_s: float | None = 0.7


class Gateway:
    """The admin app behind its guard, over real parts."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.fleet = Fleet()
        self.ledger = Ledger()
        self.decisions = DecisionLog()
        self.explained = Explained()
        parts = AdminParts(
            settings=settings or Settings(),
            fleet=self.fleet,
            loads=self.ledger,
            drains=Drains(None),
            explainer=self.explained,
            decisions=self.decisions,
            audit=Audit(),
            index=lambda: IndexAnswer(
                targets=index_entries(
                    [target.name for target in self.fleet.targets()],
                    {"w1": Stream()},
                    {("w1", "gpu"): 12, ("w1", "cpu"): 3, ("gone", "gpu"): 1},
                    {"w1": "another seed"},
                    lambda _: Trust("exact", 1.0),
                    lambda target: {0: 2, 1: None, 2: NEVER} if target == "w1" else {},
                ),
                memory_bytes=1,
                memory_limit_bytes=2,
                evicted_blocks=3,
                snapshot=SnapshotView(
                    path="", age_s=None, bytes=0, failures=0, unclaimed=0, unclaimed_blocks=0
                ),
            ),
            pool=lambda: PoolAnswer(configured=False, master="", degraded=False, details={}),
            prompts=lambda: PromptsAnswer(source="auto", models=[]),
            policy=PolicyVersions(Document(), None, lambda _: None),
            router=SimpleNamespace(shadow=None),
            refusals=lambda: ["turns were refused, the last 3 s ago, with 503: no worker"],
        )
        self.app = Guard(build_admin(parts), AdminToken("right"), ClientKeys(["client-key"]))

    async def ask(self, method: str, path: str, **more: object) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        more.setdefault("headers", TOKEN)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway/admin/v1") as http:
            return await http.request(method, path, **more)  # type: ignore[arg-type]


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_workers_are_added_cordoned_and_removed(gateway: Gateway) -> None:
    added = await gateway.ask("POST", "/workers", json={"url": "http://127.0.0.1:9001/", "name": "w1"})
    assert added.status_code == 201
    assert added.headers["location"] == "/admin/v1/workers/w1"
    assert (added.json()["url"], added.json()["state"]) == ("http://127.0.0.1:9001", "starting")

    cordoned = await gateway.ask("PATCH", "/workers/w1", json={"cordoned": True})
    assert cordoned.json()["cordoned"] is True
    assert gateway.fleet.get("w1").cordoned
    await gateway.ask("PATCH", "/workers/w1", json={"cordoned": False})
    assert not gateway.fleet.get("w1").cordoned

    removed = await gateway.ask("DELETE", "/workers/w1")
    assert (removed.status_code, removed.content) == (204, b"")
    assert gateway.fleet.workers() == []


async def test_the_weight_of_a_worker_can_be_changed(gateway: Gateway) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    changed = await gateway.ask("PATCH", "/workers/w1", json={"weight": 2})
    assert (changed.json()["weight"], changed.json()["cordoned"]) == (2.0, False)
    for bad in (0, -1, "much"):
        refused = await gateway.ask("PATCH", "/workers/w1", json={"weight": bad, "cordoned": True})
        assert refused.status_code == 400
    assert gateway.fleet.get("w1").weight == 2.0
    assert not gateway.fleet.get("w1").cordoned


async def test_a_worker_shows_its_models_load_and_report(gateway: Gateway) -> None:
    worker = gateway.fleet.add("http://127.0.0.1:9001")
    gateway.fleet.mark_up(
        worker,
        EngineReport(running=2, waiting=1, kv_usage=0.5, block_size=32, hash_algo="sha256_cbor"),
        (ModelCard("m", "/models/m", "", 4096),),
        (),
    )
    gateway.ledger.sent(Turn(300, 0.0), Candidate("127.0.0.1:9001"), time.monotonic())
    (shown,) = (await gateway.ask("GET", "/workers")).json()["workers"]
    assert shown == (await gateway.ask("GET", "/workers/127.0.0.1:9001")).json()
    assert shown["state"] == "up"
    assert shown["models"] == [{"id": "m", "root": "/models/m", "parent": "", "max_model_len": 4096}]
    (target,) = shown["targets"]
    assert (target["name"], target["inflight"], target["queued_tokens"]) == ("127.0.0.1:9001", 1, 300)
    assert target["rates"]["prefill_tokens_per_s"] == {"value": 20480, "confidence": 0}
    assert target["samples"] == 0
    assert (shown["running"], shown["waiting"], shown["block_size"]) == (2, 1, 32)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"url": "ftp://host:1"}, 400, "url"),
        ({"url": "http://user:SENTINEL@host:1"}, 400, "url"),
        ({"url": "http://host:99999"}, 400, "url"),
        ({"url": ""}, 400, "url"),
        ({"url": 5}, 400, "url"),
        ({}, 400, "url"),
        ({"url": "http://host:1", "colour": "red"}, 400, "colour"),
        ({"url": "http://host:1", "name": "a/b"}, 400, "url"),
        ({"url": "http://127.0.0.1:9001"}, 409, None),
        ({"url": "http://other:1", "name": "w1"}, 409, None),
    ],
)
async def test_a_worker_that_cannot_be_added(
    gateway: Gateway, body: dict[str, object], status: int, param: str | None
) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    answer = await gateway.ask("POST", "/workers", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert "SENTINEL" not in answer.text
    assert len(gateway.fleet.workers()) == 1


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("PATCH", {"cordoned": True}), ("DELETE", None)])
async def test_an_unknown_worker_is_a_404(gateway: Gateway, method: str, body: object) -> None:
    answer = await gateway.ask(method, "/workers/nobody", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "worker_not_found"


async def test_a_change_must_say_what_it_changes(gateway: Gateway) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    for body in ({}, {"cordoned": "yes"}, {"cordoned": 1}, {"cordon": True}, []):
        assert (await gateway.ask("PATCH", "/workers/w1", json=body)).status_code == 400, body


async def test_decisions_and_their_outcome(gateway: Gateway) -> None:
    first, second = record("r1"), record("r/2")
    gateway.decisions.add(first)
    gateway.decisions.add(second)
    gateway.decisions.finish(
        first, Outcome(kind="ok", status=200, cached_tokens=64, ttft_s=0.25, total_s=1.0)
    )
    listed = (await gateway.ask("GET", "/decisions?limit=1")).json()["decisions"]
    assert [d["request_id"] for d in listed] == ["r/2"]
    shown = (await gateway.ask("GET", "/decisions/r1")).json()
    assert (shown["target"], shown["action"], shown["blocks"]) == ("w1", "local", 3)
    assert shown["predicted_cached_tokens"] == 64
    assert shown["candidates"][0]["terms"] == {"queued": 0.0, "compute": 36.0}
    assert (shown["candidates"][1]["excluded"], shown["candidates"][1]["cost"]) == ("cordoned", 105.0)
    assert shown["outcome"]["cached_tokens"] == 64
    assert (await gateway.ask("GET", "/decisions/r/2")).json()["outcome"] is None
    assert (await gateway.ask("GET", "/decisions/r3")).status_code == 404
    for limit in ("0", "1001", "many"):
        assert (await gateway.ask("GET", f"/decisions?limit={limit}")).json()["error"]["param"] == "limit"


async def test_explain_guesses_the_api_and_takes_a_given_one(gateway: Gateway) -> None:
    for path, body in (
        ("/explain", b'{"prompt": "x"}'),
        ("/explain", b'{"messages": []}'),
        ("/explain?api=/v1/responses", b'{"input": "x"}'),
    ):
        answer = await gateway.ask("POST", path, content=body)
        assert answer.json()["target"] == "w1"
    assert [path for path, _ in gateway.explained.asked] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
    ]
    answer = await gateway.ask("POST", "/explain", content=b"nonsense")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("word", "path"),
    [("completions", "/v1/completions"), ("messages", "/v1/messages"), ("/v1/embeddings", "/v1/embeddings")],
)
async def test_explain_takes_an_api_by_name_or_path(gateway: Gateway, word: str, path: str) -> None:
    await gateway.ask("POST", f"/explain?api={word}", content=b"{}")
    assert [asked for asked, _ in gateway.explained.asked] == [path]


@pytest.mark.parametrize("query", ["", "?api=chats"])
async def test_explain_says_which_apis_there_are(gateway: Gateway, query: str) -> None:
    answer = await gateway.ask("POST", f"/explain{query}", content=b'{"model": "m"}')
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "api")
    assert "--api" in answer.json()["error"]["message"]
    assert "chat, completions, messages, responses" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/policy"), ("POST", "/workers"), ("PATCH", "/workers/w1")]
)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", None])
async def test_a_body_that_is_not_sent_as_json_is_415(
    gateway: Gateway, method: str, path: str, kind: str | None
) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    headers = TOKEN | ({"content-type": kind} if kind else {})
    answer = await gateway.ask(method, path, headers=headers, content=b'{"policy": "round_robin"}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/explain", b'{"input":1}'),
        ("PUT", "/policy", b'{"policy":"random"}'),
        ("POST", "/workers", b'{"url":"http://127.0.0.1:9001"}'),
    ],
)
async def test_bodies_are_read_up_to_the_limit(method: str, path: str, body: bytes) -> None:
    gateway = Gateway(load(None, {}, {"limits.max_body_bytes": len(body)}))
    headers = TOKEN | {"content-type": "application/json"}
    assert (await gateway.ask(method, path, headers=headers, content=body)).is_success
    read = 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield body

    refused = await gateway.ask(method, path, headers=headers, content=long())
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert read < 5


async def test_index_pool_audit_policy_and_config(gateway: Gateway) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    gateway.fleet.add("http://127.0.0.1:9002", "w2")
    first, second, gone = (await gateway.ask("GET", "/index")).json()["targets"]
    assert (first["target"], first["blocks"], first["stream"]) == ("w1", {"gpu": 12, "cpu": 3}, "exact")
    assert first["hash_mismatch"] == "another seed"
    assert (first["windows"], first["unproven_groups"]) == ({"0": 2}, [2])
    assert (second["target"], second["blocks"], second["stream"]) == ("w2", {}, "none")
    assert (gone["target"], gone["blocks"]) == ("gone", {"gpu": 1})
    assert (await gateway.ask("GET", "/pool")).json()["configured"] is False
    assert (await gateway.ask("GET", "/audit")).json()["exact_ratio"] is None
    assert (await gateway.ask("GET", "/prompts")).json() == {"source": "auto", "models": []}
    policy = (await gateway.ask("GET", "/policy")).json()
    assert policy["document"] == {"policy": "expected_ttft"}
    assert "longest_prefix" in policy["available"]
    assert (await gateway.ask("GET", "/config")).json()["settings"]["server"]["port"] == 8000


async def test_b105_config_masks_secrets() -> None:
    flags = {"admin.token": "SENTINEL", "workers.api_key": "SENTINEL"}
    answer = await Gateway(load(None, {}, flags)).ask("GET", "/config")
    assert [answer.json()["settings"][s][k] for s, k in (("admin", "token"), ("workers", "api_key"))] == [
        "***"
    ] * 2
    assert "SENTINEL" not in answer.text


async def test_openapi_documents_every_answer(gateway: Gateway) -> None:
    document = (await gateway.ask("GET", "/openapi.json")).json()
    for path, methods in document["paths"].items():
        assert path.startswith("/admin/v1/")
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert "422" not in operation["responses"]
            good = next(r for status, r in operation["responses"].items() if status.startswith("2"))
            assert method == "delete" or "$ref" in good["content"]["application/json"]["schema"], path
    assert {"/admin/v1/workers", "/admin/v1/explain", "/admin/v1/audit"} <= set(document["paths"])


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PATCH", "PUT", "DELETE"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer client-key"}])
async def test_b073_without_the_token_nothing_is_reached_or_changed(
    gateway: Gateway, method: str, headers: dict[str, str]
) -> None:
    gateway.fleet.add("http://127.0.0.1:9001", "w1")
    for path in (
        "/workers",
        "/workers/",
        "/workers/w1",
        "//workers/w1",
        "/openapi.json",
        "/explain",
        "/nothing",
    ):
        answer = await gateway.ask(
            method, path, headers=headers, json={"cordoned": True, "url": "http://h:1"}
        )
        assert answer.status_code in (401, 403), path
        assert "w1" not in answer.text
    assert [worker.name for worker in gateway.fleet.workers()] == ["w1"]
    assert not gateway.fleet.get("w1").cordoned
    assert gateway.explained.asked == []


async def test_b073_the_app_is_closed_even_without_a_guard(gateway: Gateway) -> None:
    gateway.app = gateway.app._app  # type: ignore[assignment]
    assert (await gateway.ask("GET", "/workers")).status_code == 403


async def test_b085_routes_and_methods_that_do_not_exist(gateway: Gateway) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("PUT", "/workers", 405),
        ("GET", "/workers/", 404),
    ):
        answer = await gateway.ask(method, path)
        assert answer.status_code == status, path
        assert set(answer.json()["error"]) == {"message", "type", "code", "param"}
