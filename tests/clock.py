"""Clocks for bounds on time, on machines that are slow, or do other things as well."""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

_SCHEDULED = Path("/proc/thread-self/schedstat")


def unhindered() -> float:
    """Seconds as `time.perf_counter` counts them, less those that this thread was ready and no core was free.

    Differences are for one thread. Where the kernel does not tell, they are those of `time.perf_counter`.
    """
    try:
        waited = int(_SCHEDULED.read_text().split()[1]) / 1e9
    except OSError:
        waited = 0.0
    return time.perf_counter() - waited


def cpu_seconds(pid: int) -> float:
    """That a process has used so far: what waits for a core, or is stopped, uses none."""
    return time.clock_gettime(~pid << 3 | 2)


async def once_in_time(attempt: Callable[[], Awaitable[Iterable[tuple[float, float]]]]) -> None:
    """Of three attempts, each from the same beginning, one takes less than its limits.

    attempt: returns pairs of seconds and their limit. A busy machine may be late for any, a fault is for all.
    """
    found: list[list[tuple[float, float]]] = []
    for _ in range(3):
        found.append(list(await attempt()))
        if all(seconds < limit for seconds, limit in found[-1]):
            return
    raise AssertionError(found)


def cpu_share(work: Callable[[], object], of: Callable[[], object]) -> float:
    """CPU seconds of `work` by those of `of`, the least of three each, in turns: the machine cancels out."""
    least = [float("inf")] * 2
    for _ in range(3):
        for which, each in enumerate((work, of)):
            began = time.process_time()
            each()
            least[which] = min(least[which], time.process_time() - began)
    return least[0] / least[1]


class LeapingLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything can be done, and else leaps to the next timer.

    For tests without threads and sockets, whose timers no busy machine can then bring together.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_LeapingSelector(self.leap))

    def time(self) -> float:
        return self._now

    def leap(self, seconds: float) -> None:
        self._now += seconds


class _LeapingSelector(selectors.DefaultSelector):
    def __init__(self, leap: Callable[[float], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self._leap(timeout)
            timeout = 0
        return super().select(timeout)
