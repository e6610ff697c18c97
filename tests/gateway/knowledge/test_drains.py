"""Drains that the master refuses to stop."""

from typing import cast

import pytest

from gateway import errors
from gateway.knowledge.drains import Drains
from store.mooncake_http import Drain, MasterRefused
from store.pool import PoolView
from workers.fleet import Fleet

DRAIN = Drain("job", "RUNNING", moved=3, failed=0, blocked=0, active=1, moved_bytes=96, message="")


class MovingMaster:
    """As a master answers while a block is on its way."""

    async def drain(self, segment: str) -> str:
        return "job"

    async def drained(self, job: str) -> Drain:
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
