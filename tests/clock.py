"""Clocks for bounds on time, on machines that are slow, or do other things as well."""

import time
from collections.abc import Callable
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


def cpu_share(work: Callable[[], object], of: Callable[[], object]) -> float:
    """CPU seconds of `work` by those of `of`, the least of three each, in turns: the machine cancels out."""
    least = [float("inf")] * 2
    for _ in range(3):
        for which, each in enumerate((work, of)):
            began = time.process_time()
            each()
            least[which] = min(least[which], time.process_time() - began)
    return least[0] / least[1]
