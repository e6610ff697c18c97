"""A limit on waiting, and how it gets along with cancellation from elsewhere."""

import asyncio

import pytest

from gateway.deadline import Deadline
from tests.clock import LeapingLoop


async def test_what_takes_too_long_is_interrupted_once() -> None:
    with pytest.raises(TimeoutError), Deadline.after(0.01):
        await asyncio.sleep(3600)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_time_in_which_the_loop_is_held_up_is_no_time_to_look() -> None:
    loop, came = asyncio.get_running_loop(), asyncio.Event()
    assert isinstance(loop, LeapingLoop)

    def hold_up(passes: int) -> None:
        loop.leap(0.03)
        if passes:
            loop.call_soon(hold_up, passes - 1)
        else:
            came.set()

    loop.call_soon(hold_up, 4)
    with Deadline.after_looking(0.05):
        await came.wait()
    with pytest.raises(TimeoutError), Deadline.after_looking(0.05):
        await asyncio.sleep(3600)
    with Deadline.after_looking(0):
        await asyncio.sleep(0.03)


async def test_who_is_told_twice_that_time_is_up_is_interrupted_once() -> None:
    async def told_twice() -> None:
        with Deadline(None) as limit:
            limit.expire()
            limit.expire()
            await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        await told_twice()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_a_cancelled_task_still_does_has_limits_too() -> None:
    tidied: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            with pytest.raises(TimeoutError), Deadline.after(0.01):
                await asyncio.sleep(3600)
            tidied.append("in time")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert tidied == ["in time"]
    assert task.cancelled()


async def test_what_is_done_in_time_is_not_and_0_is_no_limit() -> None:
    with Deadline.after(0.01):
        pass
    with Deadline.after(0), Deadline(None):
        await asyncio.sleep(0.03)


async def sleep_for(seconds: float) -> None:
    with Deadline.after(seconds):
        await asyncio.sleep(3600)


async def test_the_outer_of_two_is_the_one_that_is_told() -> None:
    inner = asyncio.create_task(sleep_for(3600))
    with pytest.raises(TimeoutError), Deadline.after(0.01):
        await inner
    assert inner.cancelled()


async def test_of_two_that_expire_at_once_each_takes_its_own() -> None:
    with pytest.raises(TimeoutError), Deadline.after(0.01):
        await sleep_for(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_who_is_cancelled_from_elsewhere_is_cancelled() -> None:
    async def wait() -> None:
        with Deadline.after(3600):
            await asyncio.sleep(3600)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_cancelled_in_the_moment_it_expires_the_task_is_cancelled() -> None:
    limits: list[Deadline] = []

    async def wait() -> None:
        with Deadline(None) as limit:
            limits.append(limit)
            await asyncio.sleep(3600)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    limits[0].expire()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def fail(limit: Deadline) -> None:
    limit.expire()
    raise ZeroDivisionError


async def test_an_error_of_the_block_is_the_blocks() -> None:
    with pytest.raises(ZeroDivisionError), Deadline.after(0.01) as limit:
        fail(limit)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
