"""The policy of a running gateway: changed by version, tried, rolled back, kept over a restart."""

import asyncio
import hashlib
import json
import os
import re
import threading
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, serving

from gateway.cli.main import app
from gateway.settings import load
from peer import ADMIN, Connection, Received

DOCUMENT = {"policy": "round_robin", "guards": {"max_inflight": 9}}


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


class Policy:
    """The policy routes of one gateway."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    async def ask(
        self, method: str, path: str = "", body: Any = None, etag: str | None = None, **params: str
    ) -> tuple[int, dict[str, Any], str]:
        headers = ADMIN | ({} if etag is None else {"if-match": etag})
        url = f"{self.gate.url}/admin/v1/policy{path}"
        more = {} if body is None else {"json": body}
        async with self.gate.client.request(method, url, headers=headers, params=params, **more) as answer:
            return answer.status, await answer.json(), answer.headers.get("etag", "")

    async def turn(self, i: int = 0) -> tuple[str, str]:
        sent = {"model": "m", "messages": [{"role": "user", "content": f"{i}"}]}
        async with self.gate.client.post(self.gate.url + "/v1/chat/completions", json=sent) as answer:
            await answer.read()
            return answer.headers["x-moongate-worker"], answer.headers["x-moongate-policy"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "MOONGATE_ROUTING__HEADERS": "debug",
        "MOONGATE_ROUTING__POLICY_PATH": str(tmp_path / "kept" / "policy.json"),
    }


@pytest.fixture
async def policy(peers, front, env: dict[str, str]) -> Policy:
    fleet = [await peers(say_ok) for _ in range(2)]
    return Policy(await front(*fleet, env=env))


async def test_a_document_is_in_force_with_the_next_turn(policy: Policy) -> None:
    assert (await policy.turn())[1] == "expected_ttft"
    status, before, etag = await policy.ask("GET")
    assert (status, before["version"], before["document"]) == (200, 1, {"policy": "expected_ttft"})
    status, after, changed = await policy.ask("PUT", body=DOCUMENT, etag=etag, author="me", comment="why")
    assert (status, after["version"], after["author"], after["comment"]) == (200, 2, "me", "why")
    assert changed != etag
    turns = [await policy.turn(i) for i in range(4)]
    assert {name for _, name in turns} == {"round_robin"}
    assert turns[0][0] == turns[2][0] != turns[1][0]


async def test_a_change_to_a_version_that_is_no_more_is_refused(policy: Policy) -> None:
    _, _, etag = await policy.ask("GET")
    answers = await asyncio.gather(*(policy.ask("PUT", body=DOCUMENT, etag=etag) for _ in range(3)))
    assert sorted(status for status, _, _ in answers) == [200, 412, 412]
    status, error, _ = await policy.ask("POST", "/rollback", {}, etag=etag)
    assert (status, error["error"]["code"]) == (412, "precondition_failed")


async def test_a_condition_that_names_no_version_is_none(policy: Policy) -> None:
    for etag in (" ", ","):
        status, error, _ = await policy.ask("PUT", body=DOCUMENT, etag=etag)
        assert (etag, status, error["error"]["param"]) == (etag, 400, "if-match")
    assert (await policy.ask("PUT", body=DOCUMENT, etag="*"))[0] == 200


async def test_a_tag_stands_for_one_document_also_where_numbers_begin_anew(
    peers, front, env: dict[str, str]
) -> None:
    peer = await peers(say_ok)
    first = await Policy(await front(peer, env=env)).ask("GET")
    # Nothing was changed, so nothing was kept.
    other = Policy(await front(peer, env=env | {"MOONGATE_ROUTING__POLICY": "random"}))
    second = await other.ask("GET")
    assert first[1]["version"] == second[1]["version"] == 1
    assert first[2] != second[2]
    assert (await other.ask("PUT", body=DOCUMENT, etag=first[2]))[0] == 412


UNKEEPABLE: list[tuple[str, str | None]] = [
    ('{"policy": "longest_prefix", "options": {"margin_tokens": Infinity}}', "options.margin_tokens"),
    ('{"policy": "longest_prefix", "options": {"margin_tokens": "inf"}}', "options.margin_tokens"),
    ('{"policy": "longest_prefix", "options": {"margin_tokens": NaN}}', "options.margin_tokens"),
    ('{"policy": "longest_prefix", "options": {"margin_tokens": 1e999}}', "options.margin_tokens"),
    ('{"guards": {"max_imbalance": Infinity}}', "guards.max_imbalance"),
    ('{"guards": {"max_inflight": 1000000000000000000000000}}', "guards.max_inflight"),
    ('{"rules": [{"options": {"margin_tokens": -Infinity}}]}', "rules[0].options.margin_tokens"),
    ('{"rules": [{"name": "\\ud800"}]}', "rules[0].name"),
    ('{"\\ud800": 1}', None),
    ('{"rules": [{"match": {"header": {"\\udfff": "x"}}}]}', "rules[0].match.header"),
    ('{"options": {"x": ' + "[" * 500 + "]" * 500 + "}}", "options.x" + "[0]" * 31),
]


async def test_what_could_not_be_kept_is_refused(policy: Policy) -> None:
    headers = ADMIN | {"content-type": "application/json"}
    for method, path in (("PUT", "policy"), ("POST", "policy/validate"), ("PUT", "shadow")):
        for text, param in UNKEEPABLE:
            url = f"{policy.gate.url}/admin/v1/{path}"
            async with policy.gate.client.request(method, url, headers=headers, data=text) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
    assert (await policy.ask("GET"))[1]["version"] == 1


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"policy": "fastest"}, "policy", "allowed: expected_ttft"),
        ({"rules": [{"match": {"api": ["smtp"]}}]}, "rules[0].match.api[0]", "allowed: chat, completions"),
        ({"guards": {"max_inflght": 3}}, "guards.max_inflght", "allowed: max_queue_tokens"),
        ([], None, "Expected"),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("PUT", ""), ("POST", "/validate")])
async def test_a_bad_document_changes_nothing_and_says_what_is_wrong(
    policy: Policy, method: str, path: str, body: Any, param: str | None, says: str
) -> None:
    status, answer, _ = await policy.ask(method, path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert says in answer["error"]["message"]
    assert (await policy.ask("GET"))[1]["version"] == 1


async def test_a_document_is_tried_on_what_was_decided(policy: Policy) -> None:
    for i in range(12):
        await policy.turn(i)
    status, answer, _ = await policy.ask("POST", "/validate", {"policy": "round_robin"})
    assert status == 200
    recent = answer["recent"]
    assert recent["turns"] == 12
    assert 0 <= recent["changed"] <= 12
    assert answer["warnings"] == []
    rules = [{"workers": ["127.0.0.*", "nobody-*"]}, {"workers": ["127.0.0.1:*"]}]
    warned = (await policy.ask("POST", "/validate", {"rules": rules}))[1]["warnings"]
    assert warned == ["rules[0].workers[1]: no worker fits 'nobody-*'"]
    same = (await policy.ask("POST", "/validate", {"policy": "expected_ttft"}))[1]["recent"]
    assert (same["changed"], same["agreement"]) == (0, 1.0)
    assert same["predicted_ttft_ms_before"] == same["predicted_ttft_ms_after"]


async def test_turns_whose_headers_were_not_kept_are_not_judged(policy: Policy) -> None:
    gold = {"rules": [{"match": {"header": {"x-tenant": "gold"}}, "policy": "random"}]}
    await policy.turn()
    answer = (await policy.ask("POST", "/validate", gold))[1]
    assert (answer["recent"]["turns"], answer["not_judged"]) == (0, 1)
    await policy.ask("PUT", body=gold)
    await policy.turn()
    answer = (await policy.ask("POST", "/validate", gold))[1]
    assert (answer["recent"]["turns"], answer["not_judged"]) == (1, 1)
    assert (await policy.ask("POST", "/validate", {}))[1]["not_judged"] == 0


async def test_history_and_rollback(policy: Policy) -> None:
    await policy.ask("PUT", body=DOCUMENT, author="me")
    await policy.ask("PUT", body={"policy": "random"})
    status, back, _ = await policy.ask("POST", "/rollback", {"version": 2}, author="you")
    assert (status, back["version"]) == (200, 4)
    assert back["document"] == DOCUMENT
    versions = (await policy.ask("GET", "/history"))[1]["versions"]
    assert [v["version"] for v in versions] == [4, 3, 2, 1]
    assert [v["author"] for v in versions] == ["you", "", "me", "configuration"]
    assert '-  "policy": "random"' in versions[0]["diff"]
    assert (await policy.ask("POST", "/rollback"))[1]["document"] == {"policy": "random"}
    assert (await policy.ask("POST", "/rollback", {"version": 99}))[0] == 404


async def test_the_schema_is_published(policy: Policy) -> None:
    status, schema, _ = await policy.ask("GET", "/schema")
    assert status == 200
    assert "Guards" in schema["$defs"]


async def test_it_survives_a_restart_until_the_settings_name_another(
    peers, front, env: dict[str, str]
) -> None:
    peer = await peers(say_ok)
    await Policy(await front(peer, env=env)).ask("PUT", body=DOCUMENT, author="me")
    again = Policy(await front(peer, env=env))
    _, found, _ = await again.ask("GET")
    assert (found["version"], found["author"], found["document"]) == (2, "me", DOCUMENT)
    assert (await again.turn())[1] == "round_robin"
    other = Policy(await front(peer, env=env | {"MOONGATE_ROUTING__POLICY": "least_loaded"}))
    _, found, _ = await other.ask("GET")
    assert (found["version"], found["document"]) == (3, {"policy": "least_loaded"})


def spoil_the_last_version(path: Path) -> None:
    kept = json.loads(path.read_text())
    kept["versions"][-1]["document"]["options"]["margin_tokens"] = None
    path.write_text(json.dumps(kept))


async def test_a_last_version_that_can_not_be_used_does_not_cost_the_history(
    peers, front, env: dict[str, str]
) -> None:
    peer = await peers(say_ok)
    before = Policy(await front(peer, env=env))
    await before.ask("PUT", body=DOCUMENT)
    await before.ask("PUT", body={"policy": "longest_prefix", "options": {"margin_tokens": 5}})
    spoil_the_last_version(Path(env["MOONGATE_ROUTING__POLICY_PATH"]))
    again = Policy(await front(peer, env=env))
    _, found, _ = await again.ask("GET")
    assert (found["version"], found["document"]) == (4, DOCUMENT)
    assert found["comment"] == "version 2, as later ones can't be used"
    assert (await again.turn())[1] == "round_robin"
    assert [v["version"] for v in (await again.ask("GET", "/history"))[1]["versions"]] == [4, 3, 2, 1]


def broken(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"versions": [')


async def test_a_file_that_can_not_be_used_costs_no_start(peers, front, env: dict[str, str]) -> None:
    broken(Path(env["MOONGATE_ROUTING__POLICY_PATH"]))
    policy = Policy(await front(await peers(say_ok), env=env))
    assert (await policy.turn())[1] == "expected_ttft"


async def test_what_can_not_be_kept_does_not_come_into_force(peers, front, env: dict[str, str]) -> None:
    path = Path(env["MOONGATE_ROUTING__POLICY_PATH"])
    path.parent.write_text("a file where a directory is needed")
    policy = Policy(await front(await peers(say_ok), env=env))
    status, answer, _ = await policy.ask("PUT", body=DOCUMENT)
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert (await policy.turn())[1] == "expected_ttft"


async def test_without_the_token_nothing_is_shown_or_changed(policy: Policy) -> None:
    for method, path in (
        ("GET", ""),
        ("PUT", ""),
        ("POST", "/validate"),
        ("POST", "/rollback"),
        ("GET", "/history"),
    ):
        url = f"{policy.gate.url}/admin/v1/policy{path}"
        async with policy.gate.client.request(method, url, json=DOCUMENT) as answer:
            assert answer.status == 401
    assert (await policy.ask("GET"))[1]["version"] == 1


async def test_rules_go_by_alias_and_headers_also_where_they_are_explained(peers, tmp_path: Path) -> None:
    rules = [
        {"match": {"header": {"x-tenant": "gold"}}, "policy": "random"},
        {"match": {"alias": ["fast"]}, "policy": "round_robin"},
    ]
    file = tmp_path / "moongate.toml"
    file.write_text('[models."m"]\naliases = ["fast"]\n', "utf-8")
    flags = {
        "workers.urls": [(await peers(say_ok)).url],
        "admin.token": "admin-token",
        "routing.headers": "debug",
    }
    async with serving(load(file, QUICK, flags)) as gate:
        await gate.until(lambda: all(w.state == "up" for w in gate.gateway.fleet.workers()))
        await Policy(gate).ask("PUT", body={"rules": rules})
        for model, tenant, expected in (
            ("m", "gold", "random"),
            ("fast", "tin", "round_robin"),
            ("m", "tin", "expected_ttft"),
        ):
            body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
            url = gate.url + "/v1/chat/completions"
            async with gate.client.post(url, json=body, headers={"x-tenant": tenant}) as answer:
                assert answer.headers["x-moongate-policy"] == expected
            url, params = gate.url + "/admin/v1/explain", {"header": f"X-Tenant: {tenant}"}
            async with gate.client.post(url, json=body, params=params, headers=ADMIN) as answer:
                assert (await answer.json())["policy"] == expected
        async with gate.client.post(url, json=body, params={"header": "gold"}, headers=ADMIN) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "header")


async def test_rules_go_by_tenant_and_key_as_authenticated_and_never_show_the_key(
    peers, front, env: dict[str, str], tmp_path: Path
) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("k-SENTINEL-1 name=ci-1 tenant=acme\nk-SENTINEL-2\n")
    more = {
        "MOONGATE_AUTH__API_KEYS_FILE": str(keys),
        "MOONGATE_ROUTING__DECISION_LOG_PATH": str(log),
    }
    gate = await front(await peers(say_ok), env=env | more)
    digest = hashlib.sha256(b"k-SENTINEL-2").hexdigest()[:12]
    rules = [
        {"match": {"tenant": ["acme"], "key": ["ci-*"]}, "policy": "random"},
        {"match": {"key": [f"sha256:{digest}"]}, "policy": "round_robin"},
    ]
    assert (await Policy(gate).ask("PUT", body={"rules": rules}))[0] == 200
    sent = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    url = gate.url + "/v1/chat/completions"
    # What a client says of itself counts for nothing.
    for key, expected in (("k-SENTINEL-1", "random"), ("k-SENTINEL-2", "round_robin")):
        headers = {"authorization": f"Bearer {key}", "x-tenant": "acme", "tenant": "acme"}
        async with gate.client.post(url, json=sent, headers=headers) as answer:
            assert answer.headers["x-moongate-policy"] == expected
    explain = gate.url + "/admin/v1/explain"
    for name, expected in (("ci-1", "random"), (f"sha256:{digest}", "round_robin"), ("", "expected_ttft")):
        async with gate.client.post(explain, json=sent, params={"key": name}, headers=ADMIN) as answer:
            assert (await answer.json())["policy"] == expected
    async with gate.client.post(explain, json=sent, params={"key": "acme"}, headers=ADMIN) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "key")
    async with gate.client.get(gate.url + "/admin/v1/decisions", headers=ADMIN) as answer:
        assert "SENTINEL" not in await answer.text()
    await gate.idle()
    await gate.gateway.decision_file.close()
    assert "SENTINEL" not in log.read_text()
    facts = [json.loads(line)["facts"] for line in log.read_text().splitlines()]
    assert [f["key"] for f in facts] == ["ci-1", f"sha256:{digest}"]


class TestCommand:
    @pytest.fixture
    def run(self, policy: Policy) -> Any:
        async def run(*words: str) -> tuple[int, str, str]:
            def call() -> tuple[int, str, str]:
                out, err = StringIO(), StringIO()
                with redirect_stdout(out), redirect_stderr(err):
                    argv = ["policy", *words, "--url", policy.gate.url, "--admin-token", "admin-token"]
                    code = app(argv, standalone_mode=False)
                return code if isinstance(code, int) else 0, out.getvalue(), err.getvalue()

            return await asyncio.to_thread(call)

        return run

    async def test_the_document_comes_and_goes_as_json_or_toml(self, run: Any, tmp_path: Path) -> None:
        file = tmp_path / "policy.toml"
        file.write_text('policy = "round_robin"\n[guards]\nmax_inflight = 9\n')
        code, out, _ = await run("validate", str(file))
        nothing = "before and after are not compared: there is no turn lately that both policies could place"
        assert (code, out.splitlines()) == (0, ["the document is valid", nothing])
        assert await run("put", str(file), "--comment", "evenly") == (0, "version 2 is in force\n", "")
        code, out, err = await run("get")
        assert (code, json.loads(out)) == (0, DOCUMENT)
        assert err.startswith("version 2 by ")
        code, out, _ = await run("history")
        assert "evenly" in out
        assert '+  "policy": "round_robin"' in out
        code, out, _ = await run("rollback", "1")
        assert (code, out) == (0, "version 3 is in force: rollback to version 1\n")

    async def test_turns_that_would_be_turned_away_are_said(
        self, policy: Policy, run: Any, tmp_path: Path
    ) -> None:
        await policy.turn()
        file = tmp_path / "policy.json"
        file.write_text('{"rules": [{"workers": ["nobody"], "spill": false}]}')
        code, out, _ = await run("validate", str(file))
        assert (code, out.splitlines()[-1]) == (
            0,
            "warning: 1 of the last turns would have been turned away: nobody may",
        )
        code, out, _ = await run("put", str(file))
        warning = "warning: rules[0].workers[0]: no worker fits 'nobody'"
        assert (code, out.splitlines()) == (0, ["version 2 is in force", warning])

    async def test_a_conflict_and_a_bad_document_end_with_1(self, run: Any, tmp_path: Path) -> None:
        file = tmp_path / "policy.json"
        file.write_text('{"policy": "random"}')
        code, _, err = await run("put", str(file), "--if-match", "7")
        assert code == 1
        assert "the policy is at version 1 by now" in err
        assert (await run("put", str(file), "--if-match", "1"))[:2] == (0, "version 2 is in force\n")
        file.write_text('{"policy": "fastest"}')
        code, _, err = await run("put", str(file))
        assert code == 1
        assert "allowed: expected_ttft" in err
        file.write_text("{")
        assert "not valid JSON" in (await run("validate", str(file)))[2]


class TestShadow:
    async def ask(self, policy: Policy, method: str, path: str = "", body: Any = None) -> tuple[int, Any]:
        url = f"{policy.gate.url}/admin/v1/shadow{path}"
        more = {} if body is None else {"json": body}
        async with policy.gate.client.request(method, url, headers=ADMIN, **more) as answer:
            return answer.status, await answer.json() if answer.status != 204 else None

    async def test_it_decides_on_every_turn_without_acting_and_can_be_promoted(self, policy: Policy) -> None:
        assert (await self.ask(policy, "GET"))[0] == 404
        assert (await self.ask(policy, "PUT", body={"policy": "fastest"}))[0] == 400
        status, shown = await self.ask(policy, "PUT", body={"policy": "round_robin"})
        assert (status, shown["total"]["turns"]) == (200, 0)
        turns = [await policy.turn(i) for i in range(8)]
        assert {name for _, name in turns} == {"expected_ttft"}
        _, shown = await self.ask(policy, "GET")
        assert shown["total"]["turns"] == 8
        assert [(p["model"], p["prompt"]) for p in shown["by_model_and_prompt"]] == [("m", "unknown")]
        async with policy.gate.client.get(policy.gate.url + "/metrics", headers=ADMIN) as answer:
            ratio = f"moongate_shadow_agreement_ratio {shown['total']['agreement']}"
            assert ratio in await answer.text()
        status, version = await self.ask(policy, "POST", "/promote")
        assert (status, version["document"]) == (200, {"policy": "round_robin"})
        assert (await policy.turn())[1] == "round_robin"
        assert (await self.ask(policy, "GET"))[0] == 404

    async def during_a_write(
        self, policy: Policy, monkeypatch: pytest.MonkeyPatch, *asked: tuple[str, str, Any]
    ) -> list[int]:
        """What is asked for while the first of it is not on disk yet; the statuses."""
        written = threading.Event()
        monkeypatch.setattr(os, "fsync", lambda _: written.wait(60))
        tasks: list[asyncio.Task[tuple[int, Any]]] = []
        for each in asked:
            tasks.append(asyncio.create_task(self.ask(policy, *each)))
            for _ in range(3):
                await policy.ask("GET")
        written.set()
        return [status for status, _ in await asyncio.gather(*tasks)]

    async def test_it_is_promoted_once(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        await self.ask(policy, "PUT", body={"policy": "round_robin"})
        found = await self.during_a_write(policy, monkeypatch, *[("POST", "/promote", None)] * 5)
        assert sorted(found) == [200, 404, 404, 404, 404]
        assert (await policy.ask("GET"))[1]["version"] == 2

    async def test_one_that_is_set_during_a_promotion_stays(
        self, policy: Policy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.ask(policy, "PUT", body={"policy": "round_robin"})
        asked = ("POST", "/promote", None), ("PUT", "", {"policy": "random"})
        assert await self.during_a_write(policy, monkeypatch, *asked) == [200, 200]
        assert (await policy.ask("GET"))[1]["document"] == {"policy": "round_robin"}
        status, shown = await self.ask(policy, "GET")
        assert (status, shown["document"]) == (200, {"policy": "random"})

    async def test_it_can_be_ended(self, policy: Policy) -> None:
        await self.ask(policy, "PUT", body={})
        assert (await self.ask(policy, "DELETE"))[0] == 204
        assert (await self.ask(policy, "GET"))[0] == 404
        assert (await self.ask(policy, "POST", "/promote"))[0] == 404


async def test_a_turn_that_a_rule_leaves_to_nobody_is_counted_recorded_and_told(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    rule = {"name": "none of these", "workers": ["nobody-*"], "spill": False}
    assert (await policy.ask("PUT", body={"rules": [rule]}))[0] == 200
    sent = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    gate, ids = policy.gate, []
    for _ in range(3):
        async with gate.client.post(f"{gate.url}/v1/chat/completions", json=sent) as answer:
            assert answer.status == 503
            ids.append(answer.headers["x-request-id"])
            why = (await answer.json())["error"]["message"]
    assert why.startswith("no worker can take this turn now: ")
    assert why.endswith(" rule")
    await gate.idle()
    async with gate.client.get(f"{gate.url}/metrics") as page:
        lines = [line for line in (await page.text()).splitlines() if "moongate_decisions_total{" in line]
    assert [line for line in lines if 'action="none"' in line and line.endswith(" 3.0")] == lines
    async with gate.client.get(f"{gate.url}/admin/v1/decisions", headers=ADMIN) as answer:
        shown = (await answer.json())["decisions"]
    assert [each["request_id"] for each in shown] == ids[::-1]
    assert {(d["target"], d["action"], d["rule"], d["outcome"]["status"]) for d in shown} == {
        (None, "none", "none of these", 503)
    }
    said = f"{why} (rule 'none of these')"
    assert [line for line in caplog.messages if "503" in line] == [f"1 turn was refused with 503: {said}"]
    async with gate.client.get(f"{gate.url}/ready") as ready:
        assert ready.status == 200
        (reason,) = [each for each in (await ready.json())["reasons"] if "refused" in each]
    assert re.fullmatch(rf"turns were refused, the last \d+ s ago, with 503: {re.escape(said)}", reason)
    gate.gateway.refusals.close()
    assert caplog.messages[-1] == f"2 more turns were refused with 503 in the last minute: {said}"
