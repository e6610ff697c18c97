"""Each change that an operator makes is one line of the gateway's log."""

import logging

import pytest

from peer import ADMIN


async def test_each_change_is_one_line_and_what_is_refused_is_none(
    front, caplog: pytest.LogCaptureFixture
) -> None:
    gate = await front(env={"MOONGATE_ROUTING__POLICY_PATH": ""})
    caplog.set_level(logging.INFO)
    caplog.clear()

    async def ask(method: str, path: str, status: int, body: object = None) -> str:
        """The lines that it makes, without the probes' own."""
        caplog.clear()
        async with gate.client.request(
            method, f"{gate.url}/admin/v1/{path}", json=body, headers=ADMIN
        ) as answer:
            assert answer.status == status, await answer.text()
        said = (r for r in caplog.records if r.name.startswith("gateway") and r.levelno == logging.INFO)
        return "\n".join(record.getMessage() for record in said)

    new = {"url": "http://127.0.0.1:9", "name": "w1"}
    assert await ask("POST", "workers", 201, new) == "worker w1 added: 'http://127.0.0.1:9', role both"
    assert await ask("POST", "workers", 409, new) == ""
    assert await ask("GET", "workers", 200) == ""
    worker = "workers/w1"
    assert await ask("PATCH", worker, 200, {"cordoned": True}) == "worker w1 cordoned"
    assert await ask("PATCH", worker, 200, {"cordoned": False}) == "worker w1 uncordoned"
    assert await ask("PATCH", worker, 409, {"drain": True}) == ""
    changed = {"weight": 0.5, "role": "decode"}
    assert await ask("PATCH", worker, 200, changed) == "worker w1: weight 0.5\nworker w1: role decode"
    assert await ask("PATCH", worker, 400, {"weight": 0}) == ""
    assert await ask("DELETE", f"{worker}?comment=too%0Aold", 204) == r"worker w1 removed: 'too\nold'"
    assert await ask("DELETE", worker, 404) == ""

    put = await ask("PUT", "policy?author=ann&comment=calm", 200, {"policy": "least_loaded"})
    etag = gate.gateway.policy.current.etag.strip('"')
    assert put == f"policy version {etag} is in force: least_loaded (by 'ann', 'calm')"
    assert await ask("PUT", "policy", 400, {"policy": "nobody's"}) == ""
    back = await ask("POST", "policy/rollback", 200)
    etag = gate.gateway.policy.current.etag.strip('"')
    assert back == f"policy version {etag} is in force: expected_ttft ('rollback to version 1')"

    assert await ask("DELETE", "shadow", 204) == ""
    said = await ask("PUT", "shadow", 200, {"policy": "round_robin"})
    assert said.startswith("shadow set: round_robin, document ")
    digest = said.split()[-1]
    promoted = await ask("POST", "shadow/promote", 200)
    assert promoted == (
        f"policy version 4-{digest} is in force: round_robin ('promoted from the shadow')\n"
        "shadow promoted, and ended"
    )
    await ask("PUT", "shadow", 200, {"policy": "round_robin"})
    assert await ask("DELETE", "shadow", 204) == "shadow ended"
