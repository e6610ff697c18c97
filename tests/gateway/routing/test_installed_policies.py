"""Policies that packages bring, in force and in the shadow of a running gateway: no fault costs a turn."""

from pathlib import Path
from typing import Any

import pytest
from installing import installer

from peer import ADMIN, Connection, Received

BAD = {
    "returns_none": "return None",
    "returns_dict": "return {'target': candidates[0].target}",
    "returns_coroutine": "async def later(): ...\n        return later()",
    "is_cancelled": "raise asyncio.CancelledError()",
    "exits": "raise SystemExit(3)",
}

CARELESS = {
    "sets_lines": "return Decision(candidates[0].target, 'local\\r\\nx-evil: 1', 'so', 'p', candidates)",
    "says_number": "return Decision(candidates[0].target, 'local', 12345, 'p', candidates)",
    "hides_all": "return Decision(candidates[0].target, 'local', 'so', 'p', ())",
}
SLOW = {"dawdles": "time.sleep(0.03)\n        return Decision(candidates[0].target, 'local', 'so', 'p', ())"}


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


@pytest.fixture
async def gate(peers: Any, front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    install = installer(tmp_path, monkeypatch)
    for name, body in (BAD | CARELESS | SLOW).items():
        install(
            name,
            "import asyncio, time\nfrom policies.types import Decision\n"
            f"def make(options):\n    def decide(turn, candidates):\n        {body}\n    return decide\n",
        )
    env = {"MOONGATE_ROUTING__HEADERS": "debug", "MOONGATE_ROUTING__POLICY_PATH": str(tmp_path / "policy")}
    return await front(await peers(say_ok), env=env)


async def admin(gate: Any, method: str, path: str, **more: Any) -> Any:
    async with gate.client.request(method, f"{gate.url}{path}", headers=ADMIN, **more) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json() if answer.content_type == "application/json" else await answer.text()


async def turn(gate: Any) -> str:
    sent = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    async with gate.client.post(gate.url + "/v1/chat/completions", json=sent) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-moongate-policy"]


async def test_a_bad_policy_in_the_shadow_touches_no_turn_and_is_counted(gate: Any) -> None:
    for name in BAD:
        await admin(gate, "PUT", "/admin/v1/shadow", json={"policy": name, "fallback": name})
        assert {await turn(gate) for _ in range(2)} == {"expected_ttft"}
        total = (await admin(gate, "GET", "/admin/v1/shadow"))["total"]
        assert (name, total["turns"], total["failed"]) == (name, 2, 2)
        assert total["fault"]
    await gate.idle()
    workers = (await admin(gate, "GET", "/admin/v1/workers"))["workers"]
    assert [target["inflight"] for worker in workers for target in worker["targets"]] == [0]


async def test_a_bad_policy_in_force_costs_no_turn_and_no_view(gate: Any) -> None:
    for name in BAD:
        await admin(gate, "PUT", "/admin/v1/policy", json={"policy": name, "fallback": name})
        assert (name, await turn(gate)) == (name, "least_loaded")
    found = (await admin(gate, "GET", "/admin/v1/decisions"))["decisions"]
    assert len(found) == len(BAD)
    assert {each["reason"] for each in found} == {"the policy failed, fallback"}
    assert all(each["fault"] for each in found)
    assert 'reason="the policy failed, fallback"' in await admin(gate, "GET", "/metrics")


async def test_a_careless_policy_costs_no_view(gate: Any) -> None:
    for name in CARELESS:
        await admin(gate, "PUT", "/admin/v1/policy", json={"policy": name})
        assert await turn(gate) == name
    found = (await admin(gate, "GET", "/admin/v1/decisions"))["decisions"]
    assert {(each["action"], each["target"] is None) for each in found} == {("none", False)}
    assert 'reason="no reason that can be shown"' in await admin(gate, "GET", "/metrics")


async def test_a_slow_policy_is_counted(gate: Any) -> None:
    for where in ("policy", "shadow"):
        await admin(gate, "PUT", f"/admin/v1/{where}", json={"policy": "dawdles"})
    await turn(gate)
    page = await admin(gate, "GET", "/metrics")
    for policy in ("dawdles", "shadow"):
        assert f'moongate_slow_decisions_total{{policy="{policy}"}} 1.0' in page


async def test_a_shadow_that_raises_itself_touches_no_turn(gate: Any) -> None:
    await admin(gate, "PUT", "/admin/v1/shadow", json={})
    # A fault of ours, in what the shadow sums up.
    gate.gateway.router.shadow.parts = None
    await turn(gate)
    total = (await admin(gate, "POST", "/admin/v1/policy/validate", json={}))["recent"]
    assert (total["turns"], total["failed"], total["unplaced"]) == (1, 0, 0)
    assert gate.gateway.router.shadow.total.failed == 1


async def test_turns_that_a_document_would_turn_away_are_counted_apart(gate: Any) -> None:
    closed = {"rules": [{"workers": ["nobody"], "spill": False}]}
    await admin(gate, "PUT", "/admin/v1/shadow", json=closed)
    for _ in range(2):
        await turn(gate)
    for found in (
        (await admin(gate, "GET", "/admin/v1/shadow"))["total"],
        (await admin(gate, "POST", "/admin/v1/policy/validate", json=closed))["recent"],
    ):
        assert (found["turns"], found["unplaced"], found["failed"]) == (0, 2, 0)
