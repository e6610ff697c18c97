"""Names that others rely on, asked of a running gateway: paths, headers, metrics with their labels."""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conftest import QUICK, Front, serving

from gateway.settings import load
from peer import ADMIN
from tests.ports import ports
from tests.simulated import simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORTS = ports(above=25_300)
MODEL = {"model": "tiny"}
TEXT = "Which worker holds this prefix? " * 20
CHAT = {**MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
TURNS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**MODEL, "prompt": TEXT, "max_tokens": 4},
    "/v1/responses": {**MODEL, "input": TEXT, "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {**MODEL, "messages": CHAT["messages"]},
    "/v1/embeddings": {**MODEL, "input": "x"},
    "/v1/rerank": {**MODEL, "query": "q", "documents": ["a", "b"]},
    "/v1/score": {**MODEL, "text_1": "q", "text_2": ["a"]},
    "/tokenize": {**MODEL, "prompt": "hello"},
    "/detokenize": {**MODEL, "tokens": [300, 301]},
}
PAGES = ("/health", "/ready", "/metrics", "/v1/models")
ADMIN_PAGES = "workers policy policy/history shadow decisions index pool audit config openapi.json".split()
HEADERS = {
    f"x-moongate-{name}"
    for name in "worker action prompt-tokens local-tokens pool-tokens policy decision-ms".split()
}
METRICS = {
    "requests_total": "api model outcome",
    "decisions_total": "policy action reason",
    "decision_seconds": "",
    "prompt_tokens_total": "source",
    "actual_cached_tokens_total": "",
    "prediction_error_tokens": "",
    "worker_inflight": "worker",
    "worker_up": "worker",
    "index_blocks": "worker tier",
    "index_trust": "worker",
    "kv_events_total": "worker kind",
    "kv_event_gaps_total": "",
    "pool_lookup_seconds": "",
    "pool_degraded": "",
    "ttft_seconds": "",
    "upstream_errors_total": "worker class",
    "shadow_agreement_ratio": "",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gate(tiny_model: Path) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(simulated(tiny_model, PORTS, blocks=256, max_model_len=4000))
        flags: dict[str, Any] = {"workers.urls": [url], "admin.token": "admin-token"}
        front = await stack.enter_async_context(
            serving(load(None, {**QUICK, "MOONGATE_PROMPT__SOURCE": "auto"}, flags))
        )
        await front.until(lambda: all(w.state == "up" for w in front.gateway.fleet.workers()))
        await front.tokenizers()
        yield front


async def ask(gate: Front, method: str, path: str, **more: Any) -> tuple[int, dict[str, str], str]:
    async with gate.client.request(method, gate.url + path, **more) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, headers, await answer.text()


@pytest.mark.parametrize("path", TURNS)
async def test_turns_are_answered_and_named(gate: Front, path: str) -> None:
    status, headers, said = await ask(gate, "POST", path, json=TURNS[path])
    assert (status, "x-request-id" in headers) == (200, True), said


async def test_a_stored_response_is_found_by_its_id(gate: Front) -> None:
    _, _, said = await ask(gate, "POST", "/v1/responses", json=TURNS["/v1/responses"])
    found = re.search(r'"id":"(resp_\w+)"', said)
    assert found, said
    status, _, again = await ask(gate, "GET", f"/v1/responses/{found[1]}")
    assert (status, found[1] in again) == (200, True)
    status, _, said = await ask(gate, "POST", f"/v1/responses/{found[1]}/cancel")
    assert (status, "synchronous" in said) == (400, True), "the worker's own answer"


async def test_pages(gate: Front) -> None:
    assert {path: (await ask(gate, "GET", path))[0] for path in PAGES} == dict.fromkeys(PAGES, 200)
    status, _, _ = await ask(gate, "PUT", "/admin/v1/shadow", json={"policy": "random"}, headers=ADMIN)
    assert status == 200
    answers = {page: (await ask(gate, "GET", f"/admin/v1/{page}", headers=ADMIN))[0] for page in ADMIN_PAGES}
    assert answers == dict.fromkeys(ADMIN_PAGES, 200)
    status, _, said = await ask(gate, "POST", "/admin/v1/explain", json=CHAT, headers=ADMIN)
    assert (status, '"candidates"' in said) == (200, True)


async def test_what_was_decided_is_told_to_the_admin_alone(gate: Front) -> None:
    _, headers, _ = await ask(gate, "POST", "/v1/chat/completions", json=CHAT, headers=ADMIN)
    assert {name for name in headers if name.startswith("x-moongate-")} == HEADERS
    assert headers["x-moongate-action"] in ("local", "recompute")
    assert int(headers["x-moongate-prompt-tokens"]) > 64
    assert float(headers["x-moongate-decision-ms"]) > 0
    _, headers, _ = await ask(gate, "POST", "/v1/chat/completions", json=CHAT)
    assert not {name for name in headers if name.startswith("x-moongate-")}


async def test_metrics(gate: Front) -> None:
    await ask(gate, "PUT", "/admin/v1/shadow", json={"policy": "random"}, headers=ADMIN)
    await ask(gate, "POST", "/v1/chat/completions", json=CHAT)
    await gate.idle()
    await gate.until(lambda: bool(gate.gateway.knowledge.index.sizes()))
    _, _, page = await ask(gate, "GET", "/metrics")
    for name, labels in METRICS.items():
        assert f"# TYPE moongate_{name} " in page, name
        if name == "upstream_errors_total":
            continue  # nothing has failed
        samples = re.findall(rf"^moongate_{name}(?:_count)?(?:{{(.*)}})? ", page, re.MULTILINE)
        assert samples, name
        for sample in samples:
            assert set(re.findall(r'(\w+)="', sample)) == set(labels.split()), name
