"""A wall clock that is set, by hours and back, is seen in what is written down, and decides nothing."""

import time
from pathlib import Path

import pytest

from peer import ADMIN, Connection, Received


@pytest.mark.parametrize("hours", [6, -6])
async def test_a_clock_that_jumps_ends_nothing_and_begins_nothing(
    peers, front, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hours: int
) -> None:
    async def stores(request: Received, connection: Connection) -> None:
        made = request.method == "POST" or request.target == "/v1/responses/resp_1"
        await connection.answer(200 if made else 404, b'{"id":"resp_1"}', "content-type: application/json")

    workers = [await peers(stores) for _ in range(2)]
    gate = await front(
        *workers,
        env={
            "MOONGATE_LIMITS__STORED_RESPONSES_S": "3600",
            "MOONGATE_WORKERS__BREAKER_FAILURES": "1",
            "MOONGATE_WORKERS__BREAKER_OPEN_S": "3600",
            "MOONGATE_INDEX__SNAPSHOT_PATH": str(tmp_path / "index"),
            "MOONGATE_INDEX__SNAPSHOT_INTERVAL_S": "0.05",
        },
    )
    await gate.until(lambda: gate.gateway.snapshots.status().age_s is not None)

    async def asked(method: str, path: str) -> int:
        body = b'{"model":"m","input":"x"}' if method == "POST" else None
        async with gate.client.request(method, gate.url + path, data=body) as answer:
            await answer.read()
            return answer.status

    assert await asked("POST", "/v1/responses") == 200
    (owner,) = {record.decision.target for record in gate.gateway.decisions.recent(1)}
    other = next(w for w in gate.gateway.fleet.workers() if w.name != owner)
    gate.gateway.fleet.failed(other, "500")
    before, now = [len(worker.received) for worker in workers], time.time
    monkeypatch.setattr(time, "time", lambda: now() + hours * 3600)
    assert await asked("GET", "/v1/responses/resp_1") == 200
    after = [len(worker.received) for worker in workers]
    # Nobody had to be asked who has it, and who fails gets no trial yet.
    assert sum(after) == sum(before) + 1
    assert gate.gateway.fleet.breaker_state(other) == "open"
    assert await asked("POST", "/v1/responses") == 200
    age_s = gate.gateway.snapshots.status().age_s
    assert age_s is not None
    assert 0 <= age_s < 60
    async with gate.client.get(f"{gate.url}/admin/v1/decisions", headers=ADMIN) as answer:
        times = [each["time"] for each in (await answer.json())["decisions"]]
    # The newest first, whatever their clock said.
    assert round((times[0] - times[-1]) / 3600) == hours
