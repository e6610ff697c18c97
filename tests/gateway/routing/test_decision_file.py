"""Decisions of a running gateway, written down and decided again."""

import asyncio
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from gateway.cli.main import app
from gateway.routing.decision_file import DecisionFile
from gateway.routing.decisions import DecisionRecord
from peer import ADMIN, Connection, Received
from policies.document import read
from policies.plan import Facts, Plan
from policies.recorded import Recorded
from policies.types import Candidate, Turn

PLAN = Plan(read({"policy": "least_loaded"}))


async def say_ok(_: Received, connection: Connection) -> None:
    await connection.answer(200, b'{"ok":true}', "content-type: application/json")


async def replayed(*words: str) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()

    def run() -> int:
        with redirect_stdout(out), redirect_stderr(err):
            return app(["replay", "--decisions", *words], standalone_mode=False) or 0

    return await asyncio.to_thread(run), out.getvalue(), err.getvalue()


def record(name: str, plan: Plan | None = PLAN) -> DecisionRecord:
    turn, fleet = Turn(100, 0.3), [Candidate("a"), Candidate("b", queued_tokens=9)]
    facts = Facts("m", headers={"x-tenant": "t", "x-other": "o"})
    decision = (plan or PLAN).decide(turn, fleet, facts)
    return DecisionRecord(name, 1.0, "chat", "m", 100, 16, decision, turn=turn, facts=facts, plan=plan)


def names(path: Path) -> list[str]:
    return [msgspec.json.decode(line, type=Recorded).id for line in path.read_bytes().splitlines()]


async def written(path: Path, *records: DecisionRecord, most: int = 1 << 20) -> int:
    """How many of them were dropped."""
    dropped: list[int] = []
    file = DecisionFile(str(path), most, dropped.append)
    await file.start()
    for each in records:
        file.add(each)
    await file.close()
    return sum(dropped)


async def test_a_log_of_live_turns_is_decided_alike_and_tried_on_others(
    peers: Callable, front: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "decisions.jsonl"
    fleet = [await peers(say_ok) for _ in range(2)]
    env = {
        "MOONGATE_ROUTING__DECISION_LOG_PATH": str(path),
        "MOONGATE_ROUTING__POLICY_PATH": "",
        "MOONGATE_ROUTING__POLICY": "round_robin",
    }
    gate = await front(*fleet, env=env)

    async def turns(count: int) -> None:
        for i in range(count):
            sent = {"model": "m", "messages": [{"role": "user", "content": f"secret {i}"}]}
            headers = {"x-tenant": f"t{i % 2}", "authorization": "Bearer key-of-a-client"}
            url = f"{gate.url}/v1/chat/completions"
            async with gate.client.post(url, json=sent, headers=headers) as answer:
                assert answer.status == 200

    await turns(6)
    document = {
        "policy": "expected_ttft",
        "rules": [{"match": {"header": {"x-tenant": "t1"}}, "policy": "random", "name": "tenants"}],
        "guards": {"max_inflight": 9, "min_prefix_tokens": 16},
    }
    async with gate.client.put(f"{gate.url}/admin/v1/policy", json=document, headers=ADMIN) as answer:
        assert answer.status == 200
    await turns(6)
    await gate.idle()
    await gate.gateway.decision_file.close()
    content = path.read_bytes()
    assert len(content.splitlines()) == 12
    assert b"secret" not in content
    assert b"key-of-a-client" not in content
    outcomes = [msgspec.json.decode(line, type=Recorded).outcome for line in content.splitlines()]
    for outcome in outcomes:
        assert outcome is not None
        assert (outcome.kind, outcome.status) == ("ok", 200)
        assert 0 < (outcome.ttft_s or 0) <= outcome.total_s
    code, out, _ = await replayed(str(path), "--policy", "round_robin", "--policy", "longest_prefix")
    assert (code, out.splitlines()[0]) == (0, "12 of 12 decisions are equal")
    assert "round_robin: " in out
    assert "of 12 turns would go elsewhere: expected time to first token " in out
    # What was recorded otherwise than it would be decided is found.
    forged = msgspec.json.decode(content.splitlines()[2])
    forged["turn"]["number"] += 1
    path.write_bytes(content + msgspec.json.encode(forged) + b"\n")
    code, out, _ = await replayed(str(path))
    assert (code, out.splitlines()[0]) == (1, "12 of 13 decisions are equal")
    assert "the first that is not is in line 13" in out


async def test_a_turn_that_fails_and_is_placed_anew_has_a_line_for_each_try(
    peers: Callable, front: Callable, tmp_path: Path
) -> None:
    async def fail(_: Received, connection: Connection) -> None:
        await connection.answer(500, b"{}", "content-type: application/json")

    async def stream(_: Received, connection: Connection) -> None:
        usage = b'{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}'
        await connection.start_stream()
        await connection.chunk(b'data: {"choices":[],"usage":' + usage + b"}\n\n")
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end_stream()

    path = tmp_path / "log"
    env = {
        "MOONGATE_ROUTING__DECISION_LOG_PATH": str(path),
        "MOONGATE_ROUTING__POLICY_PATH": "",
        "MOONGATE_ROUTING__POLICY": "round_robin",
    }
    gate = await front(await peers(fail), await peers(stream), env=env)
    for _ in range(2):
        sent = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
        async with gate.client.post(f"{gate.url}/v1/chat/completions", json=sent) as answer:
            await answer.read()
    await gate.idle()
    await gate.gateway.decision_file.close()
    lines = [msgspec.json.decode(line, type=Recorded) for line in path.read_bytes().splitlines()]
    tries = [(each.outcome.kind, each.outcome.cached_tokens) for each in lines if each.outcome]
    assert sorted(set(tries), key=str) == [("moved", None), ("ok", 4)]
    assert len(tries) == len(lines)
    code, out, _ = await replayed(str(path))
    assert code == 0
    assert "2 streamed answers: time to first token " in out


async def test_a_gateway_without_turns_ends_at_once_and_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = DecisionFile(str(tmp_path / "log"), 1 << 20, lambda _: None)
    await file.start()
    await asyncio.sleep(0)  # its task waits for a first decision
    await file.close()
    assert not caplog.records
    assert os.listdir(tmp_path) == []


async def test_a_full_file_is_put_aside_for_one_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await written(path, record("r00"))
    size = path.stat().st_size
    for i in range(1, 8, 2):
        assert await written(path, record(f"r0{i}"), record(f"r0{i + 1}"), most=3 * size) == 0
    older = path.with_name("log.1")
    assert names(older) == ["r03", "r04", "r05"]
    assert names(path) == ["r06", "r07", "r08"]
    assert sorted(os.listdir(tmp_path)) == ["log", "log.1"]


async def test_many_at_once_are_spread_over_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await written(path, record("r00"))
    size = path.stat().st_size
    await written(path, *(record(f"r{i:02}") for i in range(1, 9)), most=4 * size)
    assert names(path.with_name("log.1")) == ["r04", "r05", "r06", "r07"]
    assert names(path) == ["r08"]


@pytest.mark.parametrize("cut", [b'{"id":"x', b"x" * 200_000])
async def test_a_line_cut_by_a_crash_is_taken_off_before_more_is_written(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "log"
    await written(path, record("one"))
    path.write_bytes(path.read_bytes() + cut)
    await written(path, record("two"))
    assert names(path) == ["one", "two"]
    path.write_bytes(cut)
    await written(path, record("three"))
    assert names(path) == ["three"]


async def test_what_a_slow_or_broken_disk_does_not_take_is_dropped_and_counted(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert await written(blocked / "log", record("one"), record("two")) == 2
    dropped: list[int] = []
    file = DecisionFile(str(tmp_path / "log"), 1 << 24, dropped.append)
    # Its task gets no time to write: as with a disk that does not answer.
    for i in range(1500):
        file.add(record(f"{i}"))
    assert sum(dropped) == 500
    await file.start()
    await file.close()
    assert len(names(tmp_path / "log")) == 1000


async def test_a_disk_that_is_full_for_some_and_not_for_others_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "place"
    gone = asyncio.Event()
    file = DecisionFile(str(place / "log"), 1 << 24, lambda _: gone.set())
    await file.start()
    for name in ("one", "two"):
        place.write_text("in the way")
        gone.clear()
        file.add(record(name))
        await gone.wait()
        place.unlink()
        file.add(record(f"{name} more"))
        async with asyncio.timeout(20.0):
            while not (place / "log").exists():
                await asyncio.sleep(0.01)
        (place / "log").unlink()
        place.rmdir()
    await file.close()
    assert len(caplog.records) == 1


async def test_nothing_is_written_where_a_rule_goes_by_a_credential(tmp_path: Path) -> None:
    rule = {"match": {"header": {"authorization": "Bearer s3cret*"}}}
    keyed = Plan(read({"rules": [rule]}))
    assert await written(tmp_path / "log", record("one", keyed), record("two")) == 1
    assert names(tmp_path / "log") == ["two"]


async def test_of_headers_only_those_are_written_that_the_policy_goes_by(tmp_path: Path) -> None:
    named = Plan(read({"rules": [{"match": {"header": {"x-tenant": "*"}}}]}))
    await written(tmp_path / "log", record("one", named), record("two"))
    lines = (tmp_path / "log").read_bytes().splitlines()
    headers = [msgspec.json.decode(line, type=Recorded).facts.headers for line in lines]
    assert headers == [{"x-tenant": "t"}, {}]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--decisions", "log", "--instances", "3"], "--decisions can't go with --instances"),
        (["trace", "--decisions", "log"], "--decisions can't go with file"),
        (["--decisions", "no-such-log"], "no-such-log: No such file"),
        ([], "needs a trace, or --decisions"),
    ],
)
def test_words_that_do_not_fit_are_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["replay", *words], standalone_mode=False) == 2
    assert says in capsys.readouterr().err
