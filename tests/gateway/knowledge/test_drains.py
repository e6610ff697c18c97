"""Drains: what is said of them, and those that the master refuses to stop."""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import pytest
from msgspec.structs import replace

from gateway import errors
from gateway.health import readiness
from gateway.knowledge.drains import Drains
from store.mooncake_http import DrainJob, MasterRefused
from store.pool import PoolView
from workers.fleet import Fleet

DRAIN = DrainJob("job", "RUNNING", moved=3, failed=0, blocked=0, active=1, moved_bytes=96, message="")


class MovingMaster:
    """As a master answers while a block is on its way."""

    async def drain(self, segment: str) -> str:
        return "job"

    async def drained(self, job: str) -> DrainJob:
        return DRAIN

    async def stop_draining(self, job: str) -> None:
        raise MasterRefused("UNAVAILABLE_IN_CURRENT_STATUS")


async def test_a_drain_that_cannot_be_stopped_now_says_what_to_do_instead() -> None:
    worker = Fleet().add("http://127.0.0.1:9001", "w1", "127.0.0.1:5559")
    drains = Drains(cast(PoolView, MovingMaster()))
    await drains.start(worker)
    with pytest.raises(errors.Conflict) as refused:
        await drains.stop(worker)
    assert "UNAVAILABLE_IN_CURRENT_STATUS" in refused.value.message
    assert '{"cordoned": false}' in refused.value.message
    assert await drains.progress("w1") == DRAIN


class ObedientMaster(MovingMaster):
    async def stop_draining(self, job: str) -> None:
        pass


async def test_drains_that_begin_and_are_stopped_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = Fleet().add("http://127.0.0.1:9001", "w1", "127.0.0.1:5559")
    drains = Drains(cast(PoolView, ObedientMaster()))
    await drains.stop(worker)
    assert caplog.messages == []
    for _ in range(2):
        await drains.start(worker)
    await drains.stop(worker)
    assert caplog.messages == [
        "worker w1 drains segment 127.0.0.1:5559: job job",
        "worker w1: drain stopped: RUNNING, 3 moved, 1 active, 0 blocked, 0 failed",
    ]


class Master(ObedientMaster):
    """Says what it is told to, and who asks."""

    def __init__(self, *answers: DrainJob | MasterRefused) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def drained(self, job: str) -> DrainJob:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, MasterRefused):
            raise answer
        return answer


WAITING = replace(DRAIN, moved=78, blocked=44, active=0)
DONE = replace(DRAIN, status="SUCCEEDED", moved=122, active=0)


async def said(caplog: pytest.LogCaptureFixture, words: str) -> logging.LogRecord:
    async with asyncio.timeout(60):
        while not (found := [each for each in caplog.records if words in each.getMessage()]):
            await asyncio.sleep(0.001)
    (record,) = found
    return record


@pytest.mark.parametrize(
    ("end", "level", "words"),
    [
        (DONE, "INFO", "SUCCEEDED, 122 moved, 0 active, 0 blocked, 0 failed"),
        (
            replace(WAITING, status="FAILED", failed=2, blocked=0, message="units remain"),
            "WARNING",
            "FAILED, 78 moved, 0 active, 0 blocked, 2 failed; units remain",
        ),
        (
            MasterRefused("JOB_NOT_FOUND"),
            "WARNING",
            "FAILED, 78 moved, 0 active, 44 blocked, 0 failed; JOB_NOT_FOUND",
        ),
    ],
)
async def test_that_a_drain_waits_and_how_it_ends_is_in_the_log_once(
    caplog: pytest.LogCaptureFixture, end: DrainJob | MasterRefused, level: str, words: str
) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet()
    worker = fleet.add("http://127.0.0.1:9001", "w1", "127.0.0.1:5559")
    master = Master(*[WAITING] * 9, end)
    drains = Drains(cast(PoolView, master), look_s=0.002, stuck_s=0.008)
    await drains.start(worker)
    fleet.cordon("w1", True)
    reasons = readiness(fleet, None, [], drains=drains.running()).reasons
    assert "worker w1 is cordoned and drains: RUNNING, 78 moved, 0 active, 44 blocked, 0 failed" in reasons
    ended = await said(caplog, "drain ended")
    assert (ended.levelname, ended.getMessage()) == (level, f"worker w1: drain ended: {words}")
    stuck = await said(caplog, "does not move on")
    assert "78 moved, 0 active, 44 blocked, 0 failed; blocked objects were read" in stuck.getMessage()
    assert drains.running() == {}
    asked = master.asked
    await drains.progress("w1")
    assert master.asked == asked
    await drains.close()


@pytest.mark.parametrize("end", ["stop", "follow", "close"])
async def test_a_drain_that_nobody_waits_for_is_not_asked_about(end: str) -> None:
    worker = Fleet().add("http://127.0.0.1:9001", "w1", "127.0.0.1:5559")
    drains = Drains(cast(PoolView, Master(WAITING)), look_s=0.001)
    await drains.start(worker)
    (watch,) = [task for task in asyncio.all_tasks() if "_watch" in repr(task.get_coro())]
    ends: dict[str, Callable[[], object]] = {
        "stop": lambda: drains.stop(worker),
        "follow": lambda: drains.follow("removed", worker),
        "close": drains.close,
    }
    if (ending := ends[end]()) is not None:
        await cast(asyncio.Future[None], ending)
    async with asyncio.timeout(60):
        await asyncio.wait([watch])
    assert watch.cancelled()


async def test_a_worker_back_in_service_after_its_drain_is_told_to_need_a_new_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Fleet().add("http://127.0.0.1:9001", "w1", "127.0.0.1:5559")
    drains = Drains(cast(PoolView, Master(DONE)))
    await drains.start(worker)
    await drains.stop(worker)
    assert caplog.messages == [
        "worker w1: its pool segment stays closed (DRAINED) until its process starts anew"
    ]
    assert await drains.progress("w1") is None
