"""A clock for bounds on time, on a machine that does other things as well."""

import time
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
