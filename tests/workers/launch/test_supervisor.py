import asyncio

import pytest

from workers.launch.supervisor import RESTARTS, ProcessFailed, Supervisor


class Process:
    """A process of this test's own making: dies when told to, records what was asked of it."""

    def __init__(self, name: str, journal: list[str]) -> None:
        self.name = name
        self.journal = journal
        self.exit: asyncio.Future[int] = asyncio.Future()
        self.fail_start = False
        self.started = asyncio.Semaphore(0)

    async def start(self) -> None:
        if self.fail_start:
            raise OSError("no such program")
        self.exit = asyncio.Future()
        self.journal.append(f"start {self.name}")
        self.started.release()

    async def wait(self) -> int:
        return await self.exit

    async def stop(self, grace_s: float) -> None:
        self.journal.append(f"stop {self.name} {grace_s:.0f}")

    def last_lines(self, lines: int) -> str:
        return f"last words of {self.name}"

    async def dies(self, code: int = -9) -> None:
        self.exit.set_result(code)


@pytest.fixture
def journal() -> list[str]:
    return []


@pytest.fixture
async def supervisor(journal: list[str]) -> Supervisor:
    return Supervisor(lambda line: journal.append(line))


async def test_groups_stop_in_reverse_order_each_with_its_grace(
    supervisor: Supervisor, journal: list[str]
) -> None:
    await supervisor.start([Process("pool", journal)], grace_s=2)
    await supervisor.start([Process("a", journal), Process("b", journal)], grace_s=3)
    await supervisor.start([Process("gateway", journal)], grace_s=4)
    await supervisor.stop()
    assert journal == [
        *("start pool", "start a", "start b", "start gateway"),
        *("stop gateway 4", "stop a 3", "stop b 3", "stop pool 2"),
    ]


async def test_a_dead_process_is_named_with_its_last_words_and_started_again(
    supervisor: Supervisor, journal: list[str]
) -> None:
    process = Process("worker-1", journal)
    await supervisor.start([process], grace_s=1)
    await process.started.acquire()
    await process.dies(-9)
    await process.started.acquire()
    report = journal[1]
    assert "worker-1 was killed by signal 9" in report
    assert "last words of worker-1" in report
    assert not supervisor.failure.done()
    await supervisor.stop()


async def test_a_process_that_keeps_dying_ends_the_fleet(supervisor: Supervisor, journal: list[str]) -> None:
    process = Process("worker-1", journal)
    await supervisor.start([process], grace_s=1)
    for _ in range(RESTARTS + 1):
        await process.started.acquire()
        await process.dies(1)
    with pytest.raises(ProcessFailed, match="keeps failing"):
        await supervisor.failure
    await supervisor.stop()


async def test_a_process_that_cannot_be_started_again_ends_the_fleet(
    supervisor: Supervisor, journal: list[str]
) -> None:
    process = Process("worker-1", journal)
    await supervisor.start([process], grace_s=1)
    process.fail_start = True
    await process.dies()
    with pytest.raises(ProcessFailed, match="no such program"):
        await supervisor.failure
    await supervisor.stop()


async def test_the_death_of_a_process_that_may_not_be_restarted_ends_the_fleet_at_once(
    supervisor: Supervisor, journal: list[str]
) -> None:
    gateway = Process("gateway", journal)
    await supervisor.start([gateway], grace_s=1, restart=False)
    await gateway.dies(1)
    with pytest.raises(ProcessFailed, match="gateway ended with exit code 1"):
        await supervisor.failure
    assert journal == ["start gateway"]
    await supervisor.stop()


async def test_a_failed_start_says_which_and_still_stops_the_group(
    supervisor: Supervisor, journal: list[str]
) -> None:
    good, bad = Process("worker-1", journal), Process("worker-2", journal)
    bad.fail_start = True
    with pytest.raises(ProcessFailed, match="worker-2 did not start: no such program"):
        await supervisor.start([good, bad], grace_s=1)
    await supervisor.stop()
    assert {"stop worker-1 1", "stop worker-2 1"} <= set(journal)


async def test_one_after_the_other_means_that_the_next_waits_for_the_one_before(
    supervisor: Supervisor, journal: list[str]
) -> None:
    first, second = Process("first", journal), Process("second", journal)
    first.fail_start = True
    with pytest.raises(ProcessFailed, match="first"):
        await supervisor.start([first, second], grace_s=1, together=False)
    assert journal == []
    await supervisor.stop()


async def test_nothing_is_restarted_while_stopping(supervisor: Supervisor, journal: list[str]) -> None:
    process = Process("worker-1", journal)
    await supervisor.start([process], grace_s=1)
    stopping = asyncio.create_task(supervisor.stop())
    await process.dies(0)
    await stopping
    assert journal == ["start worker-1", "stop worker-1 1"]
